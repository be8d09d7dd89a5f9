"""What one step learns from its groups: advantages, old log-probs, updates.

groups ─pack─► batch ─► advantages [B] ─spread─► [T]
                 └────► old log-probs [T] ─► updates: mini-batch → micro-batches → one step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from winnow.batching import Batch, cut_updates, micro_batches, pack, spread
from winnow.errors import TrainingError
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import FloatArray, Group
from winnow.workers.policy import Policy


@dataclass(frozen=True)
class LearnerSettings:
    """How a step is cut, and when learning has failed."""

    groups_per_update: int
    epochs: int
    microbatch_tokens: int
    overlong_filtering: bool
    max_skipped_updates: int
    seed: int


@dataclass(frozen=True, eq=False)
class Learned:
    """A step's batch, as it was learnt from."""

    batch: Batch
    advantages: FloatArray
    """[B] in the order of the groups and their answers."""


class Learner:
    """Turns groups into updates of a policy.

    Args:
        advantage: rewards [B] and groups [B] to advantages [B].
        lr_of: the learning rate of a step.
    """

    def __init__(
        self,
        policy: Policy,
        advantage: Callable[[Tensor, Tensor], Tensor],
        lr_of: Callable[[int], float],
        settings: LearnerSettings,
    ) -> None:
        self._policy, self._advantage, self._lr_of = policy, advantage, lr_of
        self._settings = settings
        self._skipped_in_a_row = 0
        self.progress = 0
        """Moves with each update."""

    def state_dict(self) -> dict[str, Any]:
        """The counters that outlive a step; the optimizer is the strategy's."""
        return {"skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self._skipped_in_a_row = state["skipped_in_a_row"]

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on `groups`; books figures in `metrics` and seconds in `watch`.

        Raises:
            TrainingError: too many updates in a row had a non-finite gradient.
        """
        settings = self._settings
        with watch.phase("batch"):
            batch = pack(groups, settings.overlong_filtering)
            advantages = self._advantage(batch.rewards, batch.groups)
            batch.columns["advantages"] = spread(advantages, batch)
        with watch.phase("old_logprobs"):
            metrics.merge(self._policy.old_logprobs(batch, settings.microbatch_tokens))
        self.progress += 1
        lr = self._lr_of(step)
        with watch.phase("update"):
            for epoch in range(settings.epochs):
                seed = (settings.seed, step, epoch)
                for update in cut_updates(len(groups), settings.groups_per_update, seed):
                    micro = micro_batches(batch, update, settings.microbatch_tokens)
                    stats = self._policy.update(micro, lr)
                    metrics.merge(stats)
                    self.progress += 1
                    self._count_skips(stats, step)
        metrics.spread("score/advantage", advantages.numpy())
        return Learned(batch, advantages.numpy().astype(np.float32))

    def _count_skips(self, stats: Metrics, step: int) -> None:
        skipped = bool(stats.record().get("actor/skipped_updates", 0))
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row >= self._settings.max_skipped_updates:
            raise TrainingError(
                f"step {step}: {self._skipped_in_a_row} updates in a row had a gradient that is "
                "not finite (optim.max_skipped_updates); lower optim.lr, or look for NaN weights "
                "in model.path"
            )
