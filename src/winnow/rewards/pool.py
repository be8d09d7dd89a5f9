"""Calls in separate processes, with limits of time and memory: of scorers, and others.

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
from typing import Any, cast

from winnow.config.reward import BatchManager, RewardConfig
from winnow.errors import RewardError, WinnowError
from winnow.observe.usage import label_process
from winnow.rewards.task import (
    Arguments,
    Failure,
    Outcome,
    PoolJob,
    PoolLimits,
    PoolReply,
    Ready,
    ScoreItem,
    resident_bytes,
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
# One core a process; and sets of strings are in the same order in each of them.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(eq=False)
class _Request:
    """An answer, and the future on which its caller waits for the score."""

    item: Any
    future: asyncio.Future[Any]


@dataclass(eq=False)
class _Message:
    """Answers that were sent to a process together."""

    requests: list[_Request]
    since: float
    """The time from which the answer in work may be under way."""
    position: int = 0
    """Its place, as last seen."""


class _ScorerProcess:
    """One process, the messages that it has, and the beginning of what it prints."""

    process: LocalConnection

    def __init__(self) -> None:
        self.born = time.monotonic()
        self.numbers = count()
        self.is_ready = self.is_async = self.is_leaving = False
        self.is_alone = False
        """True if it has, or had, a request that is to have the process to itself."""
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

    async def read_output(self, reader: asyncio.StreamReader) -> None:
        """Read what the process prints, to the end."""
        while data := await reader.read(1 << 18):
            self.printed += data[: MAX_OUTPUT_BYTES - len(self.printed)]
            self.printed_bytes += len(data)
        self.output_has_ended.set()

    @property
    def is_idle(self) -> bool:
        """True if it is ready and has no message."""
        return self.is_ready and not self.messages

    @property
    def requests(self) -> list[_Request]:
        """All requests in its messages."""
        return [request for message in self.messages for request in message.requests]

    def position(self) -> int:
        """The index in its message of the answer that a plain function is scoring."""
        return os.pread(self.cell, 1, 0)[0]

    def is_over_time(self, timeout_s: float) -> bool:
        """Return whether the current answer, or an async function's oldest, is over its time."""
        if not self.messages:
            return False
        oldest, now = self.messages[0], time.monotonic()
        if oldest.position != (at := self.position()):
            oldest.position, oldest.since = at, now
        return now > oldest.since + timeout_s + (_GRACE_S if self.is_async else 0.0)


