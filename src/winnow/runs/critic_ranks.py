"""A critic on ranks of its own (`critic/strategy=fsdp2`), before and after the policy's learn.

    groups ─► `CriticWorker`s ─► values [T], left on rank 0's node ─► the policy's side
                    ▲                                                       │
                    └────────────── returns and loss_mask [T] ◄─────────────┘

Each rank packs the step's groups as the policy's do, and cuts them into the same updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import ArrayLike

from winnow.config.root import Config
from winnow.config.trainer import ShardedCritic
from winnow.learning.batch import Batch, device_of, pack
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import AnyLearner, CriticLearner, Learned
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import critic_passes, make_critic, make_settings
from winnow.runs.checkpoint import FileEntry, Snapshot
from winnow.runs.remote_learner import SavingRank, write_on_ranks
from winnow.runs.state import Tensors
from winnow.types import Group
from winnow.workers.array_refs import SplitResult, fetch, left_here
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
        super().__init__(rank, config, sharding)
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

    def values(self, groups: Sequence[Group], step: int) -> SplitResult | None:
        """Return the values [T] of a step's answers in batch order; on rank 0 alone.

        Raises:
            TrainingError: they are not finite.
        """
        fetch(groups)
        batch = self._batch = pack(groups)
        self._learner.values(batch, step)
        if not self._is_first:
            return None
        (values,), block = left_here(batch.columns["values"].numpy())
        return SplitResult(values, block)

    def learn(self, step: int, returns: ArrayLike, loss_mask: ArrayLike) -> tuple[Metrics, int]:
        """Take the updates of a step whose values were asked for.

        Args:
            returns, loss_mask: [T] in batch order.

        Returns:
            Figures, and the number of updates that were skipped in a row.

        Raises:
            TrainingError: as `CriticLearner.update` does.
        """
        assert self._batch is not None, "values come first"
        batch, self._batch = self._batch, None
        batch.columns["returns"] = torch.from_numpy(np.array(returns))
        batch = replace(batch, loss_mask=torch.from_numpy(np.array(loss_mask)))
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

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch, **given: Any
    ) -> Learned:
        """Train on the groups of a step, with what `Learner.learn` may be given besides."""
        with watch.phase("values"):
            said: SplitResult = self._ranks.ask("values", list(groups), step)[0]
        given["values"] = said.told
        learned = self._learner.learn(groups, step, metrics, watch, **given)
        assert learned.targets is not None
        with watch.phase("update"):
            own, self._skipped = self._ranks.ask("learn", step, *learned.targets)[0]
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
