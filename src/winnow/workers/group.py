"""Groups of workers in other processes: calls, their outcomes, and a watch for deaths and hangs.

A `WorkerConnection` is the driver's end of one worker, in whatever kind of process: `local` has the
one for processes of this machine, `ray.group` that for actors.
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
    WorkerJob,
    free_port,
    merged_environment,
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

    def send(self, number: int, payload: Any, tell: Callable[[Any], None]) -> None:
        """Have a call run; calls begin in the order of their numbers, from 0.

        Args:
            tell: to be given the result or a `CallFailure`, later; never, if the process dies.
        """

    def ending(self) -> str | None:
        """Say how the process ended, such as `was killed by SIGKILL`; None while it runs."""

    def kill(self) -> None:
        """End the process at once."""

    async def gone(self, timeout_s: float) -> bool:
        """Wait until nothing of the process is left; False if it did not go in time."""

    async def release(self) -> None:
        """Give back what the driver holds for it."""


@dataclass(eq=False)
class _Rank:
    link: WorkerConnection
    listener: LogReceiver
    calls: int = 0
    """Sent so far, which is the number of the next one."""
    under_way: dict[int, tuple[str, asyncio.Future[Any]]] = field(default_factory=dict)
    """Calls without an outcome: each one's method, and the future that waits for it."""
    still_s: float = 0.0
    """Seconds without progress."""
    progress: int | None = None


