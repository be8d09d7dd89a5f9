"""Groups of workers in other processes: calls, their outcomes, and a watch for deaths and hangs.

A `WorkerConnection` is the driver's end of one worker, in whatever kind of process: `local` has the
one for processes of this machine, `ray.actors` that for actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from winnow.errors import WinnowError, WorkerError
from winnow.workers.array_refs import Store
from winnow.workers.host import (
    CLOSE,
    Call,
    CallFailure,
    RankInfo,
    WorkerSpec,
    free_port,
    worker_environment,
)
from winnow.workers.local import LocalConnection, SharedStore, pack
from winnow.workers.logs import LogReceiver
from winnow.workers.threads import spawn

log = logging.getLogger(__name__)
_T = TypeVar("_T")

START_TIMEOUT_S = 600.0
"""For a worker to be made: imports, and a model to be loaded."""
CLOSE_TIMEOUT_S = 30.0
"""For a worker's `close()`; less where a worker may hang for less."""
GONE_TIMEOUT_S = 30.0
"""For a killed process to leave, which gives its memory back first."""
_OUTPUT_DRAIN_S = 1.0
"""For what a dead process wrote to be read."""
_GRACE_S = 3.0
"""After an exception, for a death to be seen that it may come from."""
_TICK_S = 0.1
_THIS_MACHINE = "127.0.0.1"


class WorkerConnection(Protocol):
    """The driver's end of one worker's process."""

    @property
    def pid(self) -> int:
        """The process id."""

    def send(self, number: int, payload: Any, on_result: Callable[[Any], None]) -> None:
        """Have a call run; calls begin in the order of their numbers, from 0.

        Args:
            on_result: to be given the result or a `CallFailure`, later; never, if the process dies.
        """

    def exit_reason(self) -> str | None:
        """Say how the process ended, such as `was killed by SIGKILL`; None while it runs."""

    def kill(self) -> None:
        """End the process at once."""

    async def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until nothing of the process is left; False if it did not go in time."""

    async def release(self) -> None:
        """Give back what the driver holds for it."""


@dataclass(eq=False)
class _Rank:
    connection: WorkerConnection
    listener: LogReceiver
    calls: int = 0
    """Sent so far, which is the number of the next one."""
    pending_calls: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)
    """Calls without an outcome: each one's method, and the future that waits for it."""
    stalled_s: float = 0.0
    """Seconds without progress."""
    progress: int | None = None


