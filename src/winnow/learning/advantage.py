"""The middle of a step: tokens rejected and weighed, KL taken off rewards, rewards to advantages.

Shapes: `T` packed tokens, `B` samples of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnow.algorithms.advantages import AdvantageInputs, Advantages, Estimator, estimate
from winnow.algorithms.correction import correct
from winnow.algorithms.kl import KL_ESTIMATORS, adapted_coef
from winnow.errors import TrainingError
from winnow.learning.batch import Batch, count_loss_tokens
from winnow.learning.data_parallel import SINGLE_PROCESS
from winnow.observe.metrics import Metrics
from winnow.types import Group


def correct_batch(batch: Batch, options: Mapping[str, Any], metrics: Metrics) -> Batch:
    """Take rejected tokens out of loss_mask and fill the column `weight`, from `old` and `behav`.

    In fused and bypass mode `PolicyObjective` does it instead, in the update's own forward pass.

    Args:
        options: of `correct`, by keyword.
        metrics: gets `correction/…`.
    """
    correction = correct(
        batch.columns["old"],
        batch.behav,
        batch.gen_mask,
        batch.loss_mask,
        batch.offsets,
        **options,
        all_reduce=batch.dp.all_reduce,
    )
    sums = {
        "tokens": float(batch.loss_mask.sum()),
        "samples": float((count_loss_tokens(batch, np.arange(batch.n_samples)) > 0).sum()),
    }
    sums |= {name: float(total) for name, total in correction.sums.items()}
    sums = batch.dp.reduce_figures(sums)
    counts = {name: int(sums.pop(name)) for name in ("tokens", "samples")}
    record_correction(metrics, sums, **counts)
    if correction.weights is not None:
        batch.columns["weight"] = correction.weights
    return replace(batch, loss_mask=correction.loss_mask)


def record_correction(
    metrics: Metrics, sums: Mapping[str, float], *, tokens: int, samples: int
) -> None:
    """Book the shares of rejected tokens and samples, and the mean weight of the remaining tokens.

    Args:
        sums: of `Corrected.sums`.
        tokens, samples: how many were to learn before the correction.
    """
    remaining = tokens - sums["rejected_tokens"]
    metrics.mean_of("correction/rejected_tokens", sums["rejected_tokens"], tokens)
    metrics.mean_of("correction/rejected_samples", sums["rejected_samples"], samples)
    if "weight" in sums:
        metrics.mean_of("correction/weight", sums["weight"], remaining)
        metrics.mean_of("correction/weight_bound", sums["weight_bound"], remaining)


class KlPenalty:
    """beta * kl_t for each written token, beta fixed or moved after each step.

    Args:
        coef: beta, of the first step if it adapts.
        estimator: a key of `KL_ESTIMATORS`.
        target: KL aimed at, nats a token; None leaves beta as it is.
        horizon: in samples, as `adapted_coef` takes it.
    """

    def __init__(
        self, coef: float, estimator: str, target: float | None = None, horizon: int = 1
    ) -> None:
        self.coef = coef
        self._estimate, self._target, self._horizon = KL_ESTIMATORS[estimator], target, horizon

    def __call__(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Return the step's penalties [T] in float64, 0 off gen_mask; from `old` and `ref`.

        Books `reward/kl`, the mean over samples of their mean, and `reward/kl_coef`; the weight
        moves afterwards, so the next step has the new one.

        Raises:
            TrainingError: the KL is not finite.
        """
        old, ref = batch.columns["old"].double(), batch.columns["ref"].double()
        kl_T = torch.where(batch.gen_mask, self._estimate(old, ref), 0.0)
        written_B = sum_samples(batch.gen_mask.long(), batch)
        mean = float((sum_samples(kl_T, batch) / written_B.clamp(min=1)).mean())
        if not math.isfinite(mean):
            raise TrainingError(
                f"algorithm.kl.reward: the KL to the reference is {mean}; look for NaN weights in "
                "model.path and reference.path, or lower optim.lr"
            )
        metrics.mean("reward/kl", mean)
        metrics.last("reward/kl_coef", self.coef)
        penalty_T = self.coef * kl_T
        if self._target is not None:
            n = batch.n_samples
            self.coef = adapted_coef(self.coef, mean, self._target, n, self._horizon)
        return penalty_T