class CallPool:
    """Processes that make calls within limits; used from one event loop at a time.

    They are started here, and the first has loaded what makes the calls when this returns.

    Args:
        runtime, arguments: the class of the calls, as `PoolJob` has them.
        user_file: key and path of what the user's file is given by, for errors; None: there is
            none.
        most_in_call: items in one call; 0: it takes them one by one.
        error: raised where the user's file cannot be used.

    Raises:
        WinnowError: the user's file cannot be used; one line says why.
    """

    def __init__(
        self,
        limits: PoolLimits,
        runtime: str,
        arguments: tuple[Any, ...],
        user_file: str | None = None,
        most_in_call: int = 0,
        error: type[WinnowError] = RewardError,
    ) -> None:
        self.finished = 0
        self._limits, self._user_file, self._error = limits, user_file, error
        self._runtime = runtime, arguments
        self._most_in_call = most_in_call
        self._workers = limits.workers
        self._late = limits.late
        self._new: list[_Request] = []
        """Asked in this turn of the caller's event loop."""
        self._loaded = threading.Event()
        self._broken: Exception | None = None
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        # The thread's own.
        self._scorers: list[_ScorerProcess] = []
        self._queue: deque[_Request] = deque()
        self._alone: deque[_Request] = deque()
        self._done: list[tuple[_Request, Any]] = []
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

    async def call(self, item: Any) -> Any:
        """Return the outcome of a call, which is a `Failure` if it fails.

        Raises:
            WinnowError: a new process could not load the user's file.
        """
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        request = _Request(item, loop.create_future())
        if not self._new or self._new[-1].future.get_loop() is not loop:
            # Once for all of this turn.
            loop.call_soon(self._submit_new)
        self._new.append(request)
        return await request.future

    def close(self) -> None:
        """End all processes: idle ones by themselves, busy ones at once."""
        if self._loop.is_closed():
            return
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join()
        self._loop.close()

    def _submit_new(self) -> None:
        requests, self._new = self._new, []
        with contextlib.suppress(RuntimeError):  # the pool was closed in the meantime
            self._loop.call_soon_threadsafe(self._enqueue, requests)
        if self._broken is not None:  # the thread may have taken in its last
            _set_results([(request, self._broken) for request in requests])

    # The rest runs in the thread.

    async def _serve(self) -> None:
        """Feed and watch the processes, and replace them, until the pool is closed."""
        error: Exception = RuntimeError("the scorer pool is closed")
        next_look = 0.0
        try:
            while not self._is_closing:
                await self._start_missing()
                self._assign()
                is_busy = not all(scorer.is_idle for scorer in self._scorers)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _TICK_S if is_busy else None)
                self._wake.clear()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _TICK_S
                    for scorer in list(self._scorers):
                        await self._check_limits(scorer)
                for scorer in [s for s in self._scorers if s.process.channel.is_peer_closed]:
                    await self._replace_process(scorer, None)
                self._deliver()
        except Exception as mistake:
            log.exception("the scorer pool failed")
            error = mistake
        finally:
            give_up = time.monotonic() + _CLOSING_S
            for scorer in self._scorers:
                scorer.process.channel.shut_down()
                if not scorer.is_idle:
                    scorer.process.kill()
            for scorer in self._scorers:
                await self._reap(scorer, give_up - time.monotonic())
            self._fail_all(error)

    def _enqueue(self, requests: Sequence[_Request]) -> None:
        self._queue.extend(requests)
        self._wake.set()
        if self._broken is not None:
            self._fail_all(self._broken)

    def _deliver(self) -> None:
        """Deliver outcomes to the event loops that wait for them, in one call each."""
        done, self._done = self._done, []
        self.finished += len(done)
        for loop in {request.future.get_loop() for request, _ in done}:
            settled = [each for each in done if each[0].future.get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # it was closed: nobody waits any more
                loop.call_soon_threadsafe(_set_results, settled)

    def _fail_all(self, error: Exception) -> None:
        """Fail all requests, now and later: no process can be started any more."""
        self._broken = error = self._broken or error
        self._loaded.set()
        requests = [request for scorer in self._scorers for request in scorer.requests]
        self._done += [(request, error) for request in (*self._queue, *self._alone, *requests)]
        self._queue.clear()
        self._alone.clear()
        self._deliver()

    def _handle_ready(self, scorer: _ScorerProcess, ready: Ready) -> None:
        self._wake.set()
        scorer.is_ready, scorer.is_async = not ready.refusal, ready.is_async
        scorer.refusal = ready.refusal
        if scorer.is_ready:
            self._lost_loading = 0
            self._loaded.set()

    def _handle_reply(
        self, scorer: _ScorerProcess, message: _Message, reply: PoolReply | CallFailure
    ) -> None:
        self._wake.set()
        scorer.messages.remove(message)
        if isinstance(reply, CallFailure):  # it cannot be read here
            failure = Failure(reply.line, reply.traceback)
            self._fail_or_retry(message.requests, failure, len(message.requests) == 1)
            return
        scorer.is_leaving |= reply.is_last
        done, rest = len(reply.outcomes), message.requests[len(reply.outcomes) :]
        scorer.quick = done if rest else max(scorer.quick, 2 * done)
        self._queue.extendleft(reversed(rest))
        for request, outcome in zip(message.requests, reply.outcomes, strict=False):
            if outcome is None:
                self._fail_or_retry([request], self._late, scorer.is_alone)
            else:
                self._done.append((request, outcome))

    async def _check_limits(self, scorer: _ScorerProcess) -> None:
        """Check the time and memory of a busy process."""
        if scorer.is_idle:
            return
        if scorer.process.exit_reason() is not None:  # what it forked may keep the connection open
            await self._replace_process(scorer, None)
            return
        memory, most = resident_bytes(scorer.process.pid), self._limits.memory_mb << 20
        timeout_s = self._limits.timeout_s
        if memory > most:
            limit = f"{self._limits.section}.memory_mb is {most >> 20}"
            line = f"used {memory >> 20:,} MiB of memory, {limit}"
            whole = f"the {self._limits.noun} {line}"
            await self._replace_process(scorer, whole if scorer.is_ready else line)
        elif not scorer.is_ready:
            if time.monotonic() > scorer.born + _LOAD_LIMIT_S:
                await self._replace_process(scorer, f"took more than {_LOAD_LIMIT_S:g} s")
        elif scorer.is_over_time(timeout_s):
            scorer.process.channel.receive()  # an answer may have come while this thread waited
            if scorer.is_over_time(timeout_s):
                await self._replace_process(scorer, self._late.line)

    async def _replace_process(self, scorer: _ScorerProcess, reason: str | None) -> None:
        """Remove a process that has exited, or kill it for `reason`; handle its requests."""
        scorer.process.channel.receive()
        self._scorers.remove(scorer)
        if reason is not None:
            scorer.process.kill()
        scorer.process.channel.shut_down()
        requests, at = scorer.requests, scorer.position()
        how = await self._reap(scorer, _CLOSING_S if reason is None else 0.0)
        how = reason or how or "closed its connection"
        if not scorer.is_ready:
            self._handle_load_failure(scorer, how)
            return
        guilty: list[_Request] = []
        if not scorer.is_leaving:
            line = reason or f"the {self._limits.noun}'s process {how}"
            log.warning("replacing a %s process: %s", self._limits.noun, line)
            guilty = requests if scorer.is_async or self._most_in_call else requests[at : at + 1]
            output = scorer.printed.decode(errors="replace").rstrip()
            trace = f"{line}\nOutput of the process:\n{output}" if output else line
            self._fail_or_retry(guilty, Failure(line, trace), len(guilty) == 1)
        self._queue.extendleft(request for request in reversed(requests) if request not in guilty)

    def _handle_load_failure(self, scorer: _ScorerProcess, how: str) -> None:
        self._lost_loading += 1
        is_chance = self._loaded.is_set() and self._lost_loading < _LOAD_ATTEMPTS
        if not scorer.refusal and is_chance:
            log.warning("a %s process %s while loading", self._limits.noun, how)
            return
        line = f"a process for built-in scorers {how}; raise reward.memory_mb, or see the log"
        if self._user_file is not None:
            who = f"{self._user_file}: the process that imports it"
            line = f"{who} {how}; fix the file, or raise the limit"
        self._fail_all(self._error(scorer.refusal or line))

    def _fail_or_retry(self, requests: list[_Request], failure: Failure, is_certain: bool) -> None:
        """Fail a single request; of several, retry each alone."""
        if is_certain:
            self._done += [(request, failure) for request in requests]
            return
        is_over_time = requests and failure.line == self._late.line
        if is_over_time and self._at_once > 1 and not self._most_in_call:
            self._at_once //= 2
            log.warning(
                "an async %s blocks the loop; now %d calls at once",
                *(self._limits.noun, self._at_once),
            )
        self._alone.extend(requests)

    async def _reap(self, scorer: _ScorerProcess, patience_s: float) -> str | None:
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
                "a %s process printed %d bytes, beginning with: %s",
                self._limits.noun,
                scorer.printed_bytes,
                printed.rstrip(),
                extra={"printed": printed},
            )
        return ended

    async def _start_missing(self) -> None:
        """Start processes until there are `reward.workers`."""
        while len(self._scorers) < self._workers and self._broken is None:
            scorer = _ScorerProcess()
            job = PoolJob(
                *self._runtime,
                self._most_in_call > 0,
                self._limits,
                tuple(sys.path),
                cell=f"/proc/{os.getpid()}/fd/{scorer.cell}",
            )
            scorer.process = await LocalConnection.start(
                "winnow.rewards.worker", _ENVIRONMENT, scorer.read_output
            )
            label_process(scorer.process.pid, self._limits.noun)
            scorer.process.channel.on_peer_closed = self._wake.set
            self._scorers.append(scorer)
            handle = partial(self._handle_ready, scorer)
            scorer.process.send(next(scorer.numbers), pack(job), handle)

    def _assign(self) -> None:
        """Send each process as many requests as it can take."""
        for scorer in self._scorers:
            if not scorer.is_ready or scorer.is_leaving:
                continue
            requests = self._choose_requests(scorer)
            # An async function's answers have a message each, because each has its own time.
            size = 1 if scorer.is_async and not self._most_in_call else max(1, len(requests))
            for start in range(0, len(requests), size):
                batch = requests[start : start + size]
                os.pwrite(scorer.cell, b"\0", 0)
                message = _Message(batch, time.monotonic())
                scorer.messages.append(message)
                packed = pack([request.item for request in batch])
                tell = partial(self._handle_reply, scorer, message)
                scorer.process.send(next(scorer.numbers), packed, tell)

    def _choose_requests(self, scorer: _ScorerProcess) -> list[_Request]:
        is_free = not scorer.messages
        if scorer.is_alone and not is_free:
            return []
        if self._alone:
            alone = self._pop_requests(self._alone, 1) if is_free else []
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
        return self._pop_requests(self._queue, most)

    def _pop_requests(self, requests: deque[_Request], most: int) -> list[_Request]:
        """Take requests from a queue; abandoned ones are dropped and not counted."""
        taken: list[_Request] = []
        while requests and len(taken) < most:
            request = requests.popleft()
            if not request.future.done():
                taken.append(request)
        return taken


