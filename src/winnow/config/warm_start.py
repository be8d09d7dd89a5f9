"""A start made by supervised fine-tuning where no model folder is given."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Decay, Section


class NoWarmStart(Section):
    """Train from `model.path` as it is."""

    name: Literal["none"] = "none"


class TinyModelConfig(Section):
    """A small Qwen3-architecture model, made from scratch."""

    hidden_size: int = Field(64, ge=8)
    """Width."""
    layers: int = Field(2, ge=1)
    """Depth."""
    heads: int = Field(4, ge=1)
    """Attention heads, as many for keys and values."""
    head_dim: int = Field(16, ge=2)
    """Width of a head."""
    mlp_size: int = Field(192, ge=8)
    """Width of the feed-forward layer."""


class DemonstrationConfig(Section):
    """The mix of demonstrations; the rest of the shares is rambling without an end."""

    guess_share: float = Field(0.5, ge=0, le=1)
    """Answers without working: digits sorted by key plus noise."""
    guess_noise: float = Field(3.0, ge=0)
    """Standard deviation of that noise."""
    working_share: float = Field(0.25, ge=0, le=1)
    """Correct worked selection sorts."""
    step_error: float = Field(0.01, ge=0, le=1)
    """Chance that a written step of a chain is wrong."""
    repeat: float = Field(0.75, ge=0, lt=1)
    """Chance that a rambling chain starts over after a question mark."""


class SftWarmStart(Section):
    """Teach a tiny model a generated task by demonstrations; cached by config, code and seed."""

    name: Literal["sft"] = "sft"
    model: TinyModelConfig = TinyModelConfig()
    """The model to make."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """What it is shown."""
    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations a step."""
    lr: float = Field(5e-3, gt=0)
    """Peak learning rate (AdamW, cosine to zero)."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """AdamW's two decay rates."""
    grad_clip: float = Field(1.0, gt=0)
    """Bound on the gradient's norm."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Seed of model and demonstrations; null takes run.seed."""
    cache_dir: str | None = None
    """Where finished starts are kept; null is WINNOW_CACHE or ~/.cache/winnow."""


WarmStart = Annotated[NoWarmStart | SftWarmStart, Field(discriminator="name")]
