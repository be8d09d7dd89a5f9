"""Scorers in separate processes, with limits of time and memory.

    score() ─► queue ─► a message to a process ─► its reply ─► the future that score() waits for
                 ▲                │ late, too large, dead
                 └── the others ──┘ its own sample: a failure that says why

The processes are served by a thread with a separate event loop, because limits must hold while
the run's thread is busy with the model. A message holds several answers, which a plain function
scores one by one; a process notes in a byte that the pool can read which of them is in work, so it
is known whose fault an end is, and the others go to another process. Any of an asynchronous
function's many answers may be at fault, and any of those that are scored in one call
(`reward/manager=batch`): each is asked again, alone.

Memory is what is resident, looked at every `_TICK_S` while a process works: a limit on address
space (RLIMIT_AS) would count what numpy, torch and thread stacks only reserve. In between a
process can exceed its limit by as much as it can touch in that time, about 0.1 GiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from winnow.config.reward import BatchManager, RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards.task import (
    Arguments,
    Failure,
    Outcome,
    Ready,
    ScoreItem,
    ScorerJob,
    ScorerReply,
    late_failure,
)
from winnow.workers.host import CallFailure
from winnow.workers.local import LocalConnection, pack
from winnow.workers.threads import set_outcome

log = logging.getLogger(__name__)

ASYNC_AT_ONCE = 64
"""Answers that a process awaits side by side; halved each time that one blocks the others."""
MAX_OUTPUT_BYTES = 4096
_LARGEST_MESSAGE = 32
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
    """An answer, and the future of the event loop in which its caller waits for the score."""

    item: ScoreItem
    future: asyncio.Future[Outcome]


@dataclass(eq=False)
class _Message:
    """Answers that a process has."""

    asks: Sequence[_Ask]
    since: float
    """The time from which the answer in work may be under way."""
    at: int = 0
    """Its place, as last seen."""


class _Scorer:
    """One process, the messages that it has, and the beginning of what it prints."""

    process: LocalConnection

    def __init__(self) -> None:
        self.born = time.monotonic()
        self.numbers = count()
        self.is_ready = self.is_async = self.is_leaving = False
        self.is_alone = False
        """True if it has, or had, an ask that is to have the process to itself."""
        self.refusal = ""
        """The reason why the user's file cannot be used."""
        self.messages: list[_Message] = []
        """In the order sent."""
        self.quick = 1
        """Answers that it is likely to score before it replies."""
        self.cell = os.memfd_create("winnow-scorer", os.MFD_CLOEXEC)
        os.pwrite(self.cell, b"\0", 0)
        self.printed = b""
        self.printed_bytes = 0
        self.output_has_ended = asyncio.Event()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Read what the process prints, to the end."""
        while data := await reader.read(1 << 18):
            self.printed += data[: MAX_OUTPUT_BYTES - len(self.printed)]
            self.printed_bytes += len(data)
        self.output_has_ended.set()

    @property
    def is_idle(self) -> bool:
        """True if it could take more at once."""
        return self.is_ready and not self.messages

    @property
    def asks(self) -> list[_Ask]:
        """All that it has."""
        return [ask for message in self.messages for ask in message.asks]

    def at(self) -> int:
        """The place of the answer in work, in the message of a plain function."""
        return os.pread(self.cell, 1, 0)[0]

    def is_late(self, timeout_s: float) -> bool:
        """Return whether the time of the answer in work is up; of an async function's oldest."""
        if not self.messages:
            return False
        oldest, now = self.messages[0], time.monotonic()
        if oldest.at != (at := self.at()):
            oldest.at, oldest.since = at, now
        return now > oldest.since + timeout_s + (_GRACE_S if self.is_async else 0.0)

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM; 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0


