"""Which model is trained, what of it is trained, and how it is held."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section

Dtype = Literal["float32", "bfloat16"]


class NoAdapter(Section):
    """Train the model's own weights."""

    name: Literal["none"] = "none"


class LoraAdapter(Section):
    """Train a low-rank adapter (arXiv 2106.09685) beside frozen weights; needs winnow[peft]."""

    name: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1)
    """Rank of each update B A."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropped inputs of the adapter while gradients are computed, never in rollouts: with more
    than 0, gradients depend on the order of a step's samples."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get one, by the end of their names; all-linear is all but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv 2312.03732)."""


Adapter = Annotated[NoAdapter | LoraAdapter, Field(discriminator="name")]


class ModelConfig(Section):
    """A Hugging Face folder with model and tokenizer."""

    path: str | None = None
    """Folder (or hub name) of the model; null where a warm start makes one."""
    tokenizer: str | None = None
    """Folder of the tokenizer; null takes the model's own."""
    dtype: Dtype = "float32"
    """Type of weights and activations."""
    fp32_head: bool = False
    """Compute the logits of a bfloat16 model in float32, in training and rollouts alike."""
    adapter: Adapter = NoAdapter()
    """What is trained in the place of the model's own weights."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by patterns of their names, such as *.embed_tokens.*"""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