class WorkerGroup:
    """Workers of one role, in separate processes.

    A group belongs to the event loop that it was started in; in a run that is the one of
    `WorkerGroups`. Its methods may be called from any thread, but `call_blocking` and
    `close_blocking` not from that loop's.

    The first worker that raises, dies, or hangs ends the group: calls under way on the other ranks,
    which may sit in a collective for ever, are abandoned, and all later calls raise the same error.
    What should fail by itself, such as one engine of several, is a separate group.

    Every call raises:
        WorkerError: names role and rank. The traceback of what a worker raised is in the log, once.
        WinnowError: a worker raised it; it comes through as it is.

    A call that is cancelled goes on in the worker, and its result is dropped. Contract tests are in
    `tests/contract/test_worker_group.py`.

    Args:
        connections: the connections, each with the receiver of its log, by rank.
        pack: serialises once a message to several.
        on_close: gives back what the group as a whole holds.
    """

    def __init__(
        self,
        role: str,
        connections: Sequence[tuple[WorkerConnection, LogReceiver]],
        pack: Callable[[WorkerSpec | Call], Any],
        stall_timeout_s: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.role = role
        self.size = len(connections)
        self._ranks = [_Rank(connection, listener) for connection, listener in connections]
        self._pack, self._on_close = pack, on_close
        self._stall_timeout_s = stall_timeout_s
        self._limit_s = START_TIMEOUT_S
        self._failure: WinnowError | None = None
        self._is_closing = False
        self._closed: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        spawn(self._watch(), self._tasks)

    async def start(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        master: tuple[str, int],
        devices: Sequence[int | None],
        store: Callable[[int], Store],
    ) -> None:
        """Have the workers made; on an error all processes are ended.

        Args:
            path: `module:Class` of the worker (`host`).
            kwargs: what each is made with, beside its rank.
            master: rank 0's address, and a port that is free there.
            devices: `RankInfo.device_index` by rank.
            store: makes the `RankInfo.store` of a rank.
        """
        level, paths = logging.getLogger("winnow").getEffectiveLevel(), tuple(sys.path)
        waiting = []
        try:
            for rank, device in enumerate(devices):
                info = RankInfo(rank, self.size, *master, device, store(rank))
                job = WorkerSpec(path, kwargs, info, self._stall_timeout_s, level, paths)
                waiting += self._send([rank], "__init__", job)
            await asyncio.gather(*waiting)
        except BaseException:
            await self._close_once()
            raise
        self._limit_s = self._stall_timeout_s

    @property
    def progress(self) -> tuple[int | None, ...]:
        """The workers' own, by rank, as last heard."""
        return tuple(rank.listener.progress for rank in self._ranks)

    def call_blocking(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks and wait; results by rank."""
        return _run_blocking(
            self._call_ranks(range(self.size), Call(method, args, kwargs)), self._loop
        )

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks at once; results by rank.

        The arguments are serialised once, and large arrays among them held once for all ranks of
        a machine.
        """
        same = Call(method, args, kwargs)
        return await asyncio.wrap_future(self.submit(self._call_ranks(range(self.size), same)))

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on one rank."""
        call = Call(method, args, kwargs)
        return (await asyncio.wrap_future(self.submit(self._call_ranks([rank], call))))[0]

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the group's loop do some work; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def pids(self) -> list[int]:
        """Return process ids by rank."""
        return [rank.connection.pid for rank in self._ranks]

    async def close(self) -> None:
        """End the workers; none of their processes is left when it returns.

        Each worker's `close()` comes first, unless something failed. A second time does nothing.
        """
        await asyncio.wrap_future(self.submit(self._close_once()))

    def close_blocking(self) -> None:
        """Do what `close` does, and wait; where the loop is closed, that is done."""
        if not self._loop.is_closed():
            _run_blocking(self._close_once(), self._loop)

    async def _close_once(self) -> None:
        if self._closed is None:
            self._closed = self._loop.create_task(self._close())
        # A driver that is cancelled while it closes leaves no process behind either.
        await asyncio.shield(self._closed)

    async def _call_ranks(self, ranks: Sequence[int], call: Call) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise self._closed_error()
        return await asyncio.gather(*self._send(ranks, call.method, call))

    def _send(
        self, numbers: Sequence[int], method: str, request: WorkerSpec | Call
    ) -> list[asyncio.Future[Any]]:
        payload = self._pack(request)
        waiting = []
        for number in numbers:
            rank, future = self._ranks[number], self._loop.create_future()
            if not rank.pending_calls:
                rank.stalled_s = 0.0
            call = rank.calls
            rank.connection.send(call, payload, partial(self._on_result, number, call))
            rank.calls += 1  # now: the worker would wait for one that could not be sent
            rank.pending_calls[call] = method, future
            waiting.append(future)
        return waiting

    def _on_result(self, number: int, call: int, outcome: Any) -> None:
        rank = self._ranks[number]
        if call not in rank.pending_calls:  # abandoned
            return
        method, future = rank.pending_calls[call]
        rank.stalled_s = 0.0
        if isinstance(outcome, CallFailure) and not self._is_closing:
            # Its waiters get the error once the cause is known.
            spawn(self._on_failure(number, method, outcome), self._tasks)
            return
        del rank.pending_calls[call]
        if isinstance(outcome, CallFailure):
            log.error("%s[%d]: %s failed: %s", self.role, number, method, outcome.traceback)
            _set_error(future, self._closed_error())
        elif not future.done():
            future.set_result(outcome)

    async def _on_failure(self, number: int, method: str, failure: CallFailure) -> None:
        """Find out whether a method raised on its own account or because another rank died."""
        peers = [rank for rank in range(self.size) if rank != number]
        give_up = time.monotonic() + (_GRACE_S if peers else 0.0)
        while time.monotonic() < give_up and self._failure is None:
            if any(self._is_dead(rank) for rank in peers):
                give_up += _OUTPUT_DRAIN_S  # the watch is about to say so
            await asyncio.sleep(0.01)
        if self._failure is not None:
            return
        line = f"{self.role}[{number}] failed in {method}: {failure.line}"
        error = failure.error
        if error is None:
            log.error("%s[%d] failed in %s: %s", self.role, number, method, failure.traceback)
            error = WorkerError(f"{line}; the log has its traceback", self.role, number)
        else:
            log.error("%s", line)
        self._fail(error)

    def _is_dead(self, number: int) -> bool:
        rank = self._ranks[number]
        return rank.listener.has_ended.is_set() or rank.connection.exit_reason() is not None

    async def _watch(self) -> None:
        """Watch for deaths and hangs, until the group has failed or is closed.

        Time is counted in ticks: a driver that was itself held up blames no worker.
        """
        last = time.monotonic()
        while self._failure is None and not self._is_closing:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            passed, last = min(now - last, 2 * _TICK_S), now
            for number, rank in enumerate(self._ranks):
                if self._is_dead(number):
                    await self._on_death(number)
                    return
                if not rank.pending_calls or rank.listener.progress != rank.progress:
                    rank.progress, rank.stalled_s = rank.listener.progress, 0.0
                else:
                    rank.stalled_s += passed
            longest = max(self._ranks, key=lambda rank: rank.stalled_s)
            if longest.stalled_s > self._limit_s and self._failure is None:
                self._on_hang(self._ranks.index(longest))

    async def _on_death(self, number: int) -> None:
        rank = self._ranks[number]
        await _wait_at_most(rank.listener.has_ended.wait(), _OUTPUT_DRAIN_S)
        await rank.connection.wait_for_exit(_OUTPUT_DRAIN_S)
        if self._failure is None and not self._is_closing:
            how = rank.connection.exit_reason() or "cut its connection"
            how += " (by hand, or for want of memory)" if how.endswith("SIGKILL") else ""
            line = f"{self.role}[{number}] {how}{self._describe_calls(number)}"
            log.error("%s", line)
            self._fail(WorkerError(f"{line}; the log has its last lines", self.role, number))

    def _on_hang(self, number: int) -> None:
        calls = self._describe_calls(number)
        line = f"{self.role}[{number}] hung{calls}: no progress for {self._limit_s:g} s"
        silent = [
            f"{self.role}[{other}]"
            for other, rank in enumerate(self._ranks)
            if other != number and rank.pending_calls and rank.stalled_s > 0.9 * self._limit_s
        ]
        waiting = f" ({', '.join(silent)} had none either)" if silent else ""
        log.error("%s%s; the log has its stack", line, waiting)
        remedy = "raise trainer.stall_timeout_s if it is only slow"
        self._fail(WorkerError(f"{line}{waiting}; {remedy}", self.role, number))

    def _describe_calls(self, number: int) -> str:
        methods = dict.fromkeys(method for method, _ in self._ranks[number].pending_calls.values())
        return f" in {', '.join(methods)}" if methods else ""

    def _fail(self, error: WinnowError) -> None:
        """End the group: every call under way raises, and every later one."""
        assert self._failure is None
        self._failure = error
        for rank in self._ranks:
            for _, future in rank.pending_calls.values():
                _set_error(future, error)
            rank.pending_calls.clear()

    async def _close(self) -> None:
        connections = [rank.connection for rank in self._ranks]
        try:
            if self._failure is None:
                await self._close_workers()
        finally:
            self._is_closing = True
            for connection in connections:
                connection.kill()
            gone = await asyncio.gather(
                *(connection.wait_for_exit(GONE_TIMEOUT_S) for connection in connections)
            )
            for connection, is_gone in zip(connections, gone, strict=True):
                if not is_gone:
                    log.error("%s: process %d does not end", self.role, connection.pid)
            if self._failure is None:
                self._fail(self._closed_error())
            for rank in self._ranks:
                await _wait_at_most(rank.listener.has_ended.wait(), _OUTPUT_DRAIN_S)
                await rank.connection.release()
            self._on_close()
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

    async def _close_workers(self) -> None:
        """Have each worker's `close()` run; what it raises is logged."""
        self._is_closing = True
        waiting = self._send(range(self.size), "close", CLOSE)
        pending = {future for future in waiting if not future.done()}
        give_up = time.monotonic() + min(CLOSE_TIMEOUT_S, self._stall_timeout_s)
        while pending and time.monotonic() < give_up:
            _, pending = await asyncio.wait(pending, timeout=_TICK_S)
            pending = {f for f in pending if not self._is_dead(waiting.index(f))}

    def _closed_error(self) -> WorkerError:
        return WorkerError(f"the workers {self.role} were ended by this run", self.role, -1)


def _set_error(future: asyncio.Future[Any], error: WinnowError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # where nobody waits any more, nobody gets the error


async def _wait_at_most(work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    """Wait for something, up to a limit."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, timeout_s)


async def start_local(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    size: int,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    devices: Sequence[int] | None = None,
) -> WorkerGroup:
    """Start workers in processes of this machine.

    Call it from a thread that lives as long as they are to: Linux kills them when it ends.

    Args:
        path: `module:Class` of the worker (`host`).
        kwargs: what each is made with, beside its rank.
        environment: variables for them, over this process's own.
        stall_timeout_s: how long a call may be under way without progress.
        devices: `RankInfo.device_index` by rank; by default the CPU.

    Raises:
        WorkerError, WinnowError: one cannot be made; no process is left.
    """
    if not hasattr(os, "memfd_create"):
        raise WinnowError("workers in processes of their own need Linux; use cluster=local there")
    port = free_port(_THIS_MACHINE)
    variables = worker_environment(environment or {})
    connections: list[tuple[LocalConnection, LogReceiver]] = []
    try:
        for rank in range(size):
            listener = LogReceiver(role, rank)
            connection = await LocalConnection.start(
                "winnow.workers.child", variables, listener.follow
            )
            connections.append((connection, listener))
    except BaseException:
        await WorkerGroup(role, connections, pack, stall_timeout_s).close()
        raise
    group = WorkerGroup(role, connections, pack, stall_timeout_s)
    master = _THIS_MACHINE, port
    await group.start(path, kwargs, master, devices or [None] * size, partial(SharedStore, role))
    return group


Starting = Coroutine[Any, Any, WorkerGroup]


class WorkerGroups:
    """Worker groups in the event loop of a thread; close it.

    The run's own loop stands still while a step is learnt and while a checkpoint is awaited.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._thread.start()
        self._groups: list[WorkerGroup] = []

    def start(self, *starting: Starting) -> list[WorkerGroup]:
        """Start groups side by side.

        Raises:
            WinnowError: one of them could not be started.
        """

        async def start_all() -> list[WorkerGroup | BaseException]:
            groups = await asyncio.gather(*starting, return_exceptions=True)
            self._groups += [each for each in groups if isinstance(each, WorkerGroup)]
            return groups

        started = []
        for each in self.wait(start_all()):
            if isinstance(each, BaseException):
                raise each
            started.append(each)
        return started

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the loop do some work, and wait for its result."""
        return _run_blocking(work, self._loop)

    def close(self) -> None:
        """End all groups; a second time does nothing."""
        if self._loop.is_closed():
            return
        try:
            for group in reversed(self._groups):
                group.close_blocking()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _run_blocking(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    """Have the loop of another thread do some work, and wait for its result."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:  # such as Ctrl-C, while it goes on
        future.cancel()
        raise
