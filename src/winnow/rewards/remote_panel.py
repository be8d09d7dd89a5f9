"""Panels in other processes, as the driver sees them: answers go there, scores come back.

    begun in one turn of the loop ─► dealt by load ─► one call a worker ─► scores, in pieces

The driver reads no tokens: an answer goes on as it came, and text is made where it is scored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from winnow.rewards.panel_worker import Asked, Reply
from winnow.rewards.pipeline import ScoredAnswer
from winnow.types import Prompt, Trajectory

MOST_UNDER_WAY = 512
"""Answers at one worker; more wait here, for whichever gets on."""
MOST_CALLS = 2
"""To one worker at once: one that waits there, and one on its way with what has come since."""
PATIENCE_S = 1.0
"""A call returns after so long without news: what hangs is then never the call."""

_Future = asyncio.Future[ScoredAnswer]


class Workers(Protocol):
    """What of worker processes a panel needs."""

    @property
    def size(self) -> int:
        """How many."""
        ...

    @property
    def progress(self) -> Sequence[int | None]:
        """Their own, by rank; another thread may ask."""
        ...

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one."""
        ...

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all and wait for it; what they said."""
        ...

    def close(self) -> None:
        """End them; a second time does nothing."""
        ...


@dataclass(eq=False)
class _Worker:
    rank: int
    under_way: dict[int, _Future] = field(default_factory=dict)
    calls: int = 0


@dataclass(eq=False)
class _Desk:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    workers: list[_Worker]
    waiting: deque[tuple[Asked, _Future]] = field(default_factory=deque)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_planned: bool = False


class RemotePipeline:
    """An `AnyPipeline` over workers that are `PipelineWorker`s. They fail as a group.

    All methods raise WorkerError when a worker fails.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._numbers = count()
        self._desk: _Desk | None = None
        self._figures: dict[str, int] = {}
        for figures in workers.ask("figures"):
            self._book(figures)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See `AnyPipeline.prepare`."""
        self._workers.ask("prepare", sorted(data_sources))

    def check_prompt(self, prompt: Prompt) -> None:
        """See `AnyPipeline.check_prompt`."""
        self._workers.ask("check_prompt", prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Always: others work at it."""
        return True

    def figures(self) -> dict[str, int]:
        """See `AnyPipeline.figures`; what came with scores is counted."""
        told, self._figures = self._figures, dict.fromkeys(self._figures, 0)
        return told

    def scored_apart(self) -> int:
        """See `AnyPipeline.scored_apart`."""
        return sum(each or 0 for each in self._workers.progress)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        """See `AnyPipeline.score`."""
        desk = self._desk
        if desk is None or desk.loop is not asyncio.get_running_loop():
            desk = self._desk = _Desk(
                asyncio.get_running_loop(), [_Worker(rank) for rank in range(self._workers.size)]
            )
        future: _Future = desk.loop.create_future()
        asked = next(self._numbers), prompt, trajectory, text, training
        desk.waiting.append((asked, future))
        if not desk.is_planned:
            # Behind whoever is ready to run now, and may ask as well.
            desk.is_planned = True
            desk.loop.call_soon(self._send, desk)
        return await future

    def _send(self, desk: _Desk) -> None:
        """Give what waits to whoever may be called, so that all have as much."""
        desk.is_planned = False
        workers = sorted(desk.workers, key=lambda worker: len(worker.under_way), reverse=True)
        load = len(desk.waiting) + sum(len(worker.under_way) for worker in workers)
        for index, worker in enumerate(workers):
            held = len(worker.under_way)
            level = min(load // (len(workers) - index), MOST_UNDER_WAY)
            load -= max(level, held)
            if worker.calls == MOST_CALLS:  # its share waits for it
                continue
            asked = self._taken(desk, worker, level - held)
            # One call is always there to bring what will be done.
            if asked or (worker.under_way and not worker.calls):
                self._call(desk, worker, asked)

    def _taken(self, desk: _Desk, worker: _Worker, most: int) -> list[Asked]:
        taken: list[Asked] = []
        while len(taken) < most and desk.waiting:
            asked, future = desk.waiting.popleft()
            if not future.done():  # not cancelled
                worker.under_way[asked[0]] = future
                taken.append(asked)
        return taken

    def _call(self, desk: _Desk, worker: _Worker, asked: list[Asked]) -> None:
        worker.calls += 1
        task = desk.loop.create_task(self._exchange(desk, worker, asked))
        desk.tasks.add(task)
        task.add_done_callback(desk.tasks.discard)

    async def _exchange(self, desk: _Desk, worker: _Worker, asked: list[Asked]) -> None:
        try:
            call = self._workers.call_rank(worker.rank, "exchange", asked, PATIENCE_S)
            reply: Reply = await call
        except Exception as error:  # belongs to those who wait, who would wait for ever
            for future in worker.under_way.values():
                _refuse(future, error)
            worker.under_way.clear()
        else:
            self._book(reply.figures)
            for number, said in reply.done:
                if number not in worker.under_way:  # of a loop that is no more
                    continue
                future = worker.under_way.pop(number)
                if isinstance(said, Exception):
                    _refuse(future, said)
                elif not future.done():  # not cancelled
                    future.set_result(said)
        worker.calls -= 1
        self._send(desk)

    def _book(self, figures: dict[str, int]) -> None:
        for name, value in figures.items():
            self._figures[name] = self._figures.get(name, 0) + value


def _refuse(future: _Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # where nobody waits any more, nobody is to be told
