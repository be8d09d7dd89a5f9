"""A process of the scorer pool: `python -m winnow.rewards.worker DESCRIPTOR PARENT`.

It makes one call at a time in the main thread (signals work nowhere else), or many side by side
where the user's function is asynchronous. It enforces no limit on a plain function itself: the
pool watches from outside, because code that hangs inside C stops every thread of its process. It
ends with its parent, however that one ends, and after a scorer has left it with much memory.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from winnow.errors import RewardError
from winnow.rewards.scorers import SCORERS
from winnow.rewards.task import (
    Failure,
    Outcome,
    Ready,
    ScoreItem,
    ScorerJob,
    ScorerReply,
    UserScorer,
    make_failure,
    make_portable,
    resident_bytes,
    score_by_call,
    score_by_rule,
    timeout_failure,
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


@dataclass(frozen=True)
class ScorerRuntime:
    """A scorer, and the memory that this process may grow to before it is replaced."""

    user: UserScorer | None
    recycle_bytes: float

    def call_without_loop(self, items: Sequence[ScoreItem]) -> ScorerReply:
        """Score answers in one call, where a scorer may run an event loop.

        Whatever happens short of the process's end is an outcome.
        """
        if self.user is None:
            (item,) = items
            return self._reply([score_by_rule(SCORERS[item.scorer], item.arguments)], 1)
        outcomes: list[Outcome] | Failure
        try:
            _seed_generators(items)
            result = self.user.call([item.arguments for item in items])
            outcomes = self.user.read(_run_awaitable(result), len(items))
        except BaseException as error:  # KeyboardInterrupt, CancelledError: the scorer raised it
            outcomes = make_failure(error, self.user.file)
        return self._reply(outcomes, len(items))

    async def call(self, items: Sequence[ScoreItem]) -> ScorerReply:
        """Score answers in one call that may wait concurrently with others."""
        assert self.user is not None
        outcomes: list[Outcome] | Failure
        try:
            _seed_generators(items)
            outcomes = await score_by_call(self.user, [item.arguments for item in items])
        except BaseException as error:
            outcomes = make_failure(error, self.user.file)
        return self._reply(outcomes, len(items))

    def _reply(self, outcomes: list[Outcome] | Failure, count: int) -> ScorerReply:
        each = [outcomes] if isinstance(outcomes, Failure) else outcomes
        is_out = any(isinstance(r, Failure) and r.line.startswith("MemoryError") for r in each)
        is_last = is_out or resident_bytes() > self.recycle_bytes
        if len(each) < count:  # which answer is at fault, a call for each alone will tell
            return ScorerReply([None] * count, is_last)
        return ScorerReply([make_portable(r) if isinstance(r, Score) else r for r in each], is_last)


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
    job: ScorerJob = unpack(message[1])
    cell = os.open(job.cell, os.O_WRONLY)
    sys.path[:] = job.python_path
    try:
        user = UserScorer(*job.function, job.batched) if job.function else None
    except RewardError as error:
        _send(channel, 0, Ready(False, str(error)))
        return
    loaded = resident_bytes()
    runtime = ScorerRuntime(user, loaded + (job.memory_bytes - loaded) / 2)
    is_async = user is not None and user.is_async
    _send(channel, 0, Ready(is_async))
    if is_async:
        asyncio.run(_serve_side_by_side(channel, runtime, job.timeout_s))
    else:
        _serve_one_by_one(channel, runtime, job.batched, cell)


def _serve_one_by_one(
    channel: socket.socket, runtime: ScorerRuntime, batched: bool, cell: int
) -> None:
    """Score the answers of each message, and reply once `MESSAGE_S` is over."""
    while (message := receive_message(channel)) is not None:
        items: list[ScoreItem] = unpack(message[1])
        outcomes: list[Outcome | None] = []
        give_back = time.monotonic() + MESSAGE_S
        for number, call in enumerate([items] if batched else [[item] for item in items]):
            os.pwrite(cell, bytes([number]), 0)
            scored, is_last = runtime.call_without_loop(call)
            outcomes += scored
            if is_last or time.monotonic() > give_back:
                break
        _send(channel, message[0], ScorerReply(outcomes, is_last))
        if is_last:
            return


async def _serve_side_by_side(
    channel: socket.socket, runtime: ScorerRuntime, timeout_s: float
) -> None:
    """Make calls as they come, each with its own time.

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

    async def answer(number: int, items: list[ScoreItem]) -> None:
        before_s = blocked_s
        work = asyncio.ensure_future(runtime.call(items))
        await asyncio.wait({work}, timeout=timeout_s)
        if work.done():
            outcomes, is_last = work.result()
            _send(channel, number, ScorerReply(outcomes, is_last and not ended.is_set()))
            if is_last:
                ended.set()
            return
        work.cancel()
        is_innocent = blocked_s - before_s > _BLOCKED_SHARE * timeout_s
        late = None if is_innocent or len(items) > 1 else timeout_failure(timeout_s)
        _send(channel, number, ScorerReply([late] * len(items)))

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


def _send(channel: socket.socket, number: int, message: Ready | ScorerReply) -> None:
    """Send a message; a pool that is gone is met at the next read."""
    with suppress(BrokenPipeError, ConnectionResetError):
        send_message(channel, number, pack(message))


if __name__ == "__main__":
    main()
