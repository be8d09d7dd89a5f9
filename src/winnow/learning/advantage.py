"""The stage of a step that turns rewards into advantages: KL taken off, then the estimator.

Shapes: `T` packed tokens, `B` samples of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs, Advantages, Estimator, estimate
from winnow.learning.batch import Batch
from winnow.observe.metrics import Metrics
from winnow.types import Group

if TYPE_CHECKING:
    from winnow.learning.kl_penalty import KlPenalty


class AdvantageStage:
    """Gives one estimator its inputs and puts its advantages into the batch.

    Args:
        options: the estimator's own, by keyword.
        penalty: KL in the reward.
    """

    def __init__(
        self, estimator: Estimator, options: Mapping[str, Any], penalty: KlPenalty | None = None
    ) -> None:
        self._estimator, self._options, self._penalty = estimator, options, penalty

    def __call__(self, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> Advantages:
        """Return the step's advantages, which also become columns of the batch.

        Fills `advantages` [T], and `returns` [T] where there are values.
        """
        rewards_B, token_rewards_T = batch.rewards, outcome_rewards(batch)
        if self._penalty is not None:
            from winnow.learning.kl_penalty import sum_samples

            penalty_T = self._penalty(batch, metrics)
            token_rewards_T = token_rewards_T - penalty_T
            rewards_B = rewards_B - sum_samples(penalty_T, batch)
        columns, needs = batch.columns, self._estimator.needs
        inputs = AdvantageInputs(
            rewards=rewards_B,
            groups=batch.groups,
            offsets=batch.offsets,
            gen_mask=batch.gen_mask,
            loss_mask=batch.loss_mask,
            token_rewards=token_rewards_T,
            components=_components(groups) if self._estimator.takes_components else {},
            greedy_rewards=_greedy(groups) if "greedy" in needs else None,
            values=columns.get("values"),
            prob=columns["old"].exp() if "probs" in needs else None,
            prob_square_sum=columns.get("prob_square_sum"),
            weights=columns.get("weight"),
        )
        found = estimate(self._estimator, inputs, self._options)
        columns["advantages"] = found.tokens
        if found.returns is not None:
            columns["returns"] = found.returns
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the KL's weight, if there is one."""
        return {} if self._penalty is None else {"penalty": self._penalty.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if self._penalty is not None:
            self._penalty.load_state_dict(state["penalty"])


def outcome_rewards(batch: Batch) -> Tensor:
    """Return each sample's reward on its last written token [T], in float64."""
    written = batch.gen_mask.nonzero().squeeze(1)
    sample = torch.searchsorted(batch.offsets, written, right=True) - 1
    last = torch.full((batch.n_samples,), -1, dtype=torch.int64)
    last.scatter_reduce_(0, sample, written, "amax")
    rewards_T = torch.zeros(len(batch.token_ids), dtype=torch.float64)
    has_any = last >= 0
    rewards_T[last[has_any]] = batch.rewards[has_any]
    return rewards_T


def _components(groups: Sequence[Group]) -> dict[str, Tensor]:
    """[B] each: the parts of the reward by name, 0 where an answer's score lacks one."""
    scores = [answer.score for group in groups for answer in group.answers]
    names = sorted({name for score in scores for name in score.parts})
    return {
        name: torch.tensor([s.parts.get(name, 0.0) for s in scores], dtype=torch.float64)
        for name in names
    }


def _greedy(groups: Sequence[Group]) -> Tensor:
    """[B] the reward of the greedy answer to each sample's prompt."""
    rewards: list[float] = []
    for group in groups:
        assert group.baseline is not None, "the sampler was to ask for a greedy answer"
        rewards += [group.baseline.score.reward] * len(group.answers)
    return torch.tensor(rewards, dtype=torch.float64)
