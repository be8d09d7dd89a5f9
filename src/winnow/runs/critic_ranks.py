"""A critic on ranks of its own (`critic/strategy=fsdp2`), before and after the policy's learn.

    groups ─► `CriticWorker`s ─► values of each one's samples, left on its node ─► the policy's side
                    ▲                                                                    │
                    └───── returns and loss_mask of each one's, left on its node ◄───────┘

Each rank packs its own samples of the step, and cuts them into the same updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from winnow.config.root import Config
from winnow.config.trainer import ShardedCritic
from winnow.learning.batch import Batch, TokenColumn
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import AnyLearner, CriticLearner, Learned
from winnow.learning.peers import device_of
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import critic_passes, make_critic, make_settings
from winnow.runs.checkpoint import FileEntry, Snapshot
from winnow.runs.remote_learner import SavingRank, write_on_ranks
from winnow.runs.state import Tensors
from winnow.types import Group
from winnow.workers.array_refs import SplitResult, left_here
from winnow.workers.group import WorkerGroup
from winnow.workers.host import RankInfo


class CriticWorker(SavingRank):
    """One rank of the critic; a worker of a `WorkerGroup`.

    Args:
        start: as `LearnerWorker` takes it.

    Raises:
        ModelError: it cannot be loaded.
    """

    role: ClassVar[str] = "critic"

    def __init__(self, rank: RankInfo, config: Config, start: str | None) -> None:
        sharding = config.critic.strategy
        assert isinstance(sharding, ShardedCritic)
        super().__init__(rank, config, sharding.replicas)
        held = Sharding(offload=sharding.offload)
        hold = partial(FSDP2Strategy, mesh=self._mesh, sharding=held)
        critic = make_critic(config, start, device_of(self._mesh), True, hold)
        self._strategies["critic"] = cast(FSDP2Strategy, critic.strategy)
        self._learner = CriticLearner(critic, make_settings(config))
        self._batch: Batch | None = None

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learner.progress

    def passes(self) -> dict[str, Any]:
        """Return the fields of `Passes` that are a critic's."""
        return critic_passes(self._strategies["critic"])

    def values(self, groups: Sequence[Group], step: int) -> SplitResult:
        """Return who holds each sample, and values [T] of this rank's, in the step's order.

        Raises:
            TrainingError: they are not finite.
        """
        sharder = self._strategies["critic"].sharder
        batch = self._batch = sharder.pack(groups, self._learner.microbatch_tokens)
        self._learner.values(batch, step)
        (values,), block = left_here(batch.columns["values"].numpy())
        return SplitResult((batch.holders, values), block)

    def learn(self, step: int, returns: TokenColumn, loss_mask: TokenColumn) -> tuple[Metrics, int]:
        """Take the updates of a step whose values were asked for.

        Args:
            returns, loss_mask: of the step's tokens.

        Returns:
            Figures, and the number of updates that were skipped in a row.

        Raises:
            TrainingError: as `CriticLearner.update` does.
        """
        assert self._batch is not None, "values come first"
        batch, self._batch = self._batch, None
        batch.columns["returns"] = batch.taken(returns)
        batch = replace(batch, loss_mask=batch.taken(loss_mask).bool())
        metrics = self._learner.update(batch, step)
        self._book_memory(metrics)
        return metrics, self._learner.skips.in_a_row

    def load_learner(self, skipped: int) -> None:
        """Take back the number of updates that were skipped in a row."""
        self._learner.skips.in_a_row = skipped


class WithCritic:
    """A learner and its `Tensors` with a critic that a group of `CriticWorker`s holds.

    Raises:
        WinnowError: as calls of `WorkerGroup`.
    """

    def __init__(self, learner: AnyLearner, tensors: Tensors, ranks: WorkerGroup) -> None:
        self._learner, self._tensors, self._ranks = learner, tensors, ranks
        self._skipped = 0

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learner.progress + sum(each or 0 for each in self._ranks.progress)

    @property
    def begun(self) -> int:
        """The number of steps of which an update may have changed weights."""
        return self._learner.begun

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch, **given: Any
    ) -> Learned:
        """Train on the groups of a step, with what `Learner.learn` may be given besides."""
        with watch.phase("values"):
            bare = [group.bare for group in groups]
            said: list[SplitResult] = self._ranks.ask("values", bare, step)
        given["values"] = TokenColumn(said[0].told[0], [each.told[1] for each in said])
        learned = self._learner.learn(groups, step, metrics, watch, **given)
        assert learned.targets is not None
        holders = learned.holders
        if holders is None:
            holders = np.zeros(len(learned.advantages), np.int64)
        targets = [TokenColumn(holders, parts) for parts in learned.targets]
        with watch.phase("update"):
            own, self._skipped = self._ranks.ask("learn", step, *targets)[0]
        metrics.merge(own)
        return learned

    def state_dict(self) -> dict[str, Any]:
        state = self._learner.state_dict()
        return state | {"skipped_in_a_row": state["skipped_in_a_row"] | {"critic": self._skipped}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)
        self._skipped = state["skipped_in_a_row"]["critic"]
        self._ranks.ask("load_learner", self._skipped)

    def copy(self) -> Snapshot:
        self._ranks.ask("copy")
        snapshot = self._tensors.copy()

        def save_ranks(checkpoint: Path) -> dict[str, FileEntry]:
            entries = snapshot.save_ranks(checkpoint)
            return {**entries, **write_on_ranks(self._ranks, checkpoint)}

        return replace(snapshot, save_ranks=save_ranks)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        self._tensors.restore(checkpoint, state)
        self._ranks.ask("restore", str(checkpoint))