class ScorerPool(CallPool):
    """Processes that score.

    Args:
        config: gives the limits, and the most answers of one call (`reward/manager=batch`).
        field: key of the user's function in `RewardConfig.functions`; None: the processes run
            built-in scorers.

    Raises:
        RewardError: the user's file cannot be used; one line says why.
    """

    def __init__(self, config: RewardConfig, field: str | None = None) -> None:
        most, user = 0, None if field is None else config.functions()[field]
        if field == "reward.function" and isinstance(config.manager, BatchManager):
            most = config.manager.max_answers
        limits = PoolLimits(config.workers or default_workers(), config.timeout_s, config.memory_mb)
        super().__init__(
            limits,
            "winnow.rewards.worker:ScorerRuntime",
            ((user.path, user.name, user.kwargs, most > 0, field) if user else None,),
            f"{field}.path {user.path}" if user else None,
            most,
        )

    async def score(self, scorer: str, seed: int, arguments: Arguments) -> Outcome:
        """Score one answer.

        Raises:
            RewardError: a new process could not load the user's file.
        """
        return cast("Outcome", await self.call(ScoreItem(scorer, seed, arguments)))


def default_workers() -> int:
    """Count half of the cores that this process may use: the other half is the run's own."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _set_results(outcomes: Sequence[tuple[_Request, Outcome | Exception]]) -> None:
    for request, outcome in outcomes:
        set_outcome(request.future, outcome)
