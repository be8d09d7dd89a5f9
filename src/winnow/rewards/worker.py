"""A process of the scorer pool: `python -m winnow.rewards.worker DESCRIPTOR PARENT`.

It makes one call at a time in the main thread (signals work nowhere else), or many side by side
where the user's function is asynchronous. It enforces no limit on a plain function itself: the
pool watches from outside, because code that hangs inside C stops every thread of its process. It
ends with its parent, however that one ends, and after a scorer has left it with much memory.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import numpy as np

from winnow.errors import WinnowError
from winnow.rewards.scorers import SCORERS
from winnow.rewards.task import (
    Failure,
    Outcome,
    PoolJob,
    PoolLimits,
    PoolReply,
    Ready,
    ScoreItem,
    UserScorer,
    make_failure,
    make_portable,
    resident_bytes,
    score_by_call,
    score_by_rule,
)
from winnow.types import Score
from winnow.workers.child import die_with_parent
from winnow.workers.local import pack, receive_message, send_message, unpack
from winnow.workers.threads import spawn

MESSAGE_S = 0.005
"""Time after which a process goes on to no further answer of its message. It is short, because
what is scored waits for the answer that comes next there, which may be a slow one."""
_TICK_S = 0.05
_BLOCKED_SHARE = 0.1
"""The share of an answer's time above which it cannot be said to have been slow itself."""


class PoolRuntime(Protocol):
    """The calls that a process of a pool makes; whatever happens in one is an outcome."""

    is_async: bool
    """True if many calls may wait side by side."""

    def call_without_loop(self, items: Sequence[Any]) -> Sequence[Any] | Failure:
        """Make a call for items, where it may run an event loop; return an outcome for each."""

    async def call(self, items: Sequence[Any]) -> Sequence[Any] | Failure:
        """Make a call that may wait concurrently with others."""


class ScorerRuntime:
    """Scores answers by a user's function, or by built-in scorers.

    Args:
        function: arguments of `UserScorer`; None: the built-in scorers.

    Raises:
        RewardError: the user's file cannot be used.
    """

    def __init__(self, function: tuple[str, str, dict[str, Any], bool, str] | None) -> None:
        self._user = UserScorer(*function) if function else None
        self.is_async = self._user is not None and self._user.is_async

    def call_without_loop(self, items: Sequence[ScoreItem]) -> Sequence[Outcome] | Failure:
        """Score answers in one call, where a scorer may run an event loop."""
        if self._user is None:
            (item,) = items
            return [_portable(score_by_rule(SCORERS[item.scorer], item.arguments))]
        try:
            _seed_generators(items)
            result = self._user.call([item.arguments for item in items])
            return [_portable(each) for each in self._user.read(_run_awaitable(result), len(items))]
        except BaseException as error:  # KeyboardInterrupt, CancelledError: the scorer raised it
            return make_failure(error, self._user.file)

    async def call(self, items: Sequence[ScoreItem]) -> Sequence[Outcome] | Failure:
        """Score answers in one call that may wait concurrently with others."""
        assert self._user is not None
        try:
            _seed_generators(items)
            outcomes = await score_by_call(self._user, [item.arguments for item in items])
        except BaseException as error:
            return make_failure(error, self._user.file)
        return outcomes if isinstance(outcomes, Failure) else [_portable(o) for o in outcomes]


def _portable(outcome: Outcome) -> Outcome:
    return make_portable(outcome) if isinstance(outcome, Score) else outcome


@dataclass(frozen=True)
class PoolProcess:
    """This process: its calls, and the memory that it may grow to before it is replaced."""

    runtime: PoolRuntime
    limits: PoolLimits
    recycle_bytes: float

    def reply(self, outcomes: Sequence[Any] | Failure, count: int) -> PoolReply:
        """Return the reply to a call for `count` items."""
        each = [outcomes] if isinstance(outcomes, Failure) else outcomes
        is_out = any(isinstance(r, Failure) and r.line.startswith("MemoryError") for r in each)
        is_last = is_out or resident_bytes() > self.recycle_bytes
        if len(each) < count:  # which answer is at fault, a call for each alone will tell
            return PoolReply([None] * count, is_last)
        return PoolReply(each, is_last)


