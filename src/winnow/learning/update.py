"""One update of any role that learns: gradients of its micro-batches, then an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from winnow.learning.batch import MicroBatch
from winnow.learning.strategy import LossResult, Output, Outputs, Stats, Strategy
from winnow.observe.metrics import Metrics


class Objective(Protocol):
    """The loss that a role minimizes, with the outputs it needs."""

    @property
    def outputs(self) -> frozenset[Output]:
        """The outputs that the strategy must compute for it."""
        ...

    def __call__(self, micro: MicroBatch, outputs: Outputs) -> LossResult:
        """Return the micro-batch's share of the update's loss, with sums beside it."""
        ...


def run_update(
    strategy: Strategy,
    objective: Objective,
    microbatches: Sequence[MicroBatch],
    lr: float,
    role: str,
) -> tuple[Metrics, Stats | None]:
    """Make one optimizer step on one mini-batch.

    Returns:
        `role/updates`, `role/skipped_updates`, `role/lr` and `role/grad_norm`; and the summed
        loss and diagnostics, or None where nothing was learnt: without a counted token (then
        there are no figures either), or when the gradient was not finite, so that a NaN does not
        hide the figures of other updates.
    """
    metrics = Metrics()
    # Without a counted token the gradient is zero, and momentum and decay alone would step.
    if not microbatches or microbatches[0].counts.tokens == 0:
        return metrics, None
    sums = strategy.forward_backward(microbatches, objective.outputs, objective)
    step = strategy.optimizer_step(lr)
    metrics.sum(f"{role}/updates", 1)
    metrics.sum(f"{role}/skipped_updates", int(step["skipped"]))
    metrics.last(f"{role}/lr", lr)
    if step["skipped"]:
        return metrics, None
    metrics.mean(f"{role}/grad_norm", step["grad_norm"])
    return metrics, sums
