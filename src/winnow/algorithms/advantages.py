"""How much better than expected an answer was.

Outcome estimators take rewards [B] and groups [B] first, their options by keyword, and give one
number a sample, which the caller spreads over the tokens that the policy wrote.

Shapes: `B` samples of a step, `P` groups (prompts) among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

STD_EPS = 1e-6
FLAT_TOLERANCE = 1e-6
"""Rewards of a group within this of each other (times the largest, if above 1) are equal."""


def grpo(
    rewards: Tensor,
    groups: Tensor,
    std_normalization: Literal["group", "batch", "none"] = "group",
) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Standard deviations take Bessel's correction. A group of one has mean 0 and std 1. Rewards
    that are equal but for float noise (`FLAT_TOLERANCE`) give exactly 0, where plain arithmetic
    would divide noise by noise and give +-1.

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, in any order.
        std_normalization: divide by the group's std; by that of all rewards ("batch", Lite PPO,
            arXiv 2508.08221); or not ("none", Dr. GRPO, arXiv 2503.20783).

    Returns:
        [B] in the rewards' dtype.

    Raises:
        ValueError: a reward that is not finite, shapes that differ, or an unknown normalization.
    """
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards and groups must both be [B], got {list(rewards.shape)} and "
            f"{list(groups.shape)}"
        )
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("rewards must be finite, got NaN or infinity; check the scorer")
    R_B = rewards.double()
    index_B, size_P = _ordinals(groups)
    alone_B = (size_P == 1)[index_B]
    centred_B = torch.where(alone_B, R_B, _centred(R_B, index_B, size_P))
    if std_normalization == "group":
        square_P = torch.zeros_like(size_P, dtype=R_B.dtype).index_add_(0, index_B, centred_B**2)
        std_B = (square_P / (size_P - 1).clamp(min=1)).sqrt()[index_B]
        advantage_B = centred_B / (std_B.masked_fill(alone_B, 1.0) + STD_EPS)
    elif std_normalization == "batch":
        std = R_B.std() if len(R_B) > 1 else R_B.new_ones(())
        advantage_B = centred_B / (std + STD_EPS)
    elif std_normalization == "none":
        advantage_B = centred_B
    else:
        raise ValueError(
            f"std_normalization must be group, batch or none, got {std_normalization!r}"
        )
    return advantage_B.to(rewards.dtype)


ADVANTAGES: Mapping[str, Callable[..., Tensor]] = {"grpo": grpo}


def _ordinals(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's group as an ordinal [B], and the groups' sizes [P]."""
    _, index_B, size_P = torch.unique(groups, return_inverse=True, return_counts=True)
    return index_B, size_P


def _centred(R_B: Tensor, index_B: Tensor, size_P: Tensor) -> Tensor:
    """R minus its group's mean [B]; exactly 0 in a group whose rewards are all equal."""
    mean_P = torch.zeros_like(size_P, dtype=R_B.dtype).index_add_(0, index_B, R_B) / size_P
    low_P = torch.full_like(mean_P, torch.inf).scatter_reduce_(0, index_B, R_B, "amin")
    high_P = torch.full_like(mean_P, -torch.inf).scatter_reduce_(0, index_B, R_B, "amax")
    scale_P = torch.maximum(low_P.abs(), high_P.abs()).clamp(min=1.0)
    flat_P = high_P - low_P <= FLAT_TOLERANCE * scale_P
    return (R_B - mean_P[index_B]).masked_fill(flat_P[index_B], 0.0)
