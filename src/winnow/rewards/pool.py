"""Scorers in processes of their own: `score` waits for one, a thread watches over all.

    score() ─► inbox ─► queue ─► a worker's batch ─► reply ─► the future that score() waits for
                          ▲                │ late, too large, dead
                          └── the others ──┘ its own sample: a failure that says why

This is the event loop's side; `winnow.rewards.overseer` is the thread's. No pool of the standard
library or of the packages looked at (concurrent.futures, pebble) has time limits for the parts
of a batch, async functions, output kept from the terminal, and an end with the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from winnow.config.reward import RewardConfig, UserFunction
from winnow.rewards.overseer import PoolMonitor
from winnow.rewards.task import Arguments, Failure, Outcome
from winnow.rewards.wire import BatchItem, Item, Job, pack
from winnow.types import Score

WAITING_PER_WORKER = 128
"""Answers that are taken in; more wait with their callers, and hold no memory here."""

_Future = asyncio.Future[Outcome]
_Loop = asyncio.AbstractEventLoop


class ScorerPool:
    """Workers that score; used from one event loop at a time.

    Args:
        config: gives the limits.
        function: the user's; None: the workers run built-in scorers.
        batched: it takes many answers in a call.
    """

    def __init__(
        self,
        config: RewardConfig,
        workers: int,
        function: UserFunction | None = None,
        batched: bool = False,
    ) -> None:
        self._capacity = WAITING_PER_WORKER * workers
        self._room: tuple[_Loop, asyncio.Semaphore] | None = None
        self._numbers = count()
        self._waiting: dict[int, tuple[_Loop, _Future]] = {}
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._wake_planned: _Loop | None = None
        self._wakee, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._loaded = threading.Event()
        self._broken: Exception | None = None
        self._is_closed = False
        self.finished = 0
        memory_bytes = config.memory_mb << 20
        job = Job(function, config.timeout_s, memory_bytes, tuple(sys.path), batched)
        self._overseer = PoolMonitor(job, workers, self)
        self._thread = threading.Thread(target=self._overseer.run, name="scorers", daemon=True)

    def start(self) -> None:
        """Start the workers and wait until one has loaded what scores.

        Raises:
            RewardError: the user's file cannot be used; one line says why.
        """
        atexit.register(self.close)
        self._thread.start()
        try:
            self._loaded.wait()
        except BaseException:  # a signal's: nobody would close this pool
            self.close()
            raise
        if self._broken is not None:
            self.close()
            raise self._broken

    async def score(self, scorer: str, seed: int, arguments: Arguments) -> Score | Failure:
        """Score one answer; waits while the pool has as many as it takes in.

        Raises:
            RewardError: a new worker could not load the user's file.
        """
        outcome = await self._ask(Item(next(self._numbers), scorer, seed, arguments))
        assert isinstance(outcome, Score | Failure)
        return outcome

    async def score_batch(
        self, seed: int, batch: Sequence[Arguments]
    ) -> tuple[Score | Failure, ...] | Failure:
        """Score answers in one call of the user's function; a failure is that of the whole call.

        Raises:
            RewardError: a new worker could not load the user's file.
        """
        outcome = await self._ask(BatchItem(next(self._numbers), seed, tuple(batch)))
        assert isinstance(outcome, tuple | Failure)
        return outcome

    async def _ask(self, item: Item | BatchItem) -> Outcome:
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = loop, asyncio.Semaphore(self._capacity)
        async with self._room[1]:
            number, packed = item.id, pack(item)
            future: _Future = loop.create_future()
            self._waiting[number] = loop, future
            self._inbox.append((number, packed))
            if self._wake_planned is not loop:  # once for all that are asked in this turn
                self._wake_planned = loop
                loop.call_soon(self._wake)
            if self._broken is not None:  # after the entry: the thread fails what it finds
                self._waiting.pop(number, None)
                raise self._broken
            try:
                return await future
            finally:
                self._waiting.pop(number, None)

    def close(self) -> None:
        """End all workers: idle ones by themselves, busy ones at once."""
        atexit.unregister(self.close)
        if self._is_closed:
            return
        self._overseer.is_closing = True
        self._wake()
        self._thread.join()
        self._is_closed = True
        os.close(self._waker)
        os.close(self._wakee)

    # What the thread calls.

    @property
    def wakee(self) -> int:
        """A descriptor that is readable when there is something new."""
        return self._wakee

    def take(self) -> list[tuple[int, bytes]]:
        """The packed items that have come in."""
        taken = []
        while self._inbox:
            taken.append(self._inbox.popleft())
        return taken

    def is_wanted(self, number: int) -> bool:
        """Whether somebody still waits for an item's score."""
        return number in self._waiting

    def loaded(self) -> None:
        """A worker is ready."""
        self._loaded.set()

    def settle(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Hand outcomes to the event loop that waits for them, all in one call."""
        self.finished += len(outcomes)
        by_loop: dict[_Loop, list[tuple[_Future, Outcome]]] = {}
        for number, outcome in outcomes:
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                by_loop.setdefault(waiting[0], []).append((waiting[1], outcome))
        for loop, own in by_loop.items():
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_set_all, own)

    def fail(self, error: Exception) -> None:
        """No worker can be had any more: all that waits ends with this."""
        self._broken = error = self._broken or error
        self._loaded.set()
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                with suppress(RuntimeError):
                    waiting[0].call_soon_threadsafe(_fail, waiting[1], error)

    def _wake(self) -> None:
        self._wake_planned = None
        if not self._is_closed:
            with suppress(BlockingIOError):  # it has not looked at earlier calls yet
                os.write(self._waker, b"!")


def default_workers() -> int:
    """Half of the cores that this process may use: the other half is the run's own."""
    return max(1, cores() // 2)


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _set_all(outcomes: Sequence[tuple[_Future, Outcome]]) -> None:
    for future, outcome in outcomes:
        if not future.done():  # cancelled
            future.set_result(outcome)


def _fail(future: _Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
