"""The one interface through which a learner gets advantages, whichever estimator it runs.

`ESTIMATORS` names each estimator, as a recipe does, with what it needs beyond rewards, so that a
step computes nothing else. Here the pure functions of `advantages` and `token_advantages` get
the arguments they take, and what they give is laid out alike: tokens, samples, returns.

Shapes: `T` packed tokens, `B` samples of a whole step: whitening and group statistics see all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from winnow.algorithms.advantages import gpg, grpo, grpo_passk, opo, rloo
from winnow.algorithms.token_advantages import (
    gae_whitened,
    gdpo_whitened,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    sample_index,
    spread,
)

Need = Literal["components", "greedy", "values", "probs"]


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What is known of a step's samples; an estimator takes of it what it needs.

    Example: prompts of 2 tokens with answers of 2 and 1, right and wrong: `offsets` [0, 4, 7],
    `groups` [0, 0], `gen_mask` [F F T T  F F T], `rewards` [1, -1], `token_rewards`
    [0 0 0 1  0 0 -1].
    """

    rewards: Tensor
    """[B] float64, R: the sum of a sample's rewards, a KL term in the reward included."""
    groups: Tensor
    """[B] int64: equal numbers are answers to one prompt, in any order."""
    offsets: Tensor
    """[B+1] int64: sample b is [offsets[b], offsets[b+1])."""
    gen_mask: Tensor
    """[T] bool: the policy wrote this token."""
    loss_mask: Tensor
    """[T] bool: what of gen_mask learns."""
    token_rewards: Tensor
    """[T] float64, r_t: the outcome on a sample's last written token, minus beta * kl_t."""
    components: Mapping[str, Tensor] = field(default_factory=dict)
    """[B] each: the parts of the reward by name ("components")."""
    greedy_rewards: Tensor | None = None
    """[B]: reward of a greedy answer to the sample's prompt ("greedy")."""
    values: Tensor | None = None
    """[T]: the critic's V before each written token ("values")."""
    prob: Tensor | None = None
    """[T]: probability of each written token ("probs")."""
    prob_square_sum: Tensor | None = None
    """[T]: sum over the vocabulary of squared probabilities there ("probs")."""


@dataclass(frozen=True, eq=False)
class Advantages:
    """What an estimator makes of a step."""

    tokens: Tensor
    """[T] fp32: 0 off gen_mask, and off loss_mask where the estimator whitens."""
    samples: Tensor
    """[B] float64, for the records: the sample's one number, or the mean over its tokens."""
    returns: Tensor | None = None
    """[T] fp32: what a critic learns, 0 off gen_mask; None without values."""


@dataclass(frozen=True)
class Estimator:
    """An estimator and what it asks for."""

    function: Callable[..., Advantages]
    """Takes `AdvantageInputs`, and the options of its section of the recipe by keyword."""
    needs: frozenset[Need] = frozenset()
    """Inputs beyond rewards: a step computes these and no others."""
    min_group: int = 1
    """Fewest answers a prompt may have."""


def _outcome(function: Callable[..., Tensor]) -> Callable[..., Advantages]:
    """An estimator from rewards [B] and groups [B] to one number a sample."""

    def estimate(inputs: AdvantageInputs, **options: object) -> Advantages:
        return _spread(inputs, function(inputs.rewards, inputs.groups, **options))

    return estimate


def _opo(inputs: AdvantageInputs) -> Advantages:
    lengths_B = _token_counts(inputs.offsets, inputs.gen_mask)
    return _spread(inputs, opo(inputs.rewards, inputs.groups, lengths_B))


def _reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    tokens_T = reinforce_plus_plus(
        inputs.token_rewards, inputs.offsets, inputs.gen_mask, inputs.loss_mask, gamma=gamma
    )
    return _averaged(inputs, tokens_T, inputs.loss_mask)


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    tokens_T = reinforce_plus_plus_baseline(
        inputs.rewards, inputs.groups, inputs.offsets, inputs.loss_mask
    )
    return _averaged(inputs, tokens_T, inputs.loss_mask)