class WorkerGroup:
    """Workers of one role, in separate processes.

    It lives in the event loop that it was started in; all its methods may be called from anywhere,
    those that wait (`ask`, `end`) from other threads only. In a run that loop is the one of
    `WorkerGroups`.

    The first worker that raises, dies, or hangs ends the group: calls under way on the other ranks,
    which may sit in a collective for ever, are abandoned, and all later calls raise the same error.
    What should fail by itself, such as one engine of several, is a separate group.

    Every call raises:
        WorkerError: names role and rank. The traceback of what a worker raised is in the log, once.
        WinnowError: a worker raised it; it comes through as it is.

    A call that is cancelled goes on in the worker, and its result is dropped. Contract tests are in
    `tests/contract/test_worker_group.py`.

    Args:
        links: the connections, each with the receiver of its log, by rank.
        pack: serialises once a message to several.
        finish: gives back what the group as a whole holds.
        start_timeout_s: how long the workers may take to be made.
    """

    def __init__(
        self,
        role: str,
        links: Sequence[tuple[WorkerConnection, LogReceiver]],
        pack: Callable[[WorkerJob | Call], Any],
        stall_timeout_s: float,
        finish: Callable[[], None] = lambda: None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.role = role
        self.size = len(links)
        self._ranks = [_Rank(link, listener) for link, listener in links]
        self._pack, self._finish = pack, finish
        self._stall_timeout_s = stall_timeout_s
        self._limit_s, self._limit_key = start_timeout_s, "cluster.start_timeout_s"
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
                job = WorkerJob(path, kwargs, info, self._stall_timeout_s, level, paths)
                waiting += self._send([rank], "__init__", job)
            await asyncio.gather(*waiting)
        except BaseException:
            await self._end()
            raise
        self._limit_s, self._limit_key = self._stall_timeout_s, "trainer.stall_timeout_s"

    @property
    def progress(self) -> tuple[int | None, ...]:
        """The workers' own, by rank, as last heard."""
        return tuple(rank.listener.progress for rank in self._ranks)

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks and wait; results by rank."""
        return _wait(self._answers(range(self.size), Call(method, args, kwargs)), self._loop)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on all ranks at once; results by rank.

        The arguments are serialised once, and large arrays among them held once for all ranks of
        a machine.
        """
        same = Call(method, args, kwargs)
        return await asyncio.wrap_future(self.submit(self._answers(range(self.size), same)))

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on one rank."""
        call = Call(method, args, kwargs)
        return (await asyncio.wrap_future(self.submit(self._answers([rank], call))))[0]

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Have the group's loop do some work; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def processes(self) -> list[int]:
        """Return process ids by rank."""
        return [rank.link.pid for rank in self._ranks]

    async def close(self) -> None:
        """End the workers; none of their processes is left when it returns.

        Each worker's `close()` comes first, unless something failed. A second time does nothing.
        """
        await asyncio.wrap_future(self.submit(self._end()))

    def end(self) -> None:
        """Do what `close` does, and wait; where the loop is closed, that is done."""
        if not self._loop.is_closed():
            _wait(self._end(), self._loop)

    async def _end(self) -> None:
        if self._closed is None:
            self._closed = self._loop.create_task(self._close())
        # A driver that is cancelled while it closes leaves no process behind either.
        await asyncio.shield(self._closed)

    async def _answers(self, ranks: Sequence[int], call: Call) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise self._closed_error()
        return await asyncio.gather(*self._send(ranks, call.method, call))

    def _send(
        self, numbers: Sequence[int], method: str, request: WorkerJob | Call
    ) -> list[asyncio.Future[Any]]:
        payload = self._pack(request)
        waiting = []
        for number in numbers:
            rank, future = self._ranks[number], self._loop.create_future()
            if not rank.under_way:
                rank.still_s = 0.0
            call = rank.calls
            rank.link.send(call, payload, partial(self._take, number, call))
            rank.calls += 1  # now: the worker would wait for one that could not be sent
            rank.under_way[call] = method, future
            waiting.append(future)
        return waiting

    def _take(self, number: int, call: int, outcome: Any) -> None:
        rank = self._ranks[number]
        if call not in rank.under_way:  # abandoned
            return
        method, future = rank.under_way[call]
        rank.still_s = 0.0
        if isinstance(outcome, CallFailure) and not self._is_closing:
            # Its waiters get the error once the cause is known.
            spawn(self._raised(number, method, outcome), self._tasks)
            return
        del rank.under_way[call]
        if isinstance(outcome, CallFailure):
            log.error("%s[%d]: %s failed: %s", self.role, number, method, outcome.traceback)
            _refuse(future, self._closed_error())
        elif not future.done():
            future.set_result(outcome)

    async def _raised(self, number: int, method: str, failure: CallFailure) -> None:
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
        return rank.listener.has_ended.is_set() or rank.link.ending() is not None

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
                    await self._died(number)
                    return
                if not rank.under_way or rank.listener.progress != rank.progress:
                    rank.progress, rank.still_s = rank.listener.progress, 0.0
                else:
                    rank.still_s += passed
            longest = max(self._ranks, key=lambda rank: rank.still_s)
            if longest.still_s > self._limit_s and self._failure is None:
                self._hung(self._ranks.index(longest))

    async def _died(self, number: int) -> None:
        rank = self._ranks[number]
        await _within(rank.listener.has_ended.wait(), _OUTPUT_DRAIN_S)
        await rank.link.gone(_OUTPUT_DRAIN_S)
        if self._failure is None and not self._is_closing:
            how = rank.link.ending() or "cut its connection"
            how += " (by hand, or for want of memory)" if how.endswith("SIGKILL") else ""
            line = f"{self.role}[{number}] {how}{self._doing(number)}"
            log.error("%s", line)
            self._fail(WorkerError(f"{line}; the log has its last lines", self.role, number))

    def _hung(self, number: int) -> None:
        line = (
            f"{self.role}[{number}] hung{self._doing(number)}: no progress for {self._limit_s:g} s"
        )
        silent = [
            f"{self.role}[{other}]"
            for other, rank in enumerate(self._ranks)
            if other != number and rank.under_way and rank.still_s > 0.9 * self._limit_s
        ]
        waiting = f" ({', '.join(silent)} had none either)" if silent else ""
        log.error("%s%s; the log has its stack", line, waiting)
        remedy = f"raise {self._limit_key} if it is only slow"
        self._fail(WorkerError(f"{line}{waiting}; {remedy}", self.role, number))

    def _doing(self, number: int) -> str:
        methods = dict.fromkeys(method for method, _ in self._ranks[number].under_way.values())
        return f" in {', '.join(methods)}" if methods else ""

    def _fail(self, error: WinnowError) -> None:
        """End the group: every call under way raises, and every later one."""
        assert self._failure is None
        self._failure = error
        for rank in self._ranks:
            for _, future in rank.under_way.values():
                _refuse(future, error)
            rank.under_way.clear()

    async def _close(self) -> None:
        links = [rank.link for rank in self._ranks]
        try:
            if self._failure is None:
                await self._close_workers()
        finally:
            self._is_closing = True
            for link in links:
                link.kill()
            gone = await asyncio.gather(*(link.gone(GONE_TIMEOUT_S) for link in links))
            for link, is_gone in zip(links, gone, strict=True):
                if not is_gone:
                    log.error("%s: process %d does not end", self.role, link.pid)
            if self._failure is None:
                self._fail(self._closed_error())
            for rank in self._ranks:
                await _within(rank.listener.has_ended.wait(), _OUTPUT_DRAIN_S)
                await rank.link.release()
            self._finish()
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


def _refuse(future: asyncio.Future[Any], error: WinnowError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # where nobody waits any more, nobody gets the error


async def _within(work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
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
    start_timeout_s: float = START_TIMEOUT_S,
) -> WorkerGroup:
    """Start workers in processes of this machine.

    Call it from a thread that lives as long as they are to: Linux kills them when it ends.

    Args:
        path: `module:Class` of the worker (`host`).
        kwargs: what each is made with, beside its rank.
        environment: variables for them, over this process's own.
        stall_timeout_s: how long a call may be under way without progress.
        devices: `RankInfo.device_index` by rank; by default the CPU.
        start_timeout_s: how long the workers may take to be made.

    Raises:
        WorkerError, WinnowError: one cannot be made; no process is left.
    """
    if not hasattr(os, "memfd_create"):
        raise WinnowError("workers in processes of their own need Linux; use cluster=local there")
    port = free_port(_THIS_MACHINE)
    variables = merged_environment(environment or {})
    links: list[tuple[LocalConnection, LogReceiver]] = []
    try:
        for rank in range(size):
            listener = LogReceiver(role, rank)
            link = await LocalConnection.start("winnow.workers.child", variables, listener.follow)
            links.append((link, listener))
    except BaseException:
        await WorkerGroup(role, links, pack, stall_timeout_s).close()
        raise
    group = WorkerGroup(role, links, pack, stall_timeout_s, start_timeout_s=start_timeout_s)
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

        async def all_of_them() -> list[WorkerGroup | BaseException]:
            groups = await asyncio.gather(*starting, return_exceptions=True)
            self._groups += [each for each in groups if isinstance(each, WorkerGroup)]
            return groups

        started = []
        for each in self.wait(all_of_them()):
            if isinstance(each, BaseException):
                raise each
            started.append(each)
        return started

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Have the loop do some work, and wait for its result."""
        return _wait(work, self._loop)

    def close(self) -> None:
        """End all groups; a second time does nothing."""
        if self._loop.is_closed():
            return
        try:
            for group in reversed(self._groups):
                group.end()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _wait(work: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop) -> _T:
    """Have the loop of another thread do some work, and wait for its result."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:  # such as Ctrl-C, while it goes on
        future.cancel()
        raise
