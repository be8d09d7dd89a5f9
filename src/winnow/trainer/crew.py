"""The learning side of a run on several ranks, as the driver sees it: numbers in, numbers out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from winnow.cluster.protocol import WorkerGroup
from winnow.errors import CheckpointError
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.trainer.learner import Learned
from winnow.trainer.rank import Bucket, RankFacts, StepReply
from winnow.trainer.tensors import Copied, Save, host_copies
from winnow.types import Group

_T = TypeVar("_T")
RANKS = "ranks"
"""A checkpoint's folder of what ranks hold."""


class Crew:
    """A worker group for callers that wait; its calls are served by a thread of its own.

    Args:
        start: starts the group.

    Raises:
        WinnowError: the group could not be started.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, WorkerGroup]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crew", daemon=True)
        self._thread.start()
        self._group: WorkerGroup | None = None
        try:
            self._group = self._wait(start())
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks; what rank 0 said.

        Raises:
            WinnowError: see `WorkerGroup`.
        """
        assert self._group is not None
        return self._wait(self._group.call(method, *args))[0]

    def close(self) -> None:
        """End the ranks; a second time does nothing."""
        if self._loop.is_closed():
            return
        try:
            if self._group is not None:
                self._wait(self._group.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C, while it goes on
            future.cancel()
            raise


class CrewLearner:
    """A `Learner` whose models lie on the ranks."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.facts: RankFacts = crew.call("facts")
        self._state = self.facts.learner
        self.progress = 0
        """Moves with each step."""

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """See `Learner.learn`.

        The time that rank 0 books under its phases is booked here, too; `ranks` is what is left,
        the way there and back.
        """
        with watch.phase("ranks"):
            reply: StepReply = self._crew.call("learn", list(groups), step)
        watch.rebook("ranks", reply.seconds)
        metrics.merge(reply.metrics)
        self._state = reply.learner
        self.progress += 1
        return reply.learned

    def state_dict(self) -> dict[str, Any]:
        """See `Learner.state_dict`."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Learner.load_state_dict`."""
        self._crew.call("load_learner", dict(state))
        self._state = state

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What is trained, by the names of parameters, in the type that the model computes in."""
        self._crew.call("begin_export")
        while (bucket := self._crew.call("next_bucket")) is not None:
            yield from _tensors(bucket)


class CrewTensors:
    """What a checkpoint has of models that lie on the ranks; see `tensors.Tensors`.

    Args:
        model: of this process, which has had the newest weights.
        save_model: writes model weights, given by name, to a folder.
    """

    def __init__(self, crew: Crew, model: nn.Module, save_model: Save) -> None:
        self._crew, self._model, self._save_model = crew, model, save_model

    def copy(self) -> Copied:
        """See `Tensors.copy`."""
        weights = host_copies(self._model)
        self._crew.call("copy")
        return Copied(
            {},
            lambda folder: self._save_model(weights, folder),
            lambda folder: self._crew.call("write", str(folder / RANKS)),
        )

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """See `Tensors.restore`."""
        if not (checkpoint / RANKS).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no {RANKS}: it was saved by trainer/strategy=single; "
                "use that, or another checkpoint"
            )
        self._crew.call("restore", str(checkpoint / RANKS))


def _tensors(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    for name, data, dtype in bucket:
        numbers = torch.from_numpy(np.require(data, requirements="W").reshape(-1))
        yield name, numbers.view(getattr(torch, dtype)).view(data.shape[:-1])