def _remax(inputs: AdvantageInputs, *, gamma: float = 1.0) -> Advantages:
    greedy_B = _given(inputs.greedy_rewards, "remax", "greedy_rewards")
    tokens_T = remax(inputs.token_rewards, inputs.offsets, inputs.gen_mask, greedy_B, gamma=gamma)
    return _averaged(inputs, tokens_T, inputs.gen_mask)


def _gdpo(inputs: AdvantageInputs, *, weights: Mapping[str, float] | None = None) -> Advantages:
    if not inputs.components:
        raise ValueError(_missing("gdpo", "components"))
    tokens_T = gdpo_whitened(
        inputs.components, inputs.groups, inputs.offsets, inputs.loss_mask, weights=weights
    )
    return _averaged(inputs, tokens_T, inputs.loss_mask)


def _optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    name = "optimal_token_baseline"
    tokens_T = optimal_token_baseline(
        inputs.token_rewards,
        inputs.offsets,
        inputs.gen_mask,
        inputs.groups,
        _given(inputs.prob, name, "prob"),
        _given(inputs.prob_square_sum, name, "prob_square_sum"),
    )
    return _averaged(inputs, tokens_T, inputs.gen_mask)


def _gae(inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    tokens_T, returns_T = gae_whitened(
        inputs.token_rewards,
        inputs.offsets,
        inputs.gen_mask,
        inputs.loss_mask,
        _given(inputs.values, "gae", "values"),
        gamma=gamma,
        lam=lam,
    )
    return _averaged(inputs, tokens_T, inputs.loss_mask, returns_T.float())


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(_outcome(grpo)),
    "grpo_passk": Estimator(_outcome(grpo_passk), min_group=2),
    "rloo": Estimator(_outcome(rloo)),
    "opo": Estimator(_opo),
    "reinforce_plus_plus": Estimator(_reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(_reinforce_plus_plus_baseline),
    "remax": Estimator(_remax, frozenset({"greedy"})),
    "gpg": Estimator(_outcome(gpg)),
    "gdpo": Estimator(_gdpo, frozenset({"components"})),
    "optimal_token_baseline": Estimator(_optimal_token_baseline, frozenset({"probs"}), min_group=2),
    "gae": Estimator(_gae, frozenset({"values"})),
}


def _spread(inputs: AdvantageInputs, samples_B: Tensor) -> Advantages:
    """One number a sample, on each token that the policy wrote."""
    tokens_T = spread(samples_B, inputs.offsets, inputs.gen_mask)
    return Advantages(tokens_T.float(), samples_B.double())


def _averaged(
    inputs: AdvantageInputs, tokens_T: Tensor, mask: Tensor, returns_T: Tensor | None = None
) -> Advantages:
    """Numbers of single tokens, with each sample's mean over `mask` [T]; 0 without a token."""
    index_T = sample_index(inputs.offsets, mask)
    sums_B = torch.zeros(len(inputs.offsets) - 1, dtype=torch.float64, device=tokens_T.device)
    sums_B.index_add_(0, index_T[mask], tokens_T[mask].double())
    mean_B = sums_B / _token_counts(inputs.offsets, mask).clamp(min=1)
    return Advantages(tokens_T.float(), mean_B, returns_T)


def _token_counts(offsets: Tensor, mask: Tensor) -> Tensor:
    """[B] int64: tokens of each sample in `mask` [T]."""
    return torch.bincount(sample_index(offsets, mask)[mask], minlength=len(offsets) - 1)


def _given(value: Tensor | None, estimator: str, name: str) -> Tensor:
    if value is None:
        raise ValueError(_missing(estimator, name))
    return value


def _missing(estimator: str, name: str) -> str:
    return f"algorithm/advantage={estimator} needs {name}, got none"
