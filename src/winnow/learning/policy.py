"""The policy's part of a step: old log-probs if they are needed, then updates on mini-batches.

The role holds a strategy and knows names of columns and figures; the strategy knows the model.
Figures go by the names of `winnow.observe.metrics`.

Shapes: `T` packed tokens, `B` samples. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from winnow.algorithms.correction import max_delta, mismatch_figures, mismatch_sums
from winnow.learning.batch import Batch, MicroBatch
from winnow.learning.data_parallel import NO_SHARDING, MicroBatchSharder, run_pass
from winnow.learning.objective import MISMATCH, PolicyObjective
from winnow.learning.strategy import LossResult, Output, Outputs, Stats, Strategy
from winnow.observe.metrics import Metrics

_CORRECTION = "correction/"


class Policy:
    """The model being trained, in the role of the policy."""

    def __init__(
        self,
        strategy: Strategy,
        objective: PolicyObjective,
        sharder: MicroBatchSharder = NO_SHARDING,
    ) -> None:
        self.strategy, self.objective, self._sharder = strategy, objective, sharder

    @property
    def has_pass(self) -> bool:
        """True if a step begins with a pass of its own for the old log-probs."""
        return self.objective.old == "pass"

    def old_logprobs(
        self, batch: Batch, microbatch_tokens: int, with_squares: bool = False
    ) -> Metrics:
        """Fill the column `old` [T] as the objective wants it, with a pass if it takes one.

        After a pass it is known how far the sampler was from it; else the first update tells.

        Args:
            with_squares: fill `prob_square_sum` [T] too, which needs a pass.

        Returns:
            `actor/old_pass` (1 or 0), and after a pass `mismatch/…`.
        """
        metrics = Metrics()
        metrics.last("actor/old_pass", int(self.has_pass))
        if self.objective.old == "behav":
            batch.columns["old"] = batch.behav
        if not self.has_pass:
            return metrics
        outputs: frozenset[Output] = frozenset({"logprob"})
        if with_squares:
            outputs |= {"prob_square_sum"}
        found = run_pass(self.strategy, batch, outputs, microbatch_tokens, self._sharder)
        old = batch.columns["old"] = found["logprob"]
        if with_squares:
            batch.columns["prob_square_sum"] = found["prob_square_sum"]
        pair = (old, batch.behav, batch.gen_mask)
        sums = {name: float(total) for name, total in mismatch_sums(*pair).items()}
        _book_mismatch(metrics, sums, float(max_delta(*pair)))
        return metrics

    def choose(self, batch: Batch, groups: Sequence[int], sample_keys: Tensor, seed: int) -> None:
        """Fill the columns of a loss that selects tokens, for the tokens of one update.

        Args:
            groups: ordinals of the update's groups.
            sample_keys: [B] int64, a name of each sample whatever its place in the batch.
            seed: of the draws; another one for each update.
        """
        objective = self.objective
        if not objective.draws:
            return
        from winnow.algorithms.losses.covariance import keyed_draws

        lengths = batch.offsets.diff()
        wanted_B = torch.isin(batch.groups, torch.tensor(groups))
        mask_T = batch.loss_mask & wanted_B.repeat_interleave(lengths)
        draws_T = keyed_draws(seed, sample_keys.repeat_interleave(lengths), batch.positions)
        if not objective.selects:
            batch.columns["draws"] = draws_T
            return
        select = objective.loss.select
        assert select is not None
        columns = batch.columns
        columns["selected"] = select(
            columns["old"], columns["advantages"], mask_T, draws_T, **objective.options
        )

    def update(
        self, microbatches: Sequence[MicroBatch], lr: float, has_moved: bool = False
    ) -> Metrics:
        """Make one optimizer step on one mini-batch.

        Args:
            has_moved: an update of this step has changed the weights, so that they no longer
                tell how far the sampler was.

        Returns:
            `actor/…`, and `mismatch/…` if no pass has told it. Of an update that was skipped only
            the counts, so that a NaN among its figures does not hide those of the others.
        """
        objective = replace(self.objective, tells_mismatch=not has_moved)
        metrics, sums = run_update(self.strategy, objective, microbatches, lr, "actor")
        if sums is not None:
            counts = microbatches[0].counts
            _book(metrics, sums, counts.tokens, counts.samples)
        return metrics


def _book(metrics: Metrics, sums: Stats, tokens: int, samples: int) -> None:
    """Book the figures of an update from its sums."""
    sums = dict(sums)
    apart = _taken(sums, MISMATCH)
    if apart:
        _book_mismatch(metrics, apart, apart.pop("max_delta"))
    correction = _taken(sums, _CORRECTION)
    if correction:
        from winnow.learning.importance_correction import book_correction

        book_correction(metrics, correction, tokens=tokens, samples=samples)
    metrics.mean("actor/loss", sums.pop("loss"))
    for name in ("policy_loss", "kl_loss"):
        if name in sums:
            metrics.mean(f"actor/{name}", sums.pop(name))
    if "clip_share" in sums:
        clipped = sums.pop("clip_share")
        if "clip_high_share" in sums:
            high = sums.pop("clip_high_share")
            metrics.mean_of("actor/clip_high", high, tokens)
            metrics.mean_of("actor/clip_low", clipped - high, tokens)
        else:
            metrics.mean_of("actor/clip", clipped, tokens)
    if "dual_clip_share" in sums:
        metrics.mean_of("actor/dual_clip", sums.pop("dual_clip_share"), tokens)
    for name, total in sums.items():
        metrics.mean_of(f"actor/{name}", total, tokens)


def _taken(sums: dict[str, float], prefix: str) -> dict[str, float]:
    """Take out the sums whose names begin with `prefix`, and drop the prefix."""
    names = [name for name in sums if name.startswith(prefix)]
    return {name.removeprefix(prefix): sums.pop(name) for name in names}


def _book_mismatch(metrics: Metrics, sums: Mapping[str, float], largest: float) -> None:
    figures = mismatch_figures(sums)
    for name, value in figures.items():
        metrics.mean(f"{MISMATCH}{name}", value, sums["tokens"])
    if figures:
        metrics.max(f"{MISMATCH}max_delta", largest)


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
