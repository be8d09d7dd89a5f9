"""The critic: a value model with an optimizer of its own, for advantages that need values."""

from __future__ import annotations

from pydantic import Field

from winnow.config.base import Section
from winnow.config.model import Dtype
from winnow.config.optim import OptimConfig
from winnow.config.value_loss import ValueLossConfig


class CriticConfig(Section):
    """A value head on a model of its own; unused unless algorithm/advantage needs values."""

    path: str | None = None
    """Folder of the model it starts from, a causal LM or a token classifier with one label; null
    is the policy's start."""
    dtype: Dtype | None = None
    """Type of weights and activations; null is model.dtype. The head is always float32."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its optimizer."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """What it minimizes."""
    warmup_steps: int = Field(0, ge=0)
    """First steps of the run, in which only the critic learns."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Packed tokens run at once; null is trainer.microbatch_tokens."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
