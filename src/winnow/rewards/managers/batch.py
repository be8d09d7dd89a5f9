"""A user's function that takes many answers in a call, as verl's batch manager calls it.

Answers that wait while all workers are busy go together into the next call. The company of an
answer thus depends on the rest of the run, and differs in a resumed one: the function must give
each answer the score that it would have alone.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from winnow.config.reward import BatchManager, RewardConfig
from winnow.rewards.managers import Manager, arguments_of, seed_of
from winnow.rewards.pool import ScorerPool, default_workers
from winnow.rewards.task import Arguments, Failure
from winnow.types import Prompt, Score


@dataclass(eq=False)
class _WaitingAnswer:
    """An answer that waits for a call."""

    arguments: Arguments
    seed: int
    result: asyncio.Future[Score | Failure]


@dataclass(eq=False)
class _BatchQueue:
    """Answers and calls of one event loop."""

    loop: asyncio.AbstractEventLoop
    free: int
    """Workers without a call."""
    waiting: list[_WaitingAnswer] = field(default_factory=list)
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    is_planned: bool = False


class BatchCalls(Manager):
    """Has workers call a user's function with the answers that wait together.

    The time limit is that of a call. A call that fails is made again for each of its answers
    alone, so that a bad one costs itself only.

    Raises:
        RewardError: the user's file cannot be used.
    """

    def __init__(self, config: RewardConfig) -> None:
        assert isinstance(config.manager, BatchManager)
        self._most = config.manager.max_answers
        self._workers = config.workers or default_workers()
        self._pool = self._callers = ScorerPool(
            config, self._workers, config.function, batched=True
        )
        self._pool.start()
        self._queue: _BatchQueue | None = None

    @property
    def scored(self) -> int:
        """Answers whose call is over; the pool counts calls."""
        return self._done

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue.loop is not loop:
            self._queue = _BatchQueue(loop, self._workers)
        queue = self._queue
        one = _WaitingAnswer(
            arguments_of(prompt, text), seed_of(prompt, text), loop.create_future()
        )
        queue.waiting.append(one)
        if not queue.is_planned:
            # Behind all that is ready to run now, and may ask as well.
            queue.is_planned = True
            loop.call_soon(self._send, queue)
        return await one.result

    def _send(self, queue: _BatchQueue) -> None:
        """Give what waits to the free workers, in equal parts."""
        queue.is_planned = False
        queue.waiting = [each for each in queue.waiting if not each.result.done()]  # cancelled
        while queue.free and queue.waiting:
            size = min(self._most, math.ceil(len(queue.waiting) / queue.free))
            batch, queue.waiting = queue.waiting[:size], queue.waiting[size:]
            queue.free -= 1
            call = queue.loop.create_task(self._call(queue, batch))
            queue.calls.add(call)
            call.add_done_callback(queue.calls.discard)

    async def _call(self, queue: _BatchQueue, batch: list[_WaitingAnswer]) -> None:
        try:
            results = await self._results(batch)
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)
            self._done += len(batch)
        except Exception as error:  # belongs to those who wait, who would wait for ever
            for each in batch:
                if not each.result.done():
                    each.result.set_exception(error)
        finally:
            queue.free += 1
            self._send(queue)

    async def _results(self, batch: list[_WaitingAnswer]) -> list[Score | Failure]:
        together = await self._ask(batch)
        if not isinstance(together, Failure):
            return list(together)
        if len(batch) == 1:
            return [together]
        alone = await asyncio.gather(*(self._ask([each]) for each in batch))
        return [each if isinstance(each, Failure) else each[0] for each in alone]

    async def _ask(self, batch: list[_WaitingAnswer]) -> tuple[Score | Failure, ...] | Failure:
        seed = sum(each.seed for each in batch) & 0xFFFFFFFF
        return await self._callers.score_batch(seed, [each.arguments for each in batch])
