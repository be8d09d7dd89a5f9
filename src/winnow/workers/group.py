"""Groups of workers in other processes: calls and their results, and a watch for deaths and hangs.

A `WorkerConnection` is the driver's end of one worker: `local` has the one for processes of this
machine, `ray.actors` the one for Ray actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from winnow.errors import WinnowError, WorkerError
from winnow.observe.usage import label_process
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
from winnow.workers.threads import block_on, spawn

log = logging.getLogger(__name__)
_T = TypeVar("_T")

START_TIMEOUT_S = 600.0
"""Limit for creating a worker: imports, and loading a model."""
CLOSE_TIMEOUT_S = 30.0
"""Limit for a worker's `close()`, if its stall timeout is not less."""
GONE_TIMEOUT_S = 30.0
"""Limit for a killed process to exit, which frees its memory first."""
_OUTPUT_DRAIN_S = 1.0
"""Limit for reading the last output of a dead process."""
_GRACE_S = 3.0
"""Time after an exception in which the death of another rank counts as its cause."""
_TICK_S = 0.1
_THIS_MACHINE = "127.0.0.1"
_CHILD = "winnow.workers.child"


class WorkerConnection(Protocol):
    """The driver's end of one worker's process."""

    @property
    def pid(self) -> int:
        """The process id."""

    def send(self, number: int, payload: Any, on_result: Callable[[Any], None]) -> None:
        """Send a call; calls start in the order of their numbers, from 0.

        Args:
            on_result: called with the result or a `CallFailure`, unless the process dies.
        """

    def exit_reason(self) -> str | None:
        """Return how the process ended, such as `was killed by SIGKILL`; None while it runs."""

    def kill(self) -> None:
        """End the process at once."""

    async def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until the process has exited; return False after a timeout."""

    async def release(self) -> None:
        """Free the driver's resources of the connection."""


@dataclass(eq=False)
class _Rank:
    connection: WorkerConnection
    listener: LogReceiver
    calls: int = 0
    """Number of calls sent, and so of the next one."""
    pending_calls: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)
    """Method and future of each call without a result."""
    stalled_s: float = 0.0
    """Seconds without progress."""
    progress: int | None = None


