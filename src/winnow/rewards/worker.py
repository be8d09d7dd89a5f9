"""A worker of the scorer pool: `python -m winnow.rewards.worker DESCRIPTOR PARENT`.

Scores what comes over a socket, one answer at a time in the main thread (signals work nowhere
else), or many side by side where the user's function is asynchronous. It enforces no limit of
its own on a sync function: the pool watches from outside, because code that hangs inside C stops
every thread of its process. It ends with its parent, however that one ends, and after a scorer
has left it with much memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
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
from winnow.rewards.wire import BatchItem, Item, Job, Reply, Unpacker, pack, portable
from winnow.types import Score

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 18
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else -1


@dataclass
class Channel:
    """Both directions of the socket to the pool."""

    socket: socket.socket
    _unpacker: Unpacker = field(default_factory=Unpacker)

    def send(self, *reply: Any) -> None:
        """Say something; a pool that is gone is met at the next read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(pack(Reply(*reply)))

    def read(self, flags: int = 0) -> list[Any] | None:
        """The messages that have come, none or more; None when the pool is gone."""
        try:
            data = self.socket.recv(_READ_BYTES, flags)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        return list(self._unpacker.feed(data)) if data else None

    def messages(self) -> Iterator[Any]:
        """One after the other until the pool is gone."""
        while (some := self.read()) is not None:
            yield from some


@dataclass(frozen=True)
class ScorerRuntime:
    """What scores here, and how much memory it may grow to before the worker is replaced."""

    user: UserScorer | None
    retire_bytes: float

    def is_worn(self, result: Outcome) -> bool:
        """Whether to go on in a new process."""
        each = result if isinstance(result, tuple) else (result,)
        is_out = any(isinstance(r, Failure) and r.line.startswith("MemoryError") for r in each)
        return is_out or resident_bytes() > self.retire_bytes

    async def score(self, item: Item | BatchItem) -> Outcome:
        """Score an item; whatever happens short of the process's end is an outcome."""
        try:
            self._seed(item)
            if isinstance(item, BatchItem):
                return _portable(await outcomes(self._function, item.batch))
            return _portable(await outcome(self.user, item.scorer, item.arguments))
        except BaseException as error:  # KeyboardInterrupt, CancelledError: the scorer raised it
            return failure_of(error, self.user.file if self.user else None)

    def score_without_loop(self, item: Item | BatchItem) -> Outcome:
        """The same where no event loop runs."""
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

    def _seed(self, item: Item | BatchItem) -> None:
        if self.user is not None:
            seed_scorer(item.seed)


def _portable(result: Outcome) -> Outcome:
    if isinstance(result, tuple):
        return tuple(portable(r) if isinstance(r, Score) else r for r in result)
    return portable(result) if isinstance(result, Score) else result


def main() -> None:
    """Serve until the pool is gone."""
    descriptor, parent = map(int, sys.argv[1:])
    _die_with(parent)
    for stream in (sys.stdout, sys.stderr):
        cast(Any, stream).reconfigure(line_buffering=True, errors="backslashreplace")
    channel = Channel(socket.socket(fileno=descriptor))
    messages = channel.messages()
    job: Job | None = next(messages, None)
    if job is None:
        return
    sys.path[:] = job.python_path
    try:
        user = UserScorer(job.function, job.batched) if job.function else None
    except RewardError as error:
        channel.send("refused", -1, str(error))
        return
    loaded = resident_bytes()
    bench = ScorerRuntime(user, loaded + (job.memory_bytes - loaded) / 2)
    is_async = user is not None and user.is_async
    channel.send("ready", -1, is_async)
    if is_async:
        from winnow.rewards.worker_async import serve

        asyncio.run(serve(channel, bench, job.timeout_s))
    else:
        _serve_one_by_one(messages, channel, bench)


def _serve_one_by_one(messages: Iterator[Any], channel: Channel, bench: ScorerRuntime) -> None:
    for item in messages:
        result = bench.score_without_loop(item)
        channel.send("done", item.id, result)
        if bench.is_worn(result):
            channel.send("retiring")
            return


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    if _STATM < 0:
        return 0
    return int(os.pread(_STATM, 100, 0).split()[1]) * _PAGE_BYTES


def seed_scorer(seed: int) -> None:
    """Make what a scorer draws depend on its answer alone, whichever worker it comes to."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    if "torch" in sys.modules:  # the user's file imported it
        sys.modules["torch"].manual_seed(seed)


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; be gone if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
