"""Reward pipelines in other processes: answers go there, scores come back, in pieces.

    driver   begun in one turn of the loop ─► dealt by load ─► one `exchange` a worker ─► scores
    worker   exchange(answers) ─► a task each ─► the pipeline ─► done ─► the newest exchange

An exchange returns as soon as something is done, so that a slow answer holds up nobody. Of several
under way only the newest waits: the driver makes another one when it has more to send. The driver
reads no tokens: an answer goes on as it came, and text is made where it is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from winnow.errors import WinnowError
from winnow.rewards.pipeline import RewardPipeline, ScoredAnswer
from winnow.rewards.task import make_portable
from winnow.types import Prompt, Trajectory
from winnow.workers.array_refs import prefetch_arrays
from winnow.workers.group import WorkerGroup
from winnow.workers.threads import set_outcome, spawn

MOST_CALLS = 2
"""To one worker at once: one that waits there, and one on its way with what has come since."""
PATIENCE_S = 1.0
"""A call returns after so long without news: what hangs is then never the call."""
LINGER_S = 0.002
"""For more to be done beside the first, where more is under way."""

ScoreRequest = tuple[int, Prompt, Trajectory, str | None, bool]
"""A number that the driver knows it by, and the arguments of `RewardPipeline.score`."""
_Future = asyncio.Future[ScoredAnswer]
FinishedAnswer = tuple[int, ScoredAnswer | WinnowError]
"""The number, and the score or the answer's error."""
ScoreReply = tuple[Sequence[FinishedAnswer], dict[str, int]]
"""The answers done since the last reply, in that order, and the pipeline's figures since then."""


@dataclass(eq=False)
class _WorkerLoad:
    """The answers of one event loop at one worker."""

    rank: int
    under_way: dict[int, _Future] = field(default_factory=dict)
    unsent: list[ScoreRequest] = field(default_factory=list)
    calls: int = 0


class RemotePipeline:
    """A `RewardPipeline` in each of several workers (`PipelineWorker`), which fail as a group.

    All methods raise WorkerError when a worker fails.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loads: list[_WorkerLoad] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._figures: Counter[str] = Counter()
        for figures in workers.call_blocking("figures"):
            self._figures.update(figures)

    def prepare(self, data_sources: Iterable[str]) -> None:
        self._workers.call_blocking("prepare", sorted(data_sources))

    def check_prompt(self, prompt: Prompt) -> None:
        self._workers.call_blocking("check_prompt", prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return True

    def figures(self) -> dict[str, int]:
        figures, self._figures = self._figures, Counter(dict.fromkeys(self._figures, 0))
        return dict(figures)

    def count_offloaded(self) -> int:
        return sum(each or 0 for each in self._workers.progress)

    def close(self) -> None:
        self._workers.close_blocking()

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._loads = [_WorkerLoad(rank) for rank in range(self._workers.size)]
        load = min(self._loads, key=lambda load: len(load.under_way))
        number = next(self._numbers)
        future: _Future = loop.create_future()
        load.under_way[number] = future
        bare = replace(trajectory, extras={})  # which are for learning, and large
        load.unsent.append((number, prompt, bare, text, training))
        if len(load.unsent) == 1:  # behind whoever is ready to run now, and may ask as well
            loop.call_soon(self._send, load)
        try:
            return await future
        finally:
            load.under_way.pop(number, None)

    def _send(self, load: _WorkerLoad) -> None:
        """Call a worker where it has answers; one call is always there to bring what is done."""
        if load.calls < MOST_CALLS and (load.unsent or (load.under_way and not load.calls)):
            requests = [request for request in load.unsent if request[0] in load.under_way]
            load.unsent.clear()
            load.calls += 1
            spawn(self._exchange(load, requests), self._tasks)

    async def _exchange(self, load: _WorkerLoad, requests: Sequence[ScoreRequest]) -> None:
        try:
            reply: ScoreReply
            reply = await self._workers.call_rank(load.rank, "exchange", requests, PATIENCE_S)
        except Exception as error:  # belongs to those who wait, who would wait for ever
            for future in load.under_way.values():
                set_outcome(future, error)
            load.under_way.clear()
        else:
            done, figures = reply
            self._figures.update(figures)
            for number, scored in done:
                if number in load.under_way:  # nobody gave it up
                    set_outcome(load.under_way.pop(number), scored)
        load.calls -= 1
        self._send(load)


class PipelineWorker:
    """Answers a `RemotePipeline` from another process; close it."""

    def __init__(self, pipeline: RewardPipeline) -> None:
        self._pipeline = pipeline
        self.prepare, self.check_prompt = pipeline.prepare, pipeline.check_prompt
        self.figures, self.close = pipeline.figures, pipeline.close
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[FinishedAnswer] = []
        self._broken: Exception | None = None
        self._count = 0
        self._newest = 0
        self._news = asyncio.Event()

    @property
    def progress(self) -> int:
        """A count that grows while scoring makes progress."""
        return self._count + self._pipeline.count_offloaded()

    async def exchange(self, requests: Sequence[ScoreRequest], patience_s: float) -> ScoreReply:
        """Start scoring these, and return finished answers as soon as there are any.

        Nothing may be, where nothing was for so long, or where there is a newer exchange.
        """
        self._newest += 1
        number = self._newest
        self._news.set()
        prefetch_arrays(trajectory for _, _, trajectory, _, _ in requests)
        for each in requests:
            spawn(self._score(*each), self._tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while number == self._newest and self._tasks and not self._done:
                    self._news.clear()
                    await self._news.wait()
                if number == self._newest and self._tasks:
                    await asyncio.sleep(LINGER_S)
        if self._broken is not None:
            raise self._broken
        if number != self._newest:
            return [], {}
        done, self._done = self._done, []
        return done, self._pipeline.figures()

    async def _score(
        self, number: int, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> None:
        outcome: ScoredAnswer | WinnowError
        try:
            scored = await self._pipeline.score(prompt, trajectory, text, training)
            # Whatever classes the scorer's process knows, the driver does not.
            outcome = replace(scored, score=make_portable(scored.score))
        except WinnowError as error:
            outcome = error
        except Exception as error:  # a mistake of ours: the worker's, not this answer's
            self._broken = error
            self._news.set()
            return
        self._count += 1
        self._done.append((number, outcome))
        self._news.set()
