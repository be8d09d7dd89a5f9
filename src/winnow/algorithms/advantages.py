"""Outcome estimators: rewards of a step to one advantage a sample.

Every estimator is called as `estimator(inputs, **options)` and returns its numbers in float64,
[B] for samples as here or [T] for tokens as in `token_advantages`; `estimators.estimate` has
checked the inputs and lays the numbers out. Options have the names and meanings of the
estimator's section in `config/algorithm.py`.

In all of them a group of one has mean 0, and rewards of a group that are equal but for float
noise (`FLAT_TOLERANCE`) give exactly 0, where plain arithmetic would divide noise by noise.

Shapes: `T` packed tokens, `B` samples of a step, `P` groups (prompts) among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

STD_EPS = 1e-6
FLAT_TOLERANCE = 1e-6
"""Rewards of a group within this of each other (times the largest, if above 1) are equal."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The samples of a step; an estimator takes of them what it needs. Numbers are float64.

    Example: prompts of 2 tokens with answers of 2 and 1, right and wrong: `offsets` [0, 4, 7],
    `groups` [0, 0], `gen_mask` [F F T T  F F T], `rewards` [1, -1], `token_rewards`
    [0 0 0 1  0 0 -1].
    """

    rewards: Tensor
    """[B], R: the sum of a sample's rewards, a KL term in the reward included."""
    groups: Tensor
    """[B] int64: equal numbers are answers to one prompt, in any order."""
    offsets: Tensor
    """[B+1] int64: sample b is [offsets[b], offsets[b+1])."""
    gen_mask: Tensor
    """[T] bool: the policy wrote this token."""
    loss_mask: Tensor
    """[T] bool: the tokens of gen_mask that learn."""
    token_rewards: Tensor
    """[T], r_t: the outcome on a sample's last written token, minus beta * kl_t."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] each: the parts of the reward by name (the need "components")."""
    greedy_rewards: Tensor | None = None
    """[B]: reward of a greedy answer to the sample's prompt ("greedy")."""
    values: Tensor | None = None
    """[T]: the critic's V before each written token ("values")."""
    prob: Tensor | None = None
    """[T]: probability of each written token ("probs")."""
    prob_square_sum: Tensor | None = None
    """[T]: sum over the vocabulary of squared probabilities there ("probs")."""
    weights: Tensor | None = None
    """[T]: importance weight of each token's loss; None where the loss is not weighed."""

    @property
    def sample_index(self) -> Tensor:
        """[T] int64: each token's sample."""
        lengths = self.offsets.diff()
        return torch.arange(len(lengths), device=self.offsets.device).repeat_interleave(lengths)

    def token_counts(self, mask: Tensor) -> Tensor:
        """[B] int64: tokens of each sample in `mask` [T]."""
        return torch.bincount(self.sample_index[mask], minlength=len(self.offsets) - 1)


def grpo(inputs: AdvantageInputs, *, std_normalization: str) -> Tensor:
    """(R - mean_g) / (std_g + 1e-6), GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Standard deviations take Bessel's correction. A group of one has mean 0 and std 1.
    "batch" divides by the std of all rewards (Lite PPO, arXiv 2508.08221), "none" by nothing
    (Dr. GRPO, arXiv 2503.20783).
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    if std_normalization == "group":
        return grouped.normalized()
    if std_normalization == "batch":
        R_B = inputs.rewards
        std = R_B.std() if len(R_B) > 1 else R_B.new_ones(())
        return grouped.centred() / (std + STD_EPS)
    return grouped.centred()


def grpo_passk(inputs: AdvantageInputs, *, std_normalization: str) -> Tensor:
    """Return the best answer's lead over the second best, for others 0 (arXiv 2503.19595).

    Optimises the reward of the best of a prompt's answers. Two best answers have no lead.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    R_B = inputs.rewards
    ascending = torch.argsort(R_B)
    by_group = ascending[torch.argsort(grouped.index_B[ascending], stable=True)]
    last_P = grouped.size_P.cumsum(0) - 1
    best_P, second_P = by_group[last_P], by_group[last_P - 1]
    lead_P = (R_B[best_P] - R_B[second_P]).masked_fill(_equal(R_B[second_P], R_B[best_P]), 0.0)
    advantage_B = torch.zeros_like(R_B).index_put_((best_P,), lead_P)
    return advantage_B / (grouped.std() + STD_EPS) if std_normalization == "group" else advantage_B


