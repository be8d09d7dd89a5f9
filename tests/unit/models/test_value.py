"""Where a critic or a reward model is loaded from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma2Config,
    GPT2Config,
    Olmo2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from winnow.errors import ModelError
from winnow.models.causal_lm import hidden_states
from winnow.models.folders import quiet_transformers
from winnow.models.packed_attention import PackedLayout
from winnow.models.value import load_value_model, scalar_head

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    # transformers has no class with such a head for this family, or one of another name.
    "olmo2": Olmo2Config(**SIZES, **SPECIAL),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, **SPECIAL),
    "gemma2": Gemma2Config(**SIZES, **SPECIAL, head_dim=8, query_pre_attn_scalar=8),
}


PAIRS = pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3", torch.bfloat16), *((name, torch.float32) for name in CONFIGS)]
)


def folder_of(name: str, auto: Any, folder: Path, labels: int = 1) -> Path:
    torch.manual_seed(0)
    config = CONFIGS[name]
    config.num_labels = labels
    with quiet_transformers():
        auto.from_config(config).save_pretrained(folder)
    return folder


def load_critic(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_value_model(str(folder), dtype, CPU)


def states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return hidden_states(model, ids, torch.arange(len(ids)), PackedLayout([len(ids)], CPU))


@PAIRS
def test_a_causal_lm_gets_a_head_of_zero_in_fp32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = folder_of(name, AutoModelForCausalLM, tmp_path)
    model = load_critic(folder, dtype)
    head = scalar_head(model)
    assert head.weight.shape == (1, 16)
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert not head.weight.any()
    assert not head.bias.any()
    ids = torch.arange(9)
    with quiet_transformers():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().base_model
    with torch.no_grad():
        wanted = theirs(ids[None]).last_hidden_state[0]
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(states(model, ids), wanted, atol=tolerance, rtol=tolerance)


@PAIRS
def test_a_saved_critic_comes_back_with_the_same_bits_and_qwen3s_loads_in_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load_critic(folder_of(name, AutoModelForCausalLM, tmp_path / "start"), dtype)
    torch.nn.init.normal_(scalar_head(model).weight)
    torch.nn.init.normal_(scalar_head(model).bias)
    model.save_pretrained(tmp_path / "saved")
    again = load_critic(tmp_path / "saved", dtype).state_dict()
    for key, tensor in model.state_dict().items():
        assert again[key].dtype == tensor.dtype
        assert torch.equal(again[key], tensor), key
    if name != "qwen3" or dtype != torch.float32:
        return
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved").eval()
    ids = torch.arange(9)
    with torch.no_grad():
        values = theirs(ids[None]).logits[0]
        torch.testing.assert_close(scalar_head(model)(states(model, ids)), values)


def test_a_critic_may_start_as_a_reward_model_whose_head_it_takes(tmp_path: Path) -> None:
    folder = folder_of("qwen3", AutoModelForSequenceClassification, tmp_path)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    head = scalar_head(load_critic(folder))
    assert theirs.score.weight.any()
    assert torch.equal(head.weight, theirs.score.weight)
    assert not head.bias.any()


def test_several_labels_are_refused(tmp_path: Path) -> None:
    folder = folder_of("qwen3", AutoModelForTokenClassification, tmp_path, labels=3)
    with pytest.raises(ModelError, match=r"path .*has 3 labels.*one label") as caught:
        load_value_model(str(folder), torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_a_critic_whose_head_was_lost_does_not_start_anew(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = folder_of("qwen3", AutoModelForTokenClassification, tmp_path)
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("score.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"critic\.path .*missing \(2, such as score\.bias\)"):
        load_critic(folder)


@pytest.mark.parametrize("broken", ["config", "family", "nothing"])
def test_a_folder_that_is_no_model_is_refused_by_the_key_that_gave_it(
    broken: str, tmp_path: Path
) -> None:
    folder = folder_of("qwen3", AutoModelForCausalLM, tmp_path)
    if broken == "config":
        (folder / "config.json").write_text("{")
    elif broken == "family":
        given = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(given | {"model_type": "nonesuch"}))
    else:
        (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"^critic\.path /") as caught:
        load_critic(folder)
    assert "\n" not in str(caught.value)
