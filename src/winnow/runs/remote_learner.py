"""The driver's end of a learning side on several ranks: groups go there, figures come back."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.errors import CheckpointError
from winnow.learning.canary import Canary
from winnow.learning.learner import Learned
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.rollout.engine import WeightUpdate
from winnow.rollout.weights import Bucket, tensors
from winnow.runs.checkpoint import Snapshot
from winnow.runs.learner_worker import RANKS, RankFacts, StepReply
from winnow.types import FloatArray, Group
from winnow.workers.group import ThreadsafeGroup


class RemoteLearner:
    """A `Learner` whose models lie on the ranks of a group of `LearnerWorker`s.

    Raises:
        WinnowError: as calls of `WorkerGroup`; so do all methods that ask the ranks.
    """

    def __init__(self, group: ThreadsafeGroup) -> None:
        self._group = group
        self.facts: RankFacts = self.call("facts")
        self._state = self.facts.learner
        self._steps = 0

    @property
    def progress(self) -> int:
        """Moves with each step, and with each pass and update of a rank."""
        return self._steps + sum(each or 0 for each in self._group.progress)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; returns rank 0's result."""
        return self._group.ask(method, *args)[0]

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on a step's groups.

        The time that rank 0 books under its phases is booked here, too; `ranks` is what is left,
        the way there and back.
        """
        with watch.phase("ranks"):
            reply: StepReply = self.call("learn", list(groups), step)
        watch.rebook("ranks", reply.seconds)
        metrics.merge(reply.metrics)
        self._state = reply.learner
        self._steps += 1
        return reply.learned

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.call("load_learner", dict(state))
        self._state = state

    def trained(self, version: int) -> WeightUpdate:
        """Export the tensors that are trained, by names of parameters, for an engine over them."""
        return WeightUpdate(version, tensors=tensors(self._buckets(version, False)))

    def weights(self, version: int) -> WeightUpdate:
        """Export all weights, by Hugging Face names, an adapter merged, in the model's type.

        In buckets that may lie with rank 0: they need not come to this process.
        """
        return WeightUpdate(version, buckets=self._buckets(version, True))

    def _buckets(self, version: int, whole: bool) -> Iterator[Bucket]:
        self.call("begin_export", version, whole)
        while (said := self.call("next_bucket")) is not None:
            yield said.told

    def canary(self, canary: Canary) -> list[FloatArray]:
        found: list[FloatArray] = self.call("canary", canary)
        return found


class RemoteSnapshots:
    """The `Tensors` of a checkpoint whose models lie on ranks, which write them."""

    def __init__(self, learner: RemoteLearner) -> None:
        self._learner = learner

    def copy(self) -> Snapshot:
        self._learner.call("copy")
        return Snapshot({}, save_model=lambda folder: None, save_ranks=self._write)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        if not (checkpoint / RANKS).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {RANKS}: it was saved by trainer/strategy=single; "
                "use that, or another checkpoint"
            )
        self._learner.call("restore", str(checkpoint / RANKS))

    def _write(self, checkpoint: Path) -> None:
        fault: tuple[int, str] | None = self._learner.call("write", str(checkpoint))
        if fault is not None:
            number, path = fault
            raise OSError(number, os.strerror(number), path)