class WorkerGroup:
    """Workers of one role, in separate processes.

    A group belongs to the event loop that it was started in; in a run that is the one of
    `WorkerGroups`. Its methods may be called from any thread, but `call_blocking` and
    `close_blocking` not from that loop's.

    The first worker that raises, dies or hangs ends the group: pending calls of the other ranks,
    which may block in a collective, are abandoned, and all later calls raise the same error.
    Workers that should fail independently, such as several engines, are separate groups.

    Every call raises:
        WorkerError: names role and rank. A worker's traceback is in the log, once.
        WinnowError: the exception of the worker itself.

    A cancelled call continues in the worker, and its result is dropped. Contract tests are in
    `tests/contract/test_worker_group.py`.

    Args:
        pack: serialises a message once for several ranks.
        on_close: frees resources of the whole group.
        start_timeout_s: how long the creation of workers may take.
    """

    def __init__(
        self,
        role: str,
        pack: Callable[[WorkerSpec | Call], Any],
        stall_timeout_s: float,
        on_close: Callable[[], None] = lambda: None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.role, self.size = role, 0
        self._ranks: list[_Rank] = []
        self._pack, self._on_close = pack, on_close
        self._stall_timeout_s = stall_timeout_s
        self._limit_s, self._limit_key = start_timeout_s, "cluster.start_timeout_s"
        self._failure: WinnowError | None = None
        self._is_closing = False
        self._closed: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.restart: Callable[[], Coroutine[Any, Any, WorkerGroup]] | None = None
        """Ends what is left of the group and starts the same workers again; callable from any event
        loop, once. None unless `WorkerGroups` has started the group."""

    def add(self, connection: WorkerConnection, listener: LogReceiver) -> None:
        """Add the connection of the next rank."""
        self._ranks.append(_Rank(connection, listener))
        self.size += 1

    @contextlib.asynccontextmanager
    async def closed_on_error(self) -> AsyncIterator[None]:
        """End all workers if the block raises."""
        try:
            yield
        except BaseException:
            await self._close_once()
            raise

    async def start(
        self,
        path: str,
        kwargs: Mapping[str, Any],
        master: tuple[str, int],
        devices: Sequence[int | None],
        store: Callable[[int], Store],
    ) -> None:
        """Create the workers in their processes.

        Args:
            path: `module:Class` of the worker (`host`).
            kwargs: keyword arguments of each, besides its rank.
            master: rank 0's address, and a free port there.
            devices: `RankInfo.device_index` by rank.
            store: makes the `RankInfo.store` of a rank.
        """
        spawn(self._watch(), self._tasks)
        level, paths = logging.getLogger("winnow").getEffectiveLevel(), tuple(sys.path)
        waiting = []
        for rank, device in enumerate(devices):
            info = RankInfo(rank, self.size, *master, device, store(rank))
            spec = WorkerSpec(path, kwargs, info, self._stall_timeout_s, level, paths)
            waiting += self._send([rank], "__init__", spec)
        await asyncio.gather(*waiting)
        self._limit_s, self._limit_key = self._stall_timeout_s, "trainer.stall_timeout_s"

    @property
    def progress(self) -> tuple[int | None, ...]:
        """The workers' last reported `progress`, by rank."""
        return tuple(rank.listener.progress for rank in self._ranks)

    def call_blocking(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks and block; return the results by rank."""
        return block_on(self._call_ranks(range(self.size), Call(method, args, kwargs)), self._loop)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks; return the results by rank.

        The arguments are serialised once, and large arrays are stored once for all ranks of a
        machine.
        """
        same = Call(method, args, kwargs)
        return await asyncio.wrap_future(self.submit(self._call_ranks(range(self.size), same)))

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on one rank; return its result."""
        call = Call(method, args, kwargs)
        return (await asyncio.wrap_future(self.submit(self._call_ranks([rank], call))))[0]

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the group's event loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def pids(self) -> list[int]:
        """Return process ids by rank."""
        return [rank.connection.pid for rank in self._ranks]

    async def close(self) -> None:
        """End the workers and wait until their processes have exited.

        Each worker's `close()` is called first, unless the group has failed. May be called twice.
        """
        await asyncio.wrap_future(self.submit(self._close_once()))

    def close_blocking(self) -> None:
        """Do what `close` does, and block; do nothing if the loop is closed."""
        if not self._loop.is_closed():
            block_on(self._close_once(), self._loop)

    async def _close_once(self) -> None:
        if self._closed is None:
            self._closed = self._loop.create_task(self._close())
        # Shielded: a driver that is cancelled meanwhile leaves no process behind either.
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
            rank.calls += 1  # after `send`: the worker would wait for one that could not be sent
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
            # The callers get the error once its cause is known.
            spawn(self._on_failure(number, method, outcome), self._tasks)
            return
        del rank.pending_calls[call]
        if isinstance(outcome, CallFailure):
            log.error("%s[%d]: %s failed: %s", self.role, number, method, outcome.traceback)
            _set_error(future, self._closed_error())
        elif not future.done():
            future.set_result(outcome)

    async def _on_failure(self, number: int, method: str, failure: CallFailure) -> None:
        """Fail the group with a worker's exception, unless the death of another rank caused it."""
        peers = [rank for rank in range(self.size) if rank != number]
        give_up = time.monotonic() + (_GRACE_S if peers else 0.0)
        while time.monotonic() < give_up and self._failure is None:
            if any(self._is_dead(rank) for rank in peers):
                give_up += _OUTPUT_DRAIN_S  # the watch is about to report it
            await asyncio.sleep(0.01)
        if self._failure is not None:
            return
        line = f"{self.role}[{number}] failed in {method}: {failure.line}"
        error = failure.error
        if error is None:
            log.error("%s[%d] failed in %s: %s", self.role, number, method, failure.traceback)
            error = WorkerError(f"{line}; see the traceback in the log", self.role, number)
        else:
            log.error("%s", line)
        self._fail(error)

    def _is_dead(self, number: int) -> bool:
        rank = self._ranks[number]
        return rank.listener.has_ended.is_set() or rank.connection.exit_reason() is not None

    async def _watch(self) -> None:
        """Watch for deaths and hangs until the group has failed or is closed.

        Time is counted in ticks, so that a delay of the driver does not count as a worker's hang.
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
            how = rank.connection.exit_reason() or "closed its connection"
            how += " (by a user or the OOM killer)" if how.endswith("SIGKILL") else ""
            line = f"{self.role}[{number}] {how}{self._describe_calls(number)}"
            log.error("%s", line)
            self._fail(WorkerError(f"{line}; see its last lines in the log", self.role, number))

    def _on_hang(self, number: int) -> None:
        calls = self._describe_calls(number)
        line = f"{self.role}[{number}] hung{calls}: no progress for {self._limit_s:g} s"
        silent = [
            f"{self.role}[{other}]"
            for other, rank in enumerate(self._ranks)
            if other != number and rank.pending_calls and rank.stalled_s > 0.9 * self._limit_s
        ]
        waiting = f" (nor of {', '.join(silent)})" if silent else ""
        log.error("%s%s; see its stack in the log", line, waiting)
        remedy = f"if it is only slow, raise {self._limit_key}"
        self._fail(WorkerError(f"{line}{waiting}; {remedy}", self.role, number))

    def _describe_calls(self, number: int) -> str:
        methods = dict.fromkeys(method for method, _ in self._ranks[number].pending_calls.values())
        return f" in {', '.join(methods)}" if methods else ""

    def _fail(self, error: WinnowError) -> None:
        """Mark the group as failed: all pending and later calls raise the error."""
        assert self._failure is None
        self._failure = error
        for rank in self._ranks:
            for _, future in rank.pending_calls.values():
                _set_error(future, error)
            rank.pending_calls.clear()

    async def _close(self) -> None:
        try:
            if self._failure is None:
                await self._close_workers()
        finally:
            self._is_closing = True
            for rank in self._ranks:
                rank.connection.kill()
            await asyncio.gather(*map(self._wait_after_kill, self._ranks))
            if self._failure is None:
                self._fail(self._closed_error())
            for rank in self._ranks:
                await _wait_at_most(rank.listener.has_ended.wait(), _OUTPUT_DRAIN_S)
                await rank.connection.release()
            self._on_close()
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()

    async def _wait_after_kill(self, rank: _Rank) -> None:
        if not await rank.connection.wait_for_exit(GONE_TIMEOUT_S):
            log.error("%s: process %d did not exit after SIGKILL", self.role, rank.connection.pid)

    async def _close_workers(self) -> None:
        """Call each worker's `close()`, and log what it raises."""
        self._is_closing = True
        waiting = self._send(range(self.size), "close", CLOSE)
        pending = {future for future in waiting if not future.done()}
        give_up = time.monotonic() + min(CLOSE_TIMEOUT_S, self._stall_timeout_s)
        while pending and time.monotonic() < give_up:
            _, pending = await asyncio.wait(pending, timeout=_TICK_S)
            pending = {f for f in pending if not self._is_dead(waiting.index(f))}

    def _closed_error(self) -> WorkerError:
        return WorkerError(f"the {self.role} workers were closed by this run", self.role, -1)


def _set_error(future: asyncio.Future[Any], error: WinnowError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # else asyncio logs errors that nobody awaits


async def _wait_at_most(work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    """Await a coroutine; give up after a timeout."""
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
    start_timeout_s: float = START_TIMEOUT_S,
) -> WorkerGroup:
    """Start workers in processes of this machine.

    Linux kills them when the calling thread ends.

    Args:
        path: `module:Class` of the worker (`host`).
        kwargs: keyword arguments of each, besides its rank.
        environment: variables that override this process's.
        stall_timeout_s: how long a call may take without progress.
        devices: `RankInfo.device_index` by rank; None is the CPU.
        start_timeout_s: how long the creation of workers may take.

    Raises:
        WorkerError, WinnowError: a worker cannot be created; all processes are ended.
    """
    if not hasattr(os, "memfd_create"):
        raise WinnowError("worker processes need Linux; run without them, or on Linux")
    master = _THIS_MACHINE, free_port(_THIS_MACHINE)
    variables = worker_environment(environment or {})
    group = WorkerGroup(role, pack, stall_timeout_s, start_timeout_s=start_timeout_s)
    async with group.closed_on_error():
        for rank in range(size):
            listener = LogReceiver(role, rank)
            connection = await LocalConnection.start(_CHILD, variables, listener.follow)
            label_process(connection.pid, role)
            group.add(connection, listener)
        store = partial(SharedStore, role)
        await group.start(path, kwargs, master, devices or [None] * size, store)
    return group


Start = Callable[[], Coroutine[Any, Any, WorkerGroup]]
"""Starts the same group at each call."""


class WorkerGroups:
    """Starts worker groups in the event loop of a separate thread; close it.

    The run's own loop blocks while a step is trained or a checkpoint is awaited.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="workers", daemon=True)
        self._thread.start()
        self._groups: list[WorkerGroup] = []
        self._restarts: set[asyncio.Task[WorkerGroup]] = set()

    def start(self, *starts: Start) -> list[WorkerGroup]:
        """Start groups concurrently.

        Raises:
            WinnowError: a group could not be started.
        """

        async def start_all() -> list[WorkerGroup | BaseException]:
            groups = await asyncio.gather(*map(self._start, starts), return_exceptions=True)
            self._groups += [each for each in groups if isinstance(each, WorkerGroup)]
            return groups

        started = []
        for each in self.wait(start_all()):
            if isinstance(each, BaseException):
                raise each
            started.append(each)
        return started

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the loop and return its result."""
        return block_on(work, self._loop)

    async def _start(self, start: Start) -> WorkerGroup:
        group = await start()
        group.restart = partial(self._restart, group, start)
        return group

    async def _restart(self, group: WorkerGroup, start: Start) -> WorkerGroup:
        """Restart a group, from any event loop."""
        return await asyncio.wrap_future(group.submit(self._replace(group, start)))

    async def _replace(self, group: WorkerGroup, start: Start) -> WorkerGroup:
        task = cast("asyncio.Task[WorkerGroup]", asyncio.current_task())
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)
        await group.close()  # its memory and slots are free then
        started = await self._start(start)
        self._groups[self._groups.index(group)] = started
        return started

    async def _end_restarts(self) -> None:
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)

    def close(self) -> None:
        """Close all groups and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        try:
            self.wait(self._end_restarts())
            for group in reversed(self._groups):
                group.close_blocking()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
