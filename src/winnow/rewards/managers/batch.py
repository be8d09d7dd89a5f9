"""A user's function that takes many answers in a call, as verl's batch manager calls it.

Answers that wait while all workers are busy go together into the next call. Which those are
depends on what else happens in the run, and in a resumed run it is something else. So the
function must give each answer the score that it would have alone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from winnow.config.reward import BatchManager, RewardConfig
from winnow.rewards.managers.function import seed_of
from winnow.rewards.pool import ScorerPool, default_workers
from winnow.rewards.task import Arguments, Failure
from winnow.types import Prompt, Score


@dataclass(eq=False)
class _Waiting:
    arguments: Arguments
    seed: int
    result: asyncio.Future[Score | Failure]


@dataclass(eq=False)
class _Desk:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    free: int
    """Workers without a call."""
    waiting: list[_Waiting] = field(default_factory=list)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    is_planned: bool = False


class Batches:
    """Has workers call the function with what waits together.

    The time limit is that of a call. A call that fails is made again for each of its answers
    alone, so that a bad one costs itself only.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start the workers; each imports the user's file.

        Raises:
            RewardError: it cannot be used.
        """
        assert isinstance(config.manager, BatchManager)
        self._most = config.manager.max_answers
        self._workers = config.workers or default_workers()
        self._pool = ScorerPool(config, self._workers, config.function, batched=True)
        self._pool.start()
        self._desk: _Desk | None = None
        self.scored = 0

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Nothing: the workers have the file, and score whatever comes."""

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Always: others work at it."""
        return True

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the function says of this answer.

        Raises:
            RewardError: a new worker cannot load the user's file any more.
        """
        info = {"extra_info": prompt.extra.get("extra_info")}
        arguments = (prompt.data_source, text, prompt.ground_truth, info)
        desk = self._desk_of(asyncio.get_running_loop())
        one = _Waiting(arguments, seed_of(prompt, text), desk.loop.create_future())
        desk.waiting.append(one)
        if not desk.is_planned:
            # Behind whoever is ready to run now, and may ask as well.
            desk.is_planned = True
            desk.loop.call_soon(self._send, desk)
        return await one.result

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _desk_of(self, loop: asyncio.AbstractEventLoop) -> _Desk:
        if self._desk is None or self._desk.loop is not loop:
            self._desk = _Desk(loop, self._workers)
        return self._desk

    def _send(self, desk: _Desk) -> None:
        """Give what waits to the free workers, in equal parts."""
        desk.is_planned = False
        desk.waiting = [each for each in desk.waiting if not each.result.done()]  # cancelled
        while desk.free and desk.waiting:
            size = min(self._most, math.ceil(len(desk.waiting) / desk.free))
            batch, desk.waiting = desk.waiting[:size], desk.waiting[size:]
            desk.free -= 1
            call = desk.loop.create_task(self._call(desk, batch))
            desk.calls.add(call)
            call.add_done_callback(desk.calls.discard)

    async def _call(self, desk: _Desk, batch: list[_Waiting]) -> None:
        try:
            results = await self._results(batch)
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)
            self.scored += len(batch)
        except Exception as error:  # belongs to those who wait, who would wait for ever
            for each in batch:
                if not each.result.done():
                    each.result.set_exception(error)
        finally:
            desk.free += 1
            self._send(desk)

    async def _results(self, batch: list[_Waiting]) -> list[Score | Failure]:
        together = await self._ask(batch)
        if not isinstance(together, Failure):
            return list(together)
        if len(batch) == 1:
            return [together]
        alone = await asyncio.gather(*(self._ask([each]) for each in batch))
        return [each if isinstance(each, Failure) else each[0] for each in alone]

    async def _ask(self, batch: list[_Waiting]) -> tuple[Score | Failure, ...] | Failure:
        seed = sum(each.seed for each in batch) & 0xFFFFFFFF
        return await self._pool.score_batch(seed, [each.arguments for each in batch])
