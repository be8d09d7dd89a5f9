"""Scorers in processes of their own, with limits of time and memory.

    score() ─► inbox ─► queue ─► a process's batch ─► reply ─► the future that score() waits for
                          ▲                │ late, too large, dead
                          └── the others ──┘ its own sample: a failure that says why

The processes are served by a thread with an event loop of its own, because limits must hold while
the run's thread is busy with the model. A plain function has one answer in work a process, so it is
known whose fault an end is, and the rest of its batch goes to another process. Any of an
asynchronous function's many answers may be at fault: each is asked again, alone.

Memory is what is resident, looked at every `_TICK_S` while a process works: a limit on address
space (RLIMIT_AS) would count what numpy, torch and thread stacks only reserve. In between a
process can exceed its limit by as much as it can touch in that time, about 0.1 GiB.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from winnow.config.reward import RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards.task import Arguments, Failure, Outcome
from winnow.rewards.wire import (
    BatchItem,
    Ready,
    Refused,
    ScoreItem,
    ScorerJob,
    ScorerReply,
    late_line,
)
from winnow.types import Score

if TYPE_CHECKING:
    from winnow.workers.local import LocalConnection

log = logging.getLogger(__name__)

WAITING_PER_WORKER = 128
"""Answers that are taken in; more wait with their callers, and hold no memory here."""
ASYNC_AT_ONCE = 64
"""Answers that a process awaits side by side; halved each time that one blocks the others."""
KEPT_OUTPUT_BYTES = 4096
_LARGEST_BATCH = 32
_BATCH_S = 0.02
_GRACE_S = 1.0
"""Over the limit, for a process that keeps the time of its answers itself."""
_LOAD_LIMIT_S = 600.0
_LOAD_ATTEMPTS = 3
"""In a row, of processes that died while loading what another had loaded."""
_TICK_S = 0.05
_CLOSING_S = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# One core a process; and sets of strings are in the same order in each of them.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(eq=False)
class _Ask:
    """An item, and the caller that waits for its score in an event loop of its own."""

    item: ScoreItem | BatchItem
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Outcome]


@dataclass(eq=False)
class _Output:
    """The beginning of what a process prints, which is kept from the terminal."""

    printed: bytes = b""
    printed_bytes: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Read to the end."""
        while data := await reader.read(1 << 18):
            self.printed += data[: KEPT_OUTPUT_BYTES - len(self.printed)]
            self.printed_bytes += len(data)
        self.has_ended.set()

    @property
    def text(self) -> str:
        """The part that is kept."""
        return self.printed.decode(errors="replace").rstrip()

    def log(self) -> None:
        """Log it, if there is any."""
        if self.printed:
            log.info(
                "a scorer's process wrote %d bytes to its output; it begins with: %s",
                self.printed_bytes,
                self.text,
                extra={"printed": self.printed.decode(errors="replace")},
            )


@dataclass(eq=False)
class _Scorer:
    """One process, and the asks that it has."""

    process: LocalConnection
    output: _Output
    born: float = field(default_factory=time.monotonic)
    numbers: count[int] = field(default_factory=count)
    is_ready: bool = False
    is_async: bool = False
    is_leaving: bool = False
    is_alone: bool = False
    """True if it has, or had, an ask that is to have the process to itself."""
    refusal: str | None = None
    """The reason why the user's file cannot be used."""
    held: dict[_Ask, float] = field(default_factory=dict)
    """Asks in the order sent, with the time from which each may be under way."""
    batch_began: float = 0.0
    batch_size: int = 0

    @property
    def is_idle(self) -> bool:
        """True if it could take more at once."""
        return self.is_ready and not self.held

    def deadline(self, timeout_s: float) -> float:
        """The time at which the ask in work is late; the oldest of an async function's."""
        grace_s = _GRACE_S if self.is_async else 0.0
        return next(iter(self.held.values())) + timeout_s + grace_s

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM; 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0


