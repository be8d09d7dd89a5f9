"""Scorings under way, from the end of an answer to the moment its score is seen.

A scoring begins when its answer finishes and goes on beside the engine. When a score is *seen*
decides what the ledger does next, and there are two answers to that:

- deterministic: a fixed number of decode ticks after the answer finished, and the scheduler
  waits for those that are late; the run is then the same however long scorers take;
- free: as soon as it is there; nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from winnow.types import Prompt, Score, Trajectory

Key = tuple[int, int]
"""Group and answer."""
Scorer = Callable[[Prompt, Trajectory], Score | Awaitable[Score]]


@dataclass(frozen=True, slots=True, eq=False)
class _Scoring:
    future: asyncio.Future[Score]
    due: int
    """Decode tick at which it is seen in deterministic mode."""


class Scores:
    """Begins scorings, in the order in which answers finish, and gives their scores."""

    def __init__(self, score: Scorer) -> None:
        self._score = score
        self._under_way: dict[Key, _Scoring] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._under_way)

    def __contains__(self, key: Key) -> bool:
        return key in self._under_way

    def begin(self, key: Key, prompt: Prompt, trajectory: Trajectory, due: int) -> None:
        """Score an answer; `due` is the tick at which the score should be seen."""
        assert key not in self._under_way
        given = self._score(prompt, trajectory)
        if isinstance(given, Score):
            future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
            future.set_result(given)
        else:
            future = asyncio.ensure_future(given)
            future.add_done_callback(lambda _: self._news.set())
        self._under_way[key] = _Scoring(future, due)

    @property
    def next_due(self) -> int | None:
        """The tick at which the next score is to be seen; None when there is none."""
        first = next(iter(self._under_way.values()), None)
        return None if first is None else first.due

    def due(self, tick: int) -> list[Key]:
        """Those to be seen at `tick`, in the order in which they began."""
        return [key for key, scoring in self._under_way.items() if scoring.due <= tick]

    def ready(self) -> list[Key]:
        """Those whose score is there, in the order in which they began."""
        return [key for key, scoring in self._under_way.items() if scoring.future.done()]

    async def news(self) -> None:
        """Wait until a score is there."""
        while not self.ready():
            self._news.clear()
            await self._news.wait()

    async def take(self, keys: Iterable[Key]) -> list[Score]:
        """The scores of these answers, waiting for all; they are under way no longer.

        An error of one scoring ends the waiting at once.
        """
        keys = list(keys)
        futures = [self._under_way[key].future for key in keys]
        if not all(future.done() for future in futures):
            await asyncio.gather(*futures)
        return [self._under_way.pop(key).future.result() for key in keys]

    async def cancel(self) -> None:
        """End all scorings; whose score was not taken is unscored."""
        futures = [scoring.future for scoring in self._under_way.values()]
        self._under_way.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
