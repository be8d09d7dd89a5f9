"""The critic's part of a step: values once, then updates towards the returns.

    values ──► advantages and returns (GAE) ──► updates on the micro-batches of the policy's

Shapes: `T` packed tokens, `B` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from winnow.algorithms.losses import explained_variance, value_loss
from winnow.learning.batch import Batch, MicroBatch
from winnow.learning.policy import aggregate_share, run_update
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.observe.metrics import Metrics


@dataclass(frozen=True)
class ValueObjective:
    """A loss function for the strategy of a critic.

    Micro-batches must bring the columns `values`, those before the step, and `returns`.
    """

    outputs: ClassVar[frozenset[Output]] = frozenset({"value"})
    """The outputs that the strategy must compute."""
    clip: float | None
    """The distance from its old value up to which a value may move and still lower the loss."""
    aggregation: str
    """One of `AGGREGATIONS`."""
    norm_tokens: float | None = None
    """The constant length of seq-mean-token-sum-norm."""

    def __call__(self, micro: MicroBatch, outputs: Outputs) -> LossResult:
        """Return the micro-batch's share of the update's loss, with sums over loss_mask."""
        old, returns = micro.columns["values"], micro.columns["returns"]
        loss_T, figures = value_loss(
            outputs["value"], old, returns, micro.loss_mask, clip=self.clip
        )
        loss = aggregate_share(loss_T, micro, self.aggregation, self.norm_tokens)
        return LossResult(loss, figures)


class Critic:
    """A value model, in the role of the critic."""

    def __init__(self, strategy: Strategy, objective: ValueObjective) -> None:
        self.strategy, self.objective = strategy, objective

    def values(self, batch: Batch, microbatch_tokens: int) -> None:
        """Fill `batch.columns["values"]` [T]: V before each written token; 0 off gen_mask."""
        outputs = run_pass(self.strategy, batch, self.objective.outputs, microbatch_tokens)
        batch.columns["values"] = outputs["value"]

    def update(self, microbatches: Sequence[MicroBatch], lr: float) -> Metrics:
        """Take one optimizer step on one mini-batch.

        Returns:
            `critic/…`; of an update that was skipped only the counts.
        """
        objective, outputs = self.objective, self.objective.outputs
        metrics, sums = run_update(self.strategy, outputs, objective, microbatches, lr, "critic")
        if sums is not None:
            metrics.mean("critic/value_loss", sums["loss"])
            tokens = microbatches[0].counts.tokens
            metrics.mean_of("critic/clip_share", sums["clip_share"], tokens)
        return metrics


def value_figures(batch: Batch) -> Metrics:
    """Measure how well the critic predicted the returns it is about to learn, over loss_mask.

    Values and returns are those of the whole step, as its advantages were made of them.

    Returns:
        `critic/value` and `critic/return` as spreads, `critic/explained_variance`; nothing for no
        tokens.
    """
    local, metrics, mask, dp = Metrics(), Metrics(), batch.loss_mask, batch.dp
    tokens = int(dp.all_reduce(mask.sum()))
    if tokens == 0:
        return metrics
    values, returns = batch.columns["values"], batch.columns["returns"]
    local.spread("critic/value", values[mask].numpy())
    local.spread("critic/return", returns[mask].numpy())
    for each in dp.all_gather(local):
        metrics.merge(each)
    explained = explained_variance(values, returns, mask, dp.all_reduce)
    metrics.mean("critic/explained_variance", explained, tokens)
    return metrics
