"""GGUF, the format of llama.cpp: conversion to a Hugging Face folder.

transformers reads the file; the package `gguf` (an extra) computes the weights that its blocks of
integers and scales stand for. They are written as float32, which holds them exactly.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path

_EXACT = {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}
"""Types of tensors that are not quantized."""
DEQUANTISED = "dequantised_from"
"""Key of a converted config.json with the types that weights were quantized to."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file as a Hugging Face folder.

    Raises:
        ValueError: weights are missing in it, as in a part of a split file.
        Exception: of transformers or gguf, which have no common one for what they cannot read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with contextlib.redirect_stderr(io.StringIO()):  # bars, of which one cannot be switched off
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model, loading = AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.float32, output_loading_info=True
        )
        if missing := loading["missing_keys"]:
            raise ValueError(f"weights are missing ({len(missing)}, such as {min(missing)})")
        # transformers writes no model that it has read from blocks, though it holds floats now.
        model.hf_quantizer = None
        del model.config.quantization_config
        if types := quantized_types(file):
            setattr(model.config, DEQUANTISED, " and ".join(types))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # written for their owner alone
        weights.chmod((folder / "config.json").stat().st_mode)


def quantized_types(file: Path) -> list[str]:
    """List the types of a file's quantized tensors, that of most bytes first."""
    from gguf import GGUFReader

    sizes = Counter[str]()
    for tensor in GGUFReader(file).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return [name for name, _ in sizes.most_common() if name not in _EXACT]
