"""A process of the scorer pool: `python -m winnow.rewards.worker DESCRIPTOR PARENT`.

It scores one answer at a time in the main thread (signals work nowhere else), or many side by side
where the user's function is asynchronous. It enforces no limit of its own on a plain function: the
pool watches from outside, because code that hangs inside C stops every thread of its process. It
ends with its parent, however that one ends, and after a scorer has left it with much memory.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from winnow.errors import RewardError
from winnow.rewards.task import (
    Failure,
    Outcome,
    failure_of,
    outcome,
    outcome_without_loop,
    outcomes,
    outcomes_without_loop,
)
from winnow.rewards.user_function import UserScorer
from winnow.rewards.wire import (
    BatchItem,
    Ready,
    Refused,
    ScoreItem,
    ScorerJob,
    ScorerReply,
    late_line,
    portable,
)
from winnow.types import Score
from winnow.workers.child import die_with
from winnow.workers.local import pack, receive, send, unpack

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else -1
_TICK_S = 0.05
_BLOCKED_SHARE = 0.1
"""The share of an answer's time above which it cannot be said to have been slow itself."""


@dataclass(frozen=True)
class ScorerRuntime:
    """A scorer, and the memory that this process may grow to before it is replaced."""

    user: UserScorer | None
    recycle_bytes: float

    def should_recycle(self, result: Outcome) -> bool:
        """Return whether to go on in a new process."""
        each = result if isinstance(result, tuple) else (result,)
        is_out = any(isinstance(r, Failure) and r.line.startswith("MemoryError") for r in each)
        return is_out or resident_bytes() > self.recycle_bytes

    async def score(self, item: ScoreItem | BatchItem) -> Outcome:
        """Score an item; whatever happens short of the process's end is an outcome."""
        try:
            self._seed(item)
            if isinstance(item, BatchItem):
                return _portable(await outcomes(self._function, item.batch))
            return _portable(await outcome(self.user, item.scorer, item.arguments))
        except BaseException as error:  # KeyboardInterrupt, CancelledError: the scorer raised it
            return failure_of(error, self.user.file if self.user else None)

    def score_without_loop(self, item: ScoreItem | BatchItem) -> Outcome:
        """Score an item where no event loop runs, so that the scorer may run one of its own."""
        try:
            self._seed(item)
            if isinstance(item, BatchItem):
                return _portable(outcomes_without_loop(self._function, item.batch))
            return _portable(outcome_without_loop(self.user, item.scorer, item.arguments))
        except BaseException as error:
            return failure_of(error, self.user.file if self.user else None)

    @property
    def _function(self) -> UserScorer:
        assert self.user is not None
        return self.user

    def _seed(self, item: ScoreItem | BatchItem) -> None:
        """Make what a scorer draws depend on its answer alone, whichever process it comes to."""
        if self.user is not None:
            random.seed(item.seed)
            np.random.seed(item.seed & 0xFFFFFFFF)
            if "torch" in sys.modules:  # the user's file imported it
                sys.modules["torch"].manual_seed(item.seed)


def main() -> None:
    """Serve until the pool is gone."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    for stream in (sys.stdout, sys.stderr):
        cast(Any, stream).reconfigure(line_buffering=True, errors="backslashreplace")
    channel = socket.socket(fileno=descriptor)
    message = receive(channel)
    if message is None:
        return
    job: ScorerJob = unpack(message[1])
    sys.path[:] = job.python_path
    try:
        user = UserScorer(job.function, job.batched) if job.function else None
    except RewardError as error:
        _tell(channel, 0, Refused(str(error)))
        return
    loaded = resident_bytes()
    runtime = ScorerRuntime(user, loaded + (job.memory_bytes - loaded) / 2)
    is_async = user is not None and user.is_async
    _tell(channel, 0, Ready(is_async))
    if is_async:
        asyncio.run(_serve_side_by_side(channel, runtime, job.timeout_s))
    else:
        _serve_one_by_one(channel, runtime)


def _serve_one_by_one(channel: socket.socket, runtime: ScorerRuntime) -> None:
    while (message := receive(channel)) is not None:
        result = runtime.score_without_loop(unpack(message[1]))
        is_last = runtime.should_recycle(result)
        _tell(channel, message[0], ScorerReply(result, is_last))
        if is_last:
            return


async def _serve_side_by_side(
    channel: socket.socket, runtime: ScorerRuntime, timeout_s: float
) -> None:
    """Score answers as they come, each with its own time.

    Where one of them blocks the event loop, the time of the others runs out by no fault of theirs:
    the pool is asked to send those again, alone.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()
    blocked_s = 0.0

    async def watch() -> None:
        nonlocal blocked_s
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            blocked_s += max(0.0, loop.time() - due - _TICK_S)

    async def answer(number: int, item: ScoreItem | BatchItem) -> None:
        before_s = blocked_s
        work = asyncio.ensure_future(runtime.score(item))
        await asyncio.wait({work}, timeout=timeout_s)
        if work.done():
            is_last = runtime.should_recycle(work.result()) and not ended.is_set()
            _tell(channel, number, ScorerReply(work.result(), is_last))
            if is_last:
                ended.set()
            return
        work.cancel()
        is_innocent = blocked_s - before_s > _BLOCKED_SHARE * timeout_s
        line = late_line(timeout_s)
        _tell(channel, number, ScorerReply(None if is_innocent else Failure(line, line)))

    def on_readable() -> None:
        message = receive(channel)
        if message is None:
            ended.set()
            return
        task = asyncio.ensure_future(answer(message[0], unpack(message[1])))
        running.add(task)
        task.add_done_callback(running.discard)

    loop.add_reader(channel, on_readable)
    watching = asyncio.ensure_future(watch())
    await ended.wait()
    loop.remove_reader(channel)
    watching.cancel()


def _tell(channel: socket.socket, number: int, message: Ready | Refused | ScorerReply) -> None:
    """Send a message; a pool that is gone is met at the next read."""
    with suppress(BrokenPipeError, ConnectionResetError):
        send(channel, number, pack(message))


def _portable(result: Outcome) -> Outcome:
    if isinstance(result, tuple):
        return tuple(portable(r) if isinstance(r, Score) else r for r in result)
    return portable(result) if isinstance(result, Score) else result


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    return int(os.pread(_STATM, 100, 0).split()[1]) * _PAGE_BYTES if _STATM >= 0 else 0


if __name__ == "__main__":
    main()
