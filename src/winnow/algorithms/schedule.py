"""Schedules of the learning rate over the steps of a run."""

from __future__ import annotations

import math
from typing import Literal


def lr_at(
    step: int,
    *,
    total_steps: int,
    lr: float,
    warmup_steps: int = 0,
    schedule: Literal["constant", "linear", "cosine"] = "constant",
    final_lr_ratio: float = 0.0,
) -> float:
    """Return the learning rate of every update of `step`.

    Warm-up step k runs at lr * k / warmup_steps, so the peak is at step max(warmup_steps, 1).
    From there linear and cosine fall to lr * final_lr_ratio, which they would reach one step after
    the last, so that no step is spent on a rate of zero.

    Args:
        step: counted from 1, in steps (not updates).
        total_steps: of the run; later steps have the final rate.
        lr: the peak.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    if schedule == "constant":
        return lr
    peak = max(warmup_steps, 1)
    done = min((step - peak) / max(total_steps + 1 - peak, 1), 1.0)
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return lr * (final_lr_ratio + (1 - final_lr_ratio) * left)