def _seed_generators(items: Sequence[ScoreItem]) -> None:
    """Seed the generators by the answers alone, in whichever process."""
    seed = sum(item.seed for item in items) & 0xFFFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:  # the user's file imported it
        sys.modules["torch"].manual_seed(seed)


def _run_awaitable(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def main() -> None:
    """Serve until the pool is gone."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    for stream in (sys.stdout, sys.stderr):
        cast(Any, stream).reconfigure(line_buffering=True, errors="backslashreplace")
    channel = socket.socket(fileno=descriptor)
    message = receive_message(channel)
    if message is None:
        return
    job: PoolJob = unpack(message[1])
    cell = os.open(job.cell, os.O_WRONLY)
    sys.path[:] = job.python_path
    try:
        runtime: PoolRuntime = resolve_name(job.runtime)(*job.arguments)
    except WinnowError as error:
        _send(channel, 0, Ready(False, str(error)))
        return
    loaded = resident_bytes()
    is_stateful = getattr(runtime, "is_stateful", False)
    recycle = math.inf if is_stateful else (loaded + (job.limits.memory_mb << 20)) / 2
    process = PoolProcess(runtime, job.limits, recycle)
    _send(channel, 0, Ready(runtime.is_async))
    if runtime.is_async:
        asyncio.run(_serve_side_by_side(channel, process))
    else:
        _serve_one_by_one(channel, process, job.batched, cell)
    getattr(runtime, "close", lambda: None)()


def _serve_one_by_one(
    channel: socket.socket, process: PoolProcess, batched: bool, cell: int
) -> None:
    """Score the answers of each message, and reply once `MESSAGE_S` is over."""
    while (message := receive_message(channel)) is not None:
        items: list[Any] = unpack(message[1])
        outcomes: list[Any] = []
        give_back = time.monotonic() + MESSAGE_S
        for number, call in enumerate([items] if batched else [[item] for item in items]):
            os.pwrite(cell, bytes([number]), 0)
            done, is_last = process.reply(process.runtime.call_without_loop(call), len(call))
            outcomes += done
            if is_last or time.monotonic() > give_back:
                break
        _send(channel, message[0], PoolReply(outcomes, is_last))
        if is_last:
            return


async def _serve_side_by_side(channel: socket.socket, process: PoolProcess) -> None:
    """Make calls as they come, each with its own time.

    Where one of them blocks the event loop, the time of the others runs out by no fault of theirs:
    the pool is asked to send those again, alone.
    """
    loop, timeout_s = asyncio.get_running_loop(), process.limits.timeout_s
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()
    blocked_s = 0.0

    async def watch() -> None:
        nonlocal blocked_s
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            blocked_s += max(0.0, loop.time() - due - _TICK_S)

    async def answer(number: int, items: list[Any]) -> None:
        before_s = blocked_s
        work = asyncio.ensure_future(process.runtime.call(items))
        await asyncio.wait({work}, timeout=timeout_s)
        if work.done():
            outcomes, is_last = process.reply(work.result(), len(items))
            _send(channel, number, PoolReply(outcomes, is_last and not ended.is_set()))
            if is_last:
                ended.set()
            return
        work.cancel()
        is_innocent = blocked_s - before_s > _BLOCKED_SHARE * timeout_s
        late = None if is_innocent or len(items) > 1 else process.limits.late
        _send(channel, number, PoolReply([late] * len(items)))

    def on_readable() -> None:
        message = receive_message(channel)
        if message is None:
            ended.set()
            return
        spawn(answer(message[0], unpack(message[1])), running)

    loop.add_reader(channel, on_readable)
    watching = asyncio.ensure_future(watch())
    await ended.wait()
    loop.remove_reader(channel)
    watching.cancel()


def _send(channel: socket.socket, number: int, message: Ready | PoolReply) -> None:
    """Send a message; a pool that is gone is met at the next read."""
    with suppress(BrokenPipeError, ConnectionResetError):
        send_message(channel, number, pack(message))


if __name__ == "__main__":
    main()
