"""How much better than expected an answer was, as one number a sample.

Outcome estimators take rewards [B] and groups [B] first, their options by keyword; the caller
spreads what they give over the tokens that the policy wrote. `token_advantages` holds those that
tell the tokens of an answer apart, and those that are whitened.

In all of them a group of one has mean 0, and rewards of a group that are equal but for float
noise (`FLAT_TOLERANCE`) give exactly 0, where plain arithmetic would divide noise by noise.
Sums are float64; results have the rewards' dtype.

Shapes: `B` samples of a step, `P` groups (prompts) among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    Standard deviations take Bessel's correction. A group of one has mean 0 and std 1.

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
    grouped = _grouped(rewards, groups)
    advantage_B = grouped.centred()
    if std_normalization == "group":
        advantage_B = advantage_B / (grouped.std() + STD_EPS)
    elif std_normalization == "batch":
        R_B = grouped.R_B
        std = R_B.std() if len(R_B) > 1 else R_B.new_ones(())
        advantage_B = advantage_B / (std + STD_EPS)
    elif std_normalization != "none":
        raise ValueError(
            f"std_normalization must be group, batch or none, got {std_normalization!r}"
        )
    return advantage_B.to(rewards.dtype)


def grpo_passk(
    rewards: Tensor, groups: Tensor, *, std_normalization: Literal["group", "none"] = "group"
) -> Tensor:
    """The best answer's lead over the second best, others 0 (arXiv 2503.19595).

    Optimises the reward of the best of a prompt's answers. Two best answers have no lead.

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, in any order.
        std_normalization: divide by the group's std + 1e-6, or not ("none").

    Returns:
        [B] in the rewards' dtype.

    Raises:
        ValueError: a group of one, a reward that is not finite, shapes that differ, or an
            unknown normalization.
    """
    if std_normalization not in ("group", "none"):
        raise ValueError(f"std_normalization must be group or none, got {std_normalization!r}")
    grouped = _grouped(rewards, groups)
    require_company(groups, "grpo_passk")
    R_B = grouped.R_B
    ascending = torch.argsort(R_B)
    by_group = ascending[torch.argsort(grouped.index_B[ascending], stable=True)]
    last_P = grouped.size_P.cumsum(0) - 1
    best_P, second_P = by_group[last_P], by_group[last_P - 1]
    lead_P = (R_B[best_P] - R_B[second_P]).masked_fill(_equal(R_B[second_P], R_B[best_P]), 0.0)
    advantage_B = torch.zeros_like(R_B).index_put_((best_P,), lead_P)
    if std_normalization == "group":
        advantage_B = advantage_B / (grouped.std() + STD_EPS)
    return advantage_B.to(rewards.dtype)


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """R minus the mean of the group's other rewards (RLOO, arXiv 2402.14740).

    As n / (n - 1) * (R - mean_g) for a group of n. A group of one keeps its R.

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, in any order.

    Returns:
        [B] in the rewards' dtype.

    Raises:
        ValueError: a reward that is not finite, or shapes that differ.
    """
    grouped = _grouped(rewards, groups)
    size_B = grouped.size_P[grouped.index_B].double()
    return (size_B / (size_B - 1).clamp(min=1) * grouped.centred()).to(rewards.dtype)


def opo(rewards: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """R - sum(length * R) / sum(length) over the group (OPO, arXiv 2505.23585).

    A group of one has baseline 0; a group without a written token takes the plain mean.

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, in any order.
        lengths: [B] tokens that the policy wrote.

    Returns:
        [B] in the rewards' dtype.

    Raises:
        ValueError: a reward that is not finite, a negative length, or shapes that differ.
    """
    grouped = _grouped(rewards, groups)
    if lengths.shape != rewards.shape or bool((lengths < 0).any()):
        raise ValueError(
            f"lengths must be [{len(rewards)}] and at least 0, got {list(lengths.shape)}"
            f"{f' from {int(lengths.min())}' if lengths.numel() else ''}"
        )
    weight_B = lengths.double()
    no_token_B = (grouped.sum(weight_B) == 0)[grouped.index_B]
    return grouped.centred(weight_B.masked_fill(no_token_B, 1.0)).to(rewards.dtype)


def gpg(
    rewards: Tensor, groups: Tensor, *, alpha: Literal["groups", "nonzero_reward"] = "groups"
) -> Tensor:
    """alpha * (R - mean_g), GPG (arXiv 2504.02546).

    alpha = B / max(B - M, 1) makes up for the M samples in groups whose rewards are all equal,
    which teach nothing. A group of one keeps its R, teaches, and so does not count in M.

    Args:
        rewards: [B], finite.
        groups: [B] int64; equal numbers are one group, in any order.
        alpha: "groups", as above; "nonzero_reward", as verl: B / max(number of R != 0, 1).

    Returns:
        [B] in the rewards' dtype.

    Raises:
        ValueError: a reward that is not finite, shapes that differ, or an unknown alpha.
    """
    grouped = _grouped(rewards, groups)
    if alpha == "groups":
        active_B = (~grouped.flat_P | (grouped.size_P == 1))[grouped.index_B]
    elif alpha == "nonzero_reward":
        active_B = grouped.R_B != 0
    else:
        raise ValueError(f"alpha must be groups or nonzero_reward, got {alpha!r}")
    factor = len(rewards) / max(int(active_B.sum()), 1)
    return (factor * grouped.centred()).to(rewards.dtype)


def gdpo(
    components: Mapping[str, Tensor],
    groups: Tensor,
    *,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """sum_k w_k * GRPO(R_k), GDPO before its whitening (arXiv 2601.05242).

    Each component is normalised on its own, so that one of small range keeps its say.
    `token_advantages.gdpo_whitened` is the estimator as a whole.

    Args:
        components: rewards [B] each, finite, by name.
        groups: [B] int64; equal numbers are one group, in any order.
        weights: by name; components without one are left out. None or empty: 1 for each.

    Returns:
        [B] in the components' dtype.

    Raises:
        ValueError: no component, a weight of an unknown one, a reward that is not finite, or
            shapes that differ.
    """
    if not components:
        raise ValueError("gdpo needs at least one reward component, got none")
    weights = weights or dict.fromkeys(components, 1.0)
    unknown = [name for name in weights if name not in components]
    if unknown:
        raise ValueError(
            f"gdpo weights name {', '.join(unknown)}, but the reward components are "
            f"{', '.join(components)}"
        )
    dtype = float_dtype("components", next(iter(components.values())))
    parts = [weight * grpo(components[name].double(), groups) for name, weight in weights.items()]
    return torch.stack(parts).sum(0).to(dtype)


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    """R - mean_g [B] in the rewards' dtype; a group of one keeps its R.

    Raises:
        ValueError: a reward that is not finite, or shapes that differ.
    """
    return _grouped(rewards, groups).centred().to(rewards.dtype)


def require_company(groups: Tensor, estimator: str) -> None:
    """See to it that no group of `groups` [B] has one sample only.

    Raises:
        ValueError: one has.
    """
    numbers, sizes = torch.unique(groups, return_counts=True)
    if bool((sizes < 2).any()):
        alone = int(numbers[sizes < 2][0])
        raise ValueError(
            f"{estimator} needs at least 2 answers to a prompt, group {alone} has 1; "
            "raise rollout.n or choose another advantage"
        )


def float_dtype(name: str, values: Tensor) -> torch.dtype:
    """The dtype that results take: that of `values`.

    Raises:
        ValueError: integers, in which a result would lose its fraction.
    """
    if not values.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {values.dtype}")
    return values.dtype


@dataclass(frozen=True, eq=False)
class _Grouped:
    """Rewards, and which belong together."""

    R_B: Tensor
    """[B] float64."""
    index_B: Tensor
    """[B] int64: ordinal of the sample's group."""
    size_P: Tensor
    """[P] samples of each group."""
    flat_P: Tensor
    """[P] whether all rewards of the group are equal."""

    def sum(self, values_B: Tensor) -> Tensor:
        """[P] float64 sum over each group."""
        zeros_P = torch.zeros_like(self.size_P, dtype=torch.float64)
        return zeros_P.index_add_(0, self.index_B, values_B)

    def centred(self, weight_B: Tensor | None = None) -> Tensor:
        """[B] R minus the group's (weighted) mean; R in a group of one, exactly 0 in a flat one."""
        if weight_B is None:
            weight_B = torch.ones_like(self.R_B)
        mean_P = self.sum(weight_B * self.R_B) / self.sum(weight_B)
        away_B = (self.R_B - mean_P[self.index_B]).masked_fill(self.flat_P[self.index_B], 0.0)
        return torch.where((self.size_P == 1)[self.index_B], self.R_B, away_B)

    def std(self) -> Tensor:
        """[B] the group's standard deviation with Bessel's correction; 1 for a group of one."""
        square_P = self.sum(self.centred() ** 2)
        std_P = (square_P / (self.size_P - 1).clamp(min=1)).sqrt()
        return std_P.masked_fill(self.size_P == 1, 1.0)[self.index_B]


def _grouped(rewards: Tensor, groups: Tensor) -> _Grouped:
    """Check and group rewards [B] by groups [B]."""
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards and groups must both be [B], got {list(rewards.shape)} and "
            f"{list(groups.shape)}"
        )
    float_dtype("rewards", rewards)
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("rewards must be finite, got NaN or infinity; check the scorer")
    R_B = rewards.double()
    _, index_B, size_P = torch.unique(groups, return_inverse=True, return_counts=True)
    low_P = R_B.new_full(size_P.shape, torch.inf).scatter_reduce_(0, index_B, R_B, "amin")
    high_P = R_B.new_full(size_P.shape, -torch.inf).scatter_reduce_(0, index_B, R_B, "amax")
    return _Grouped(R_B, index_B, size_P, _equal(low_P, high_P))


def _equal(low: Tensor, high: Tensor) -> Tensor:
    """Whether low <= high differ by no more than float noise."""
    scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return high - low <= FLAT_TOLERANCE * scale