class ScorerPool:
    """Processes that score; used from one event loop at a time.

    They are started here, and the first has loaded what scores when this returns.

    Args:
        config: gives the limits, and the most answers of one call (`reward/manager=batch`).
        function: the user's; None: the processes run built-in scorers.

    Raises:
        RewardError: the user's file cannot be used; one line says why.
    """

    def __init__(self, config: RewardConfig, function: UserFunction | None = None) -> None:
        self.finished = 0
        self._config, self._function = config, function
        self._most_in_call = 0
        """Answers in one call of the function; 0: it takes them one by one."""
        if function is not None and isinstance(config.manager, BatchManager):
            self._most_in_call = config.manager.max_answers
        self._workers = config.workers or default_workers()
        self._memory_bytes = config.memory_mb << 20
        self._late = late_failure(config.timeout_s)
        self._new: list[_Ask] = []
        """Asked in this turn of the caller's event loop."""
        self._loaded = threading.Event()
        self._broken: Exception | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        # The thread's own.
        self._scorers: list[_Scorer] = []
        self._queue: deque[_Ask] = deque()
        self._alone: deque[_Ask] = deque()
        self._done: list[tuple[_Ask, Outcome | Exception]] = []
        self._at_once = ASYNC_AT_ONCE
        self._lost_loading = 0
        serve = partial(self._loop.run_until_complete, self._serve())
        self._thread = threading.Thread(target=serve, name="scorers", daemon=True)
        self._start()

    def _start(self) -> None:
        self._thread.start()
        try:
            self._loaded.wait()
        except BaseException:  # a signal's: nobody would close this pool
            self.close()
            raise
        if self._broken is not None:
            self.close()
            raise self._broken

    async def score(self, scorer: str, seed: int, arguments: Arguments) -> Outcome:
        """Score one answer.

        Raises:
            RewardError: a new process could not load the user's file.
        """
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        ask = _Ask(ScoreItem(scorer, seed, arguments), loop.create_future())
        if not self._new or self._new[-1].future.get_loop() is not loop:
            # Once for all of this turn.
            loop.call_soon(self._hand_over)
        self._new.append(ask)
        return await ask.future

    def close(self) -> None:
        """End all processes: idle ones by themselves, busy ones at once."""
        if self._loop.is_closed():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._news.set)
        self._thread.join()
        self._loop.close()

    def _hand_over(self) -> None:
        asks, self._new = self._new, []
        with contextlib.suppress(RuntimeError):  # the pool was closed in the meantime
            self._loop.call_soon_threadsafe(self._take_in, asks)
        if self._broken is not None:  # the thread may have taken in its last
            _settle_all([(ask, self._broken) for ask in asks])

    # The rest runs in the thread.

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
                for scorer in [s for s in self._scorers if s.process.channel.is_peer_closed]:
                    await self._lose(scorer, None)
                self._settle()
        except Exception as mistake:
            log.exception("the scorer pool fails")
            error = mistake
        finally:
            give_up = time.monotonic() + _CLOSING_S
            for scorer in self._scorers:
                scorer.process.channel.shut_down()
                if not scorer.is_idle:
                    scorer.process.kill()
            for scorer in self._scorers:
                await self._end(scorer, give_up - time.monotonic())
            self._fail(error)

    def _take_in(self, asks: Sequence[_Ask]) -> None:
        self._queue.extend(asks)
        self._news.set()
        if self._broken is not None:
            self._fail(self._broken)

    def _settle(self) -> None:
        """Hand outcomes to the event loop that waits for them, all in one call."""
        done, self._done = self._done, []
        self.finished += len(done)
        for loop in {ask.future.get_loop() for ask, _ in done}:
            settled = [each for each in done if each[0].future.get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                loop.call_soon_threadsafe(_settle_all, settled)

    def _fail(self, error: Exception) -> None:
        """End all that waits, now and later: no process can be had any more."""
        self._broken = error = self._broken or error
        self._loaded.set()
        asks = [ask for scorer in self._scorers for ask in scorer.asks]
        self._done += [(ask, error) for ask in (*self._queue, *self._alone, *asks)]
        self._queue.clear()
        self._alone.clear()
        self._settle()

    def _take_ready(self, scorer: _Scorer, ready: Ready) -> None:
        self._news.set()
        scorer.is_ready, scorer.is_async = not ready.refusal, ready.is_async
        scorer.refusal = ready.refusal
        if scorer.is_ready:
            self._lost_loading = 0
            self._loaded.set()

    def _take(self, scorer: _Scorer, message: _Message, reply: ScorerReply | CallFailure) -> None:
        self._news.set()
        scorer.messages.remove(message)
        if isinstance(reply, CallFailure):  # it cannot be read here
            failure = Failure(reply.line, reply.traceback)
            self._blame(message.asks, failure, len(message.asks) == 1)
            return
        scorer.is_leaving |= reply.is_last
        done, rest = len(reply.outcomes), message.asks[len(reply.outcomes) :]
        scorer.quick = done if rest else max(scorer.quick, 2 * done)
        self._queue.extendleft(reversed(rest))
        for ask, outcome in zip(message.asks, reply.outcomes, strict=False):
            if outcome is None:
                self._blame([ask], self._late, scorer.is_alone)
            else:
                self._done.append((ask, outcome))

    async def _look_at(self, scorer: _Scorer) -> None:
        """Hold a process at work against its limits."""
        if scorer.is_idle:
            return
        if scorer.process.exit_reason() is not None:  # what it forked may keep the connection open
            await self._lose(scorer, None)
            return
        memory, most = scorer.resident_bytes(), self._memory_bytes
        timeout_s = self._config.timeout_s
        if memory > most:
            line = f"used {memory >> 20:,} MiB of memory, reward.memory_mb is {most >> 20}"
            await self._lose(scorer, f"the scorer {line}" if scorer.is_ready else line)
        elif not scorer.is_ready:
            if time.monotonic() > scorer.born + _LOAD_LIMIT_S:
                await self._lose(scorer, f"took more than {_LOAD_LIMIT_S:g} s")
        elif scorer.is_late(timeout_s):
            scorer.process.channel.receive()  # an answer may have come while this thread waited
            if scorer.is_late(timeout_s):
                await self._lose(scorer, self._late.line)

    async def _lose(self, scorer: _Scorer, reason: str | None) -> None:
        """Part with a process that is gone, or is to be killed for `reason`."""
        scorer.process.channel.receive()
        self._scorers.remove(scorer)
        if reason is not None:
            scorer.process.kill()
        scorer.process.channel.shut_down()
        asks, at = scorer.asks, scorer.at()
        how = await self._end(scorer, _CLOSING_S if reason is None else 0.0)
        how = reason or how or "cut its connection"
        if not scorer.is_ready:
            self._lose_loading(scorer, how)
            return
        guilty: list[_Ask] = []
        if not scorer.is_leaving:
            line = reason or f"the scorer's process {how}"
            log.warning("a scorer's process is replaced: %s", line)
            guilty = asks if scorer.is_async or self._most_in_call else asks[at : at + 1]
            output = scorer.printed.decode(errors="replace").rstrip()
            trace = f"{line}\nIts process had written:\n{output}" if output else line
            self._blame(guilty, Failure(line, trace), len(guilty) == 1)
        self._queue.extendleft(ask for ask in reversed(asks) if ask not in guilty)

    def _lose_loading(self, scorer: _Scorer, how: str) -> None:
        self._lost_loading += 1
        is_chance = self._loaded.is_set() and self._lost_loading < _LOAD_ATTEMPTS
        if not scorer.refusal and is_chance:
            log.warning("a scorer's process %s while it was starting", how)
            return
        line = f"a process for built-in scorers {how}; raise reward.memory_mb, or see the log"
        if self._function is not None:
            who = f"reward.function.path {self._function.path}: the process that imports it"
            line = f"{who} {how}; mend the file, or raise the limit"
        self._fail(RewardError(scorer.refusal or line))

    def _blame(self, asks: Sequence[_Ask], failure: Failure, is_certain: bool) -> None:
        """Fail the ask that was in work; where there were several, try each again, alone."""
        if is_certain:
            self._done += [(ask, failure) for ask in asks]
            return
        is_late = asks and failure.line == self._late.line
        if is_late and self._at_once > 1 and not self._most_in_call:
            self._at_once //= 2
            log.warning("an async scorer blocks others; now %d at once", self._at_once)
        self._alone.extend(asks)

    async def _end(self, scorer: _Scorer, patience_s: float) -> str | None:
        """Wait for a process to end, kill what is left of it, and log what it printed.

        Returns:
            The way in which it ended, in words; None if it did not end by itself in time.
        """
        await scorer.process.wait_for_exit(patience_s)
        ended = scorer.process.exit_reason()
        scorer.process.kill()
        await scorer.process.wait_for_exit(5.0)  # longer: a process that the kernel holds on to
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(scorer.output_has_ended.wait(), _CLOSING_S)
        await scorer.process.release()
        os.close(scorer.cell)
        if scorer.printed:
            printed = scorer.printed.decode(errors="replace")
            log.info(
                "a scorer's process wrote %d bytes to its output; it begins with: %s",
                scorer.printed_bytes,
                printed.rstrip(),
                extra={"printed": printed},
            )
        return ended

    async def _fill_up(self) -> None:
        """Start processes in place of those that are gone."""
        while len(self._scorers) < self._workers and self._broken is None:
            scorer = _Scorer()
            user = self._function
            job = ScorerJob(
                (user.path, user.name, user.kwargs) if user and user.path else None,
                self._most_in_call > 0,
                self._config.timeout_s,
                self._memory_bytes,
                tuple(sys.path),
                cell=f"/proc/{os.getpid()}/fd/{scorer.cell}",
            )
            scorer.process = await LocalConnection.start(
                "winnow.rewards.worker", _ENVIRONMENT, scorer.follow
            )
            scorer.process.channel.on_peer_closed = self._news.set
            self._scorers.append(scorer)
            scorer.process.send(next(scorer.numbers), pack(job), partial(self._take_ready, scorer))

    def _assign(self) -> None:
        """Give the processes what they have room for."""
        for scorer in self._scorers:
            if not scorer.is_ready or scorer.is_leaving:
                continue
            asks = self._choose(scorer)
            # An async function's answers have a message each, because each has its own time.
            is_each = scorer.is_async and not self._most_in_call
            for batch in [[ask] for ask in asks] if is_each else [asks] if asks else []:
                os.pwrite(scorer.cell, b"\0", 0)
                message = _Message(batch, time.monotonic())
                scorer.messages.append(message)
                packed = pack([ask.item for ask in batch])
                tell = partial(self._take, scorer, message)
                scorer.process.send(next(scorer.numbers), packed, tell)

    def _choose(self, scorer: _Scorer) -> list[_Ask]:
        is_free = not scorer.messages
        if scorer.is_alone and not is_free:
            return []
        if self._alone:
            alone = self._next(self._alone, 1) if is_free else []
            if alone or self._alone:
                scorer.is_alone |= is_free
                return alone
        scorer.is_alone = False
        waiting = len(self._queue)
        share = math.ceil(waiting / self._workers)
        if self._most_in_call:
            free = sum(not each.messages for each in self._scorers)
            most = min(self._most_in_call, math.ceil(waiting / max(free, 1))) if is_free else 0
        elif scorer.is_async:
            most = min(self._at_once - len(scorer.messages), share)
        else:
            # A part of the share: who is done first takes more of what is left.
            most = min(_LARGEST_MESSAGE, scorer.quick, math.ceil(share / 2)) if is_free else 0
        return self._next(self._queue, most)

    def _next(self, asks: deque[_Ask], most: int) -> list[_Ask]:
        """Take asks from a queue; those that nobody waits for any more are dropped, not counted."""
        taken: list[_Ask] = []
        while asks and len(taken) < most:
            ask = asks.popleft()
            if not ask.future.done():
                taken.append(ask)
        return taken


def default_workers() -> int:
    """Count half of the cores that this process may use: the other half is the run's own."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _settle_all(outcomes: Sequence[tuple[_Ask, Outcome | Exception]]) -> None:
    for ask, outcome in outcomes:
        set_outcome(ask.future, outcome)