def sum_samples(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum [B] of values [T] over each sample's tokens, wherever they are."""
    lengths = batch.offsets.diff()
    index = torch.repeat_interleave(torch.arange(batch.n_samples), lengths)
    local_sums = torch.zeros(batch.n_samples, dtype=values.dtype).index_add_(0, index, values)
    return batch.dp.all_reduce(local_sums)


class AdvantageStage:
    """Gives one estimator its inputs and puts its advantages into the batch.

    Args:
        options: the estimator's own, by keyword.
        penalty: KL in the reward.
        turn_weight: weight of environments' rewards of turns in the reward.
    """

    def __init__(
        self,
        estimator: Estimator,
        options: Mapping[str, Any],
        penalty: KlPenalty | None = None,
        turn_weight: float = 1.0,
    ) -> None:
        self._estimator, self._options, self._penalty = estimator, options, penalty
        self._turn_weight = turn_weight

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the estimator needs beyond rewards."""
        return self._estimator.needs

    def __call__(self, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> Advantages:
        """Return the step's advantages, which also become columns of the batch.

        Fills `advantages` [T], and `returns` [T] where there are values.
        """
        rewards_B = batch.rewards
        token_rewards_T = token_rewards(groups, batch, self._turn_weight)
        if self._penalty is not None:
            penalty_T = self._penalty(batch, metrics)
            token_rewards_T = token_rewards_T - penalty_T
            rewards_B = rewards_B - sum_samples(penalty_T, batch)
        if not bool(rewards_B.square().isfinite().all()):
            raise TrainingError(
                f"reward {float(rewards_B.abs().max()):g} is too large: its square overflows; "
                "lower the scale of the score, or its weight (reward.weights.task)"
            )
        columns, needs = batch.columns, self.needs
        inputs = AdvantageInputs(
            rewards=rewards_B,
            groups=batch.groups,
            offsets=batch.offsets,
            gen_mask=batch.gen_mask,
            loss_mask=batch.loss_mask,
            token_rewards=token_rewards_T,
            components=_components(groups) if self._estimator.takes_components else {},
            greedy_rewards=_greedy(groups) if "greedy_rewards" in needs else None,
            values=columns.get("values"),
            prob=columns["old"].exp() if "prob" in needs else None,
            prob_square_sum=columns.get("prob_square_sum"),
            weights=columns.get("weight"),
            all_reduce=batch.dp.all_reduce,
        )
        if self._estimator.takes_all:
            advantages = estimate(self._estimator, _gather_inputs(inputs, batch), self._options)
            advantages = replace(advantages, tokens=batch.local_part(advantages.tokens))
        else:
            advantages = estimate(self._estimator, inputs, self._options)
        columns["advantages"] = advantages.tokens
        if advantages.returns is not None:
            columns["returns"] = advantages.returns
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Return the KL's weight, if there is one."""
        return {} if self._penalty is None else {"penalty": {"coef": self._penalty.coef}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._penalty is not None:
            self._penalty.coef = state["penalty"]["coef"]


def _gather_inputs(inputs: AdvantageInputs, batch: Batch) -> AdvantageInputs:
    """Return the inputs with the tokens of all samples."""
    names = "gen_mask", "loss_mask", "token_rewards", "prob", "prob_square_sum", "weights"
    columns = {name: getattr(inputs, name) for name in names}
    gathered: dict[str, Any]
    gathered = {name: batch.gathered(each) for name, each in columns.items() if each is not None}
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths)]))
    return replace(inputs, offsets=offsets, all_reduce=SINGLE_PROCESS.all_reduce, **gathered)


def token_rewards(groups: Sequence[Group], batch: Batch, turn_weight: float) -> Tensor:
    """Return the rewards of tokens [T], in float64: an environment's reward of a turn on its last
    token, and the rest of the sample's reward on its last written token.

    Args:
        groups: those of which `batch` was packed.
        turn_weight: weight of environments' rewards in the reward.
    """
    answers = [answer for group in groups for answer in group.answers]
    ends: list[int] = []  # of turns, among the written tokens
    rewards: list[float] = []
    written = 0
    for sample in batch.samples.tolist():
        rest = float(batch.rewards[sample])
        turns = [turn for turn in answers[sample].trajectory.turns if len(turn)]
        for turn in turns:
            written += len(turn)
            ends.append(written - 1)
            rewards.append(rest if turn is turns[-1] else turn_weight * turn.reward)
            rest -= rewards[-1]
    rewards_T = torch.zeros(len(batch.token_ids), dtype=torch.float64)
    places = batch.gen_mask.nonzero().squeeze(1)[ends]
    rewards_T[places] = torch.tensor(rewards, dtype=torch.float64)
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