class ScorerPool:
    """Processes that score; used from one event loop at a time.

    Args:
        config: gives the limits.
        function: the user's; None: the processes run built-in scorers.
        batched: it takes many answers in a call.
    """

    def __init__(
        self,
        config: RewardConfig,
        workers: int,
        function: UserFunction | None = None,
        batched: bool = False,
    ) -> None:
        self.finished = 0
        memory_bytes = config.memory_mb << 20
        self._job = ScorerJob(function, config.timeout_s, memory_bytes, tuple(sys.path), batched)
        self._workers = workers
        self._capacity = WAITING_PER_WORKER * workers
        self._room: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._inbox: deque[_Ask] = deque()
        self._wake_planned: asyncio.AbstractEventLoop | None = None
        self._waiting: set[_Ask] = set()
        self._loaded = threading.Event()
        self._broken: Exception | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="scorers", daemon=True)
        # The thread's own.
        self._scorers: list[_Scorer] = []
        self._queue: deque[_Ask] = deque()
        self._alone: deque[_Ask] = deque()
        self._done: list[tuple[_Ask, Outcome]] = []
        self._at_once = ASYNC_AT_ONCE
        self._seconds_each = _BATCH_S
        self._was_loaded = self._is_broken = False
        self._lost_loading = 0

    def start(self) -> None:
        """Start the processes and wait until one has loaded what scores.

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
            RewardError: a new process could not load the user's file.
        """
        outcome = await self._ask(ScoreItem(scorer, seed, arguments))
        assert isinstance(outcome, Score | Failure)
        return outcome

    async def score_batch(
        self, seed: int, batch: Sequence[Arguments]
    ) -> tuple[Score | Failure, ...] | Failure:
        """Score answers in one call of the user's function; a failure is that of the whole call.

        Raises:
            RewardError: a new process could not load the user's file.
        """
        outcome = await self._ask(BatchItem(seed, tuple(batch)))
        assert isinstance(outcome, tuple | Failure)
        return outcome

    async def _ask(self, item: ScoreItem | BatchItem) -> Outcome:
        loop = asyncio.get_running_loop()
        if self._room is None or self._room[0] is not loop:
            self._room = loop, asyncio.Semaphore(self._capacity)
        async with self._room[1]:
            asked = _Ask(item, loop, loop.create_future())
            self._waiting.add(asked)
            self._inbox.append(asked)
            if self._wake_planned is not loop:  # once for all that are asked in this turn
                self._wake_planned = loop
                loop.call_soon(self._wake)
            try:
                if self._broken is not None:  # after the entry: the thread fails what it finds
                    raise self._broken
                return await asked.future
            finally:
                self._waiting.discard(asked)

    def close(self) -> None:
        """End all processes: idle ones by themselves, busy ones at once."""
        atexit.unregister(self.close)
        if self._loop.is_closed():
            return
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._loop.close()

    def _wake(self) -> None:
        self._wake_planned = None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._news.set)

    # The rest runs in the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        """Feed, time, weigh, end and replace the processes, to the end of the last one."""
        error: Exception = RuntimeError("the scorer pool is closed")
        next_look = 0.0
        try:
            while not self._is_closing:
                await self._fill_up()
                self._assign()
                is_busy = not all(scorer.is_idle for scorer in self._scorers)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _TICK_S if is_busy else None)
                self._news.clear()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _TICK_S
                    for scorer in list(self._scorers):
                        await self._look_at(scorer)
                for scorer in [each for each in self._scorers if each.process.is_cut]:
                    await self._lose(scorer, None)
                self._settle()
        except Exception as mistake:
            log.exception("the scorer pool fails")
            error = mistake
        finally:
            give_up = time.monotonic() + _CLOSING_S
            for scorer in self._scorers:
                scorer.process.hang_up()
                if not scorer.is_idle:
                    scorer.process.kill()
            for scorer in self._scorers:
                await self._end(scorer, give_up - time.monotonic())
            self._fail(error)

    def _settle(self) -> None:
        """Hand outcomes to the event loop that waits for them, all in one call."""
        self.finished += len(self._done)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Ask, Outcome]]] = {}
        for asked, outcome in self._done:
            by_loop.setdefault(asked.loop, []).append((asked, outcome))
        self._done.clear()
        for loop, own in by_loop.items():
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                loop.call_soon_threadsafe(_set_all, own)

    def _fail(self, error: Exception) -> None:
        """End all that waits, now and later: no process can be had any more."""
        self._broken = error = self._broken or error
        self._loaded.set()
        for asked in list(self._waiting):
            with contextlib.suppress(RuntimeError):
                asked.loop.call_soon_threadsafe(_refuse, asked.future, error)

    def _take(self, scorer: _Scorer, asked: _Ask | None, said: Any) -> None:
        """Take in a message of a process; the ask None is its job."""
        self._news.set()
        match said:
            case Ready(is_async):
                scorer.is_ready, scorer.is_async = True, is_async
                self._was_loaded, self._lost_loading = True, 0
                self._loaded.set()
                return
            case Refused(line):
                scorer.refusal = line
                return
        assert asked is not None
        if not isinstance(said, ScorerReply):  # a failure of the connection: it cannot be read
            said = ScorerReply(Failure(said.line, said.traceback))
        scorer.is_leaving |= said.is_last
        del scorer.held[asked]
        if scorer.held and not scorer.is_async:  # the next one's time begins
            scorer.held[next(iter(scorer.held))] = time.monotonic()
        if said.outcome is not None:
            self._done.append((asked, said.outcome))
        else:
            self._blame([asked], late_line(self._job.timeout_s), scorer.is_alone)
        if not scorer.held:
            seconds = (time.monotonic() - scorer.batch_began) / scorer.batch_size
            self._seconds_each += 0.3 * (seconds - self._seconds_each)

    async def _look_at(self, scorer: _Scorer) -> None:
        """Hold a process at work against its limits."""
        if scorer.is_idle:
            return
        if scorer.process.ending() is not None:  # what it forked may keep the connection open
            await self._lose(scorer, None)
            return
        now, memory, most = time.monotonic(), scorer.resident_bytes(), self._job.memory_bytes
        if memory > most:
            line = f"used {memory >> 20:,} MiB of memory, reward.memory_mb is {most >> 20}"
            await self._lose(scorer, f"the scorer {line}" if scorer.is_ready else line)
        elif not scorer.is_ready:
            if now > scorer.born + _LOAD_LIMIT_S:
                await self._lose(scorer, f"took more than {_LOAD_LIMIT_S:g} s")
        elif now > scorer.deadline(self._job.timeout_s):
            scorer.process.receive()  # an answer may have come while this thread waited
            if scorer.held and time.monotonic() > scorer.deadline(self._job.timeout_s):
                await self._lose(scorer, late_line(self._job.timeout_s))

    async def _lose(self, scorer: _Scorer, reason: str | None) -> None:
        """Part with a process that is gone, or is to be killed for `reason`."""
        scorer.process.receive()
        self._scorers.remove(scorer)
        if reason is not None:
            scorer.process.kill()
        scorer.process.hang_up()
        ended = await self._end(scorer, _CLOSING_S if reason is None else 0.0)
        how = ended or "cut its connection"
        if not scorer.is_ready:
            self._lose_loading(scorer, reason or how)
            return
        held = list(scorer.held)
        if scorer.is_leaving:
            self._queue.extendleft(reversed(held))
            return
        line = reason or f"the scorer's process {how}"
        log.warning("a scorer's process is replaced: %s", line)
        guilty = held if scorer.is_async else held[:1]
        self._queue.extendleft(reversed(held[len(guilty) :]))
        printed = scorer.output.text
        trace = f"{line}\nIts process had written:\n{printed}" if printed else line
        self._blame(guilty, line, len(guilty) == 1, trace)

    def _lose_loading(self, scorer: _Scorer, how: str) -> None:
        self._lost_loading += 1
        is_chance = self._was_loaded and self._lost_loading < _LOAD_ATTEMPTS
        if scorer.refusal is None and is_chance:
            log.warning("a scorer's process %s while it was starting", how)
            return
        self._is_broken = True
        self._fail(RewardError(scorer.refusal or _load_error(self._job, how)))

    def _blame(self, asks: Sequence[_Ask], line: str, is_certain: bool, trace: str = "") -> None:
        """Fail the ask that was in work; where there were several, try each again, alone."""
        if is_certain:
            self._done += [(asked, Failure(line, trace or line)) for asked in asks]
            return
        if asks and line == late_line(self._job.timeout_s) and self._at_once > 1:
            self._at_once //= 2
            log.warning("an async scorer blocks others; now %d at once", self._at_once)
        self._alone.extend(asks)

    async def _end(self, scorer: _Scorer, patience_s: float) -> str | None:
        """Wait for a process to end, kill what is left of it, and log what it printed.

        Returns:
            The way in which it ended, in words; None if it did not end by itself in time.
        """
        await scorer.process.gone(patience_s)
        ended = scorer.process.ending()
        scorer.process.kill()
        await scorer.process.gone(5.0)  # longer: a process that the kernel holds on to
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(scorer.output.has_ended.wait(), _CLOSING_S)
        await scorer.process.release()
        scorer.output.log()
        return ended

    async def _fill_up(self) -> None:
        """Start processes in place of those that are gone."""
        from winnow.workers.local import LocalConnection

        while len(self._scorers) < self._workers and not self._is_broken:
            output = _Output()
            module = "winnow.rewards.worker"
            scorer = _Scorer(
                await LocalConnection.start(module, _ENVIRONMENT, output.follow), output
            )
            scorer.process.when_cut = self._news.set
            self._scorers.append(scorer)
            self._send(scorer, None, self._job)

    def _send(self, scorer: _Scorer, asked: _Ask | None, message: object) -> None:
        from winnow.workers.local import pack

        number, packed = next(scorer.numbers), pack(message)
        scorer.process.send(number, packed, lambda said: self._take(scorer, asked, said))

    def _assign(self) -> None:
        """Give the processes what they have room for."""
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        for scorer in self._scorers:
            if scorer.is_ready and not scorer.is_leaving:
                now = time.monotonic()
                asks = self._choose(scorer)
                if asks and not scorer.held:
                    scorer.batch_began, scorer.batch_size = now, 0
                scorer.batch_size += len(asks)
                scorer.held |= dict.fromkeys(asks, now)
                for asked in asks:
                    self._send(scorer, asked, asked.item)

    def _choose(self, scorer: _Scorer) -> list[_Ask]:
        is_free = not scorer.held
        if scorer.is_alone and not is_free:
            return []
        if self._alone:
            alone = self._next(self._alone, 1) if is_free else []
            if alone or self._alone:
                scorer.is_alone |= is_free
                return alone
        scorer.is_alone = False
        share = math.ceil(len(self._queue) / self._workers)
        if scorer.is_async:
            return self._next(self._queue, min(self._at_once - len(scorer.held), share))
        if not is_free:
            return []
        quick = max(1, int(_BATCH_S / max(self._seconds_each, 1e-9)))
        # A part of the share: who is done first takes more of what is left.
        return self._next(self._queue, min(_LARGEST_BATCH, quick, math.ceil(share / 2)))

    def _next(self, asks: deque[_Ask], most: int) -> list[_Ask]:
        """Take asks from a queue; those that nobody waits for any more are dropped, not counted."""
        found: list[_Ask] = []
        while asks and len(found) < most:
            asked = asks.popleft()
            if asked in self._waiting:
                found.append(asked)
        return found


def default_workers() -> int:
    """Count half of the cores that this process may use: the other half is the run's own."""
    return max(1, cores() // 2)


def cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load_error(job: ScorerJob, how: str) -> str:
    if job.function is None:
        return f"a process for built-in scorers {how}; raise reward.memory_mb, or see the log"
    return (
        f"reward.function.path {job.function.path}: the process that imports it {how}; "
        "mend the file, or raise the limit"
    )


def _set_all(outcomes: Sequence[tuple[_Ask, Outcome]]) -> None:
    for asked, outcome in outcomes:
        if not asked.future.done():  # cancelled
            asked.future.set_result(outcome)


def _refuse(future: asyncio.Future[Outcome], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
