"""Loading tokenizers, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from winnow.data.tokenizer import load_tokenizer, stop_token_ids
from winnow.errors import ModelError
from winnow.models.causal_lm import load_causal_lm


def error_of(path: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(path)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "a/b/c", "~/no-such-folder"])
def test_a_missing_folder_is_refused_without_asking_a_hub(path: str) -> None:
    assert error_of(path) == (
        f"model.path {path}: no such folder; give a Hugging Face model folder or a hub name"
    )


def test_code_that_comes_with_a_folder_asks_for_the_key_that_runs_it(tmp_path: Path) -> None:
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    own["AutoTokenizer"] = "own.OwnTokenizer"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    remedy = "; it brings its own Python code, which model.trust_remote_code=true runs"
    with pytest.raises(ModelError) as caught:
        load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"))
    assert str(caught.value).endswith(remedy)
    words = json.dumps({"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}})
    (tmp_path / "tokenizer_config.json").write_text(words)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert error_of(str(tmp_path)).endswith(remedy)


def test_a_name_that_only_a_hub_could_know_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no-such-folder", "nobody/no-such-model", "not a name"):
        message = error_of(name)
        assert message.startswith(
            f"model.path {name}: no such folder; a model of that name cannot be downloaded from https://"
        )
        assert "; check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk" in message
    assert capfd.readouterr().err == ""


def test_a_name_in_a_folder_that_is_here_is_not_looked_for_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert error_of("models/qwen").startswith("model.path models/qwen: no such folder; give")


@pytest.mark.parametrize(
    ("loaded", "ids"), [(None, (1,)), (1, (1,)), (7, (1, 7)), ([7, 1, 9], (1, 7, 9)), ([], (1,))]
)
def test_answers_end_with_eos_and_what_the_loaded_model_or_its_folder_names(
    loaded: object, ids: tuple[int, ...], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    assert stop_token_ids(bpe, "owner/name", loaded) == ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    both = dict.fromkeys([*ids, 5, 9])
    assert stop_token_ids(bpe, str(tmp_path), loaded) == tuple(both)


def test_without_a_generation_config_eos_alone_ends_an_answer(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    assert stop_token_ids(bpe) == stop_token_ids(bpe, str(tmp_path)) == (1,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r"not readable as JSON \(.*\); fix or remove it"),
        ('{"eos_token_id": "end"}', r"eos_token_id must be .*, got \['end'\]; fix or remove the"),
    ],
)
def test_a_damaged_generation_config_is_refused(
    text: str, says: str, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json: " + says):
        stop_token_ids(bpe, str(tmp_path))
