"""Loading tokenizers, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from winnow.data.sort_digits import build_tokenizer
from winnow.data.tokenizer import load_tokenizer, stop_token_ids
from winnow.errors import ModelError


def error_of(path: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(path)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "a/b/c", "~/no-such-folder"])
def test_a_missing_folder_is_refused_without_asking_a_hub(path: str) -> None:
    assert error_of(path) == (
        f"model.path {path}: no such folder; give a Hugging Face model folder or a hub name"
    )


def test_a_name_that_only_a_hub_could_know_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no-such-folder", "nobody/no-such-model", "not a name"):
        message = error_of(name)
        assert message.startswith(
            f"model.path {name}: no such folder; a model of that name cannot be had from https://"
        )
        assert "; check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk" in message
    assert capfd.readouterr().err == ""


def test_a_name_in_a_folder_that_is_here_is_not_looked_for_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert error_of("models/qwen").startswith("model.path models/qwen: no such folder; give")


def test_the_field_that_named_the_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model\.tokenizer /nowhere: no such folder"):
        load_tokenizer("/nowhere", field="model.tokenizer")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert error_of(str(tmp_path)) == (
        f"model.path {tmp_path}: the folder has no tokenizer (such as tokenizer.json); copy the "
        "tokenizer's files from where the model comes from into it"
    )


def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"half": ')
    message = error_of(str(tmp_path))
    assert message.startswith(f"model.path {tmp_path}: cannot load its tokenizer: ")
    assert "\n" not in message


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    assert error_of(str(tmp_path)) == (
        f"model.path {tmp_path}: its tokenizer has no end-of-sequence token, so no answer could "
        "end; set eos_token in tokenizer_config.json"
    )


@pytest.mark.parametrize(
    ("named", "ids"),
    [(None, (1,)), (1, (1,)), (7, (1, 7)), ([7, 1, 9], (1, 7, 9)), ([], (1,))],
)
def test_answers_end_with_eos_and_what_the_model_folder_names(
    named: object, ids: tuple[int, ...], bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert stop_token_ids(bpe, str(tmp_path)) == ids


@pytest.mark.parametrize(
    ("loaded", "ids"), [(None, (1,)), (1, (1,)), (7, (1, 7)), ([7, 1, 9], (1, 7, 9))]
)
def test_answers_end_with_what_the_loaded_model_names(
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


def test_a_generation_config_that_is_not_json_is_refused(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text("{")
    with pytest.raises(ModelError) as caught:
        stop_token_ids(bpe, str(tmp_path))
    message = str(caught.value)
    assert message.startswith(f"{file}: not readable as JSON (")
    assert message.endswith("); mend or remove it")


def test_a_generation_config_with_a_wrong_eos_is_refused(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": "end"}')
    with pytest.raises(ModelError) as caught:
        stop_token_ids(bpe, str(tmp_path))
    assert str(caught.value) == (
        f"{file}: eos_token_id must be a token id or a list of them, got ['end']; mend or remove "
        "the file"
    )
