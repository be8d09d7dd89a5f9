"""The optimizer of the policy and the schedule of its learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from winnow.config.base import Decay, Section


class OptimConfig(Section):
    """AdamW. Schedules count steps (rollout steps), never updates."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; step k of them runs at lr*k/warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after warm-up; linear and cosine end at `final_lr_ratio`."""
    final_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of lr at the end of linear and cosine."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's two decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Bound on the gradient's norm; null leaves it as it is."""
    max_skipped_updates: int = Field(5, ge=1)
    """Non-finite gradients in a row after which the run stops."""