def rloo(inputs: AdvantageInputs) -> Tensor:
    """R minus the mean of the group's other rewards (RLOO, arXiv 2402.14740).

    As n / (n - 1) * (R - mean_g) for a group of n. A group of one keeps its R.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    size_B = grouped.size_P[grouped.index_B].double()
    return size_B / (size_B - 1).clamp(min=1) * grouped.centred()


def opo(inputs: AdvantageInputs) -> Tensor:
    """R - sum(length * R) / sum(length) over the group (OPO, arXiv 2505.23585).

    Lengths count written tokens. A group of one has baseline 0; a group without a written token
    takes the plain mean.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    weight_B = inputs.token_counts(inputs.gen_mask).double()
    no_token_B = (grouped.sum(weight_B) == 0)[grouped.index_B]
    return grouped.centred(weight_B.masked_fill(no_token_B, 1.0))


def gpg(inputs: AdvantageInputs, *, alpha: str) -> Tensor:
    """alpha * (R - mean_g), GPG (arXiv 2504.02546).

    alpha = B / max(B - M, 1) makes up for the M samples in groups whose rewards are all equal,
    which teach nothing. A group of one keeps its R, teaches, and so does not count in M.
    "nonzero_reward" takes B / max(number of R != 0, 1), as verl does.
    """
    grouped = _Grouped(inputs.rewards, inputs.groups)
    active_B = (~grouped.flat_P | (grouped.size_P == 1))[grouped.index_B]
    if alpha == "nonzero_reward":
        active_B = inputs.rewards != 0
    return len(inputs.rewards) / max(int(active_B.sum()), 1) * grouped.centred()


def blend(inputs: AdvantageInputs, weights: Mapping[str, float]) -> Tensor:
    """sum_k w_k * GRPO(R_k), GDPO before its whitening (arXiv 2601.05242).

    Each component is normalised on its own, so that one of small range keeps its say.

    Args:
        weights: by name; components without one are left out. Empty: 1 for each.

    Raises:
        ValueError: a weight of an unknown component.
    """
    components = inputs.components
    weights = weights or dict.fromkeys(components, 1.0)
    unknown = [name for name in weights if name not in components]
    if unknown:
        raise ValueError(
            f"gdpo weights name {', '.join(unknown)}, but the reward components are "
            f"{', '.join(components)}"
        )
    parts = [
        weight * _Grouped(components[name], inputs.groups).normalized()
        for name, weight in weights.items()
    ]
    return torch.stack(parts).sum(0)


def centred(inputs: AdvantageInputs) -> Tensor:
    """R - mean_g [B]; a group of one keeps its R."""
    return _Grouped(inputs.rewards, inputs.groups).centred()


class _Grouped:
    """Rewards [B] by their groups [B]: `index_B`, the ordinal of a sample's group; `size_P`, its
    samples; `flat_P`, True if all its rewards are equal."""

    def __init__(self, R_B: Tensor, groups_B: Tensor) -> None:
        self._R_B = R_B
        self.index_B: Tensor
        self.size_P: Tensor
        _, self.index_B, self.size_P = torch.unique(
            groups_B, return_inverse=True, return_counts=True
        )
        low_P = R_B.new_full(self.size_P.shape, torch.inf)
        high_P = R_B.new_full(self.size_P.shape, -torch.inf)
        low_P.scatter_reduce_(0, self.index_B, R_B, "amin")
        high_P.scatter_reduce_(0, self.index_B, R_B, "amax")
        self.flat_P = _equal(low_P, high_P)

    def sum(self, values_B: Tensor) -> Tensor:
        """[P] float64 sum over each group."""
        zeros_P = torch.zeros_like(self.size_P, dtype=torch.float64)
        return zeros_P.index_add_(0, self.index_B, values_B)

    def centred(self, weight_B: Tensor | None = None) -> Tensor:
        """[B] R minus the group's (weighted) mean; R in a group of one, exactly 0 in a flat one."""
        if weight_B is None:
            weight_B = torch.ones_like(self._R_B)
        mean_P = self.sum(weight_B * self._R_B) / self.sum(weight_B)
        away_B = (self._R_B - mean_P[self.index_B]).masked_fill(self.flat_P[self.index_B], 0.0)
        return torch.where((self.size_P == 1)[self.index_B], self._R_B, away_B)

    def std(self) -> Tensor:
        """[B] the group's standard deviation with Bessel's correction; 1 for a group of one."""
        square_P = self.sum(self.centred() ** 2)
        std_P = (square_P / (self.size_P - 1).clamp(min=1)).sqrt()
        return std_P.masked_fill(self.size_P == 1, 1.0)[self.index_B]

    def normalized(self) -> Tensor:
        """[B] (R - mean) / (std + 1e-6) of each group."""
        return self.centred() / (self.std() + STD_EPS)


def _equal(low: Tensor, high: Tensor) -> Tensor:
    """True where low <= high differ by no more than float noise."""
    scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return high - low <= FLAT_TOLERANCE * scale


def spread(values: Tensor, inputs: AdvantageInputs, mask: Tensor) -> Tensor:
    """Return each sample's number [B] on its tokens in `mask` [T], 0 on the others."""
    return torch.where(mask, values[inputs.sample_index], 0.0)
