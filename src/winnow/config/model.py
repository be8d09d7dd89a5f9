"""Which model is trained and how it is held."""

from __future__ import annotations

from typing import Literal

from winnow.config.base import Section


class ModelConfig(Section):
    """A Hugging Face folder with model and tokenizer."""

    path: str | None = None
    """Folder (or hub name) of the model; null where a warm start makes one."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null takes the model's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
