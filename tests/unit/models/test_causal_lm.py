"""Saving models and tokenizers: their files, and a temporary folder that takes none of them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.small_models import digits_model
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from winnow.config.model import LoraAdapter
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ModelError
from winnow.models.causal_lm import load_causal_lm, save_model
from winnow.models.folders import tokenizer_files, write_files
from winnow.models.lora import adapter_weights, adapter_writer, add_lora


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_tokenizer_is_written_as_it_saves_itself(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    files = tokenizer_files(tokenizer)
    write_files(files, tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "its")
    names = {path.name for path in (tmp_path / "its").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names >= {"tokenizer.json"}
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "its" / name).read_bytes()


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_tokenizer_is_written_the_same_with_and_without_a_network(
    tmp_path: Path, is_offline: bool
) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=is_offline)
    settings = json.loads(tokenizer_files(tokenizer)[Path("tokenizer_config.json")])
    assert "local_files_only" not in settings


def test_a_hollow_model_reads_the_files_that_its_folder_names_and_no_others(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    made = digits_model()
    made.save_pretrained(tmp_path)
    weights = {n: tensor.clone() for n, tensor in made.named_parameters()}
    save_file({n: tensor + 1 for n, tensor in weights.items()}, tmp_path / "model_ema.safetensors")

    def first_row() -> Tensor:
        hollow = load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)
        rows: Tensor = cast(Any, hollow).saved_weights.part(name, [slice(0, 1)])
        return rows

    assert torch.equal(first_row(), weights[name][:1])
    (tmp_path / "model.safetensors").rename(tmp_path / "part-1.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "part-1.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(first_row(), weights[name][:1])


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_saved_weights_may_be_read_by_those_who_may_read_any_new_file(
    umask: int, mode: int, adapter: bool, tmp_path: Path
) -> None:
    model = digits_model()
    before = os.umask(umask)
    try:
        if adapter:
            add_lora(model, LoraAdapter(rank=2), seed=0)
            weights = dict(adapter_weights(model))
            adapter_writer(model, build_tokenizer())(weights, tmp_path)
        else:
            save_model(model, build_tokenizer(), tmp_path)
    finally:
        os.umask(before)
    (file,) = tmp_path.glob("*.safetensors")
    assert oct(file.stat().st_mode & 0o777) == oct(mode)


@pytest.mark.parametrize("size", [0, 300])  # Python's own file is refused, then the library's
def test_a_full_folder_for_temporary_files_is_one_line_and_nothing_stays_there(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tokenizer = build_tokenizer()
    with largest_file(size), pytest.raises(ModelError) as caught:
        tokenizer_files(tokenizer)
    assert str(caught.value) == (
        "cannot write the tokenizer to the folder for temporary files: File too large; "
        "free some space there, or choose another one with TMPDIR=FOLDER"
    )
    assert list(tmp_path.iterdir()) == []


def test_experts_that_no_name_leads_to_are_told(tmp_path: Path) -> None:
    digits_model(experts=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    gate = "model.layers.0.mlp.experts.3.gate_proj.weight"
    less = {name: tensor for name, tensor in weights.items() if name != gate}
    save_file(less, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"weights are missing \(1, such as {gate}\)"):
        load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)
    save_file(less | {gate: weights[gate][:3]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"of another shape \(1, such as .*experts.gate_up_proj"):
        load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)
    others = {name.replace("_proj.weight", ".w"): tensor for name, tensor in weights.items()}
    save_file(others, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"has experts whose weights .*; set trainer/strategy=single"
    ):
        load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)


def test_a_hollow_model_has_the_buffers_of_its_folder(tmp_path: Path) -> None:
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(
        **ranks, **experts, vocab_size=29, hidden_size=16, intermediate_size=16, v_head_dim=8,
        moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, first_k_dense_replace=1,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", torch.tensor([1.0, -2, 3, 0.5])
    model.get_buffer(name).copy_(bias)
    model.save_pretrained(tmp_path)
    hollow = load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)
    assert hollow.get_buffer(name).tolist() == bias.tolist()
    weights = load_file(tmp_path / "model.safetensors")
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"weights are missing \(1, such as {name}\)"):
        load_causal_lm(str(tmp_path), torch.float32, torch.device("cpu"), hollow=True)
