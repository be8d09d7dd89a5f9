"""Learning from demonstrations: given answers, each of whose tokens is imitated.

The loss of an update is the mean negative log-likelihood of its answers' tokens, in nats: each
token counts alike, however sequences are packed, split into micro-batches and shared over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from winnow.learning.batch import MicroBatch
from winnow.learning.learner import Learned, SkippedUpdates
from winnow.learning.policy import run_update
from winnow.learning.routes import load_figures
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.observe.metrics import SFT_LOSS, SFT_TOKENS, Metrics, Stopwatch
from winnow.types import Group

_OUTPUTS: frozenset[Output] = frozenset({"logprob"})


def imitation_loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """Mean negative log-likelihood of the demonstrated tokens of the update, in nats."""
    loss = -(outputs["logprob"] * micro.loss_mask).sum() / micro.counts.tokens
    return LossResult(loss, {})


@dataclass
class Imitator:
    """A learner whose groups are demonstrations: one update a step."""

    strategy: Strategy
    microbatch_tokens: int
    lr: Callable[[int], float]
    """By step."""
    max_skipped_updates: int
    progress: int = 0
    """Moves with each pass and update."""
    begun: int = 0
    skips: SkippedUpdates = field(init=False)

    def __post_init__(self) -> None:
        self.skips = SkippedUpdates("sft", "", self.max_skipped_updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a step, without the model and its optimizer."""
        return {"skipped_in_a_row": self.skips.in_a_row}

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned."""
        self.skips.in_a_row = state["skipped_in_a_row"]

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Make one update on all groups; books `sft/…` in `metrics`.

        Raises:
            TrainingError: too many updates in a row had a gradient that is not finite.
        """
        with watch.phase("batch"):
            sharder = self.strategy.sharder
            batch = sharder.pack(groups, self.microbatch_tokens)
            micro = sharder.cut_update(batch, range(batch.n_groups), self.microbatch_tokens)
        self.begun += 1
        with watch.phase("update"):
            rate = self.lr(step)
            figures, sums = run_update(self.strategy, _OUTPUTS, imitation_loss, micro, rate, "sft")
        metrics.merge(figures)
        metrics.merge(load_figures(self.strategy.expert_load()))
        metrics.sum(SFT_TOKENS, int(batch.dp.all_reduce(batch.loss_mask.sum())))
        self.progress += 1
        self.skips.count(figures, step)
        if sums is not None:
            metrics.last(SFT_LOSS, sums["loss"])
        lengths = batch.prompt_lengths.numpy()
        return Learned(np.zeros(len(lengths), np.float32), lengths, int(batch.lengths.sum()))

    def held_out(self, groups: Sequence[Group]) -> float:
        """Return the mean negative log-likelihood of demonstrations in nats, without learning."""
        batch = self.strategy.sharder.pack(groups, self.microbatch_tokens)
        logprob = run_pass(self.strategy, batch, _OUTPUTS, self.microbatch_tokens)["logprob"]
        self.progress += 1
        logprob_sum = logprob[batch.loss_mask].double().sum()
        return -float(batch.dp.all_reduce(logprob_sum) / batch.dp.all_reduce(batch.loss_mask.sum()))
