"""Workers in Ray actors, on the slots that were reserved for them (`session.reserve`).

A worker's process is an actor of `RayWorker`; `RayConnection` is the driver's end of it. Calls and
results travel by Ray's own means, a call to several ranks by way of the object store. What a worker
logs and prints goes to the driver by a separate connection (`logs`), not by Ray's log files.
Arrays that a worker keeps stay in the object store of its node; a `RayHandle` travels in their
stead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from winnow.errors import WorkerError
from winnow.workers.array_refs import SplitResult
from winnow.workers.group import START_TIMEOUT_S, WorkerGroup
from winnow.workers.host import Call, CallFailure, Host, WorkerSpec, free_port, worker_environment
from winnow.workers.logs import LogReceiver, LogSender
from winnow.workers.ray.session import Placement, ray_module
from winnow.workers.threads import spawn

_CALLS_AT_ONCE = 1000
_CONNECT_S = 60.0
_COLOUR = re.compile(r"\x1b\[\d*m")
_EXIT_GRACE_S = 1.0
"""Seconds for a process to end after Ray has requested it."""
_DETAIL_S = 2.0
"""Seconds for Ray to say how an actor died."""


async def start_ray(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    placement: Placement,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    nsight: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Start workers in actors of the Ray that this process is connected to.

    Args:
        path: `module:Class` of the worker (`host`); importable on the nodes.
        kwargs: what each is made with, besides its rank.
        environment: variables for them, over this process's own.
        stall_timeout_s: how long a call may be under way without progress.
        nsight: options of `nsys profile`, under which they run then.

    Raises:
        WorkerError, WinnowError: one cannot be made; no process is left.
    """
    listeners = [LogReceiver(role, rank) for rank in range(len(placement.slots))]
    logs = await _LogServer.open(listeners)
    actors: list[Any] = []
    connections: list[tuple[RayConnection, LogReceiver]] = []
    # The store pays where several read: it takes a millisecond, more than all the rest of a call.
    pack = ray_module().put if len(listeners) > 1 else lambda request: request
    try:
        for rank, token in enumerate(logs.tokens):
            options = _actor_options(placement, rank, worker_environment(environment or {}), nsight)
            actor_class = ray_module().remote(RayWorker).options(**options)
            actors.append(actor_class.remote(logs.address, token))
        for listener, actor in zip(listeners, actors, strict=True):
            connections.append(
                (RayConnection(actor, await _connect_actor(listener, actor), listener), listener)
            )
    except BaseException:
        for actor in actors:
            ray_module().kill(actor)
        await WorkerGroup(role, connections, pack, stall_timeout_s, logs.close).close()
        raise
    group = WorkerGroup(role, connections, pack, stall_timeout_s, logs.close)
    first = connections[0][0].place
    device = (
        0 if placement.worker_resources.get("GPU") else None
    )  # of those that Ray lets the process see
    master = first.address, first.free_port
    await group.start(path, kwargs, master, [device] * len(connections), partial(RayStore, role))
    return group


def _actor_options(
    placement: Placement,
    rank: int,
    variables: dict[str, str],
    nsight: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, index = placement.slots[rank]
    return {
        "num_cpus": placement.worker_resources["CPU"],
        "num_gpus": placement.worker_resources.get("GPU", 0),
        "max_concurrency": _CALLS_AT_ONCE,
        "max_restarts": 0,
        "runtime_env": {"env_vars": variables, **({"nsight": dict(nsight)} if nsight else {})},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }


async def _connect_actor(worker: LogReceiver, actor: Any) -> ActorProcess:
    name = f"{worker.role}[{worker.rank}]"
    try:
        place = await asyncio.wait_for(actor.connect.remote(), START_TIMEOUT_S)
    except TimeoutError:
        line = f"{name} did not start within {START_TIMEOUT_S:g} s; is its node reachable?"
        raise WorkerError(line, worker.role, worker.rank) from None
    except ray_module().exceptions.RayError as error:
        line = f"{name} did not start: {_shorten_error(error)}"
        raise WorkerError(line, worker.role, worker.rank) from error
    assert isinstance(place, ActorProcess)
    return place


class _LogServer:
    """A server to which actors connect to send their logs."""

    def __init__(self, listeners: Sequence[LogReceiver]) -> None:
        self.tokens = [secrets.token_hex(16) for _ in listeners]
        self._listeners = dict(zip(self.tokens, listeners, strict=True))
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ("", 0)

    @classmethod
    async def open(cls, listeners: Sequence[LogReceiver]) -> _LogServer:
        """Listen at this node's address, for these workers alone."""
        server = cls(listeners)
        host = ray_module().util.get_node_ip_address()
        server._server = await asyncio.start_server(server._on_connection, host, 0)
        server.address = server._server.sockets[0].getsockname()[:2]
        return server

    def close(self) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers.append(writer)
        with contextlib.suppress(ValueError, ConnectionError):  # a stranger's long line
            token = (await reader.readline()).decode("ascii", "replace").strip()
            listener = self._listeners.pop(token, None)
            if listener is not None:
                await listener.follow(reader)
        writer.close()


@dataclass(frozen=True)
class ActorProcess:
    """The process and the node of an actor."""

    pid: int
    namespace: str
    """Names the machine's boot and its space of process ids: two that agree see each other's."""
    address: str
    """The node's, as it reaches the driver."""
    free_port: int


class RayWorker:
    """Hosts one worker; runs in the actor's process.

    Ray delivers calls in any order; they begin in that of their numbers.

    Args:
        driver: host and port at which the driver takes logs.
        token: tells the driver which worker this is; no other process knows it.
    """

    def __init__(self, driver: tuple[str, int], token: str) -> None:
        self._driver, self._token = driver, token
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    async def connect(self) -> ActorProcess:
        """Send what is printed to the driver from now on; returns where this process is.

        Raises:
            OSError: the driver cannot be reached from this node.
        """
        self._stream = socket.create_connection(self._driver, timeout=_CONNECT_S)
        self._stream.settimeout(None)
        self._stream.sendall(f"{self._token}\n".encode())
        sender = LogSender(self._stream.fileno())
        sender.redirect_output()
        self._host = Host(sender, self._is_orphan)
        address = self._stream.getsockname()[0]
        return ActorProcess(os.getpid(), process_namespace(), address, free_port(address))

    async def call(self, number: int, request: WorkerSpec | Call) -> tuple[Any, Any, Any]:
        """Run a call when all before it have begun.

        Returns:
            The outcome, and separately the two blocks that the result may keep here.
        """
        if number != self._next:
            turn = self._early[number] = asyncio.get_running_loop().create_future()
            await turn
        self._next += 1
        if self._next in self._early:
            self._early.pop(self._next).set_result(None)
        outcome = await self._host.handle(request)
        pair = (outcome.block, outcome.extras) if isinstance(outcome, SplitResult) else (None, None)
        return outcome, *(None if block is None else block.pop_arrays() for block in pair)

    def _is_orphan(self) -> bool:
        """Return whether the driver has closed the connection, or is gone."""
        try:
            return self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def process_namespace() -> str:
    """Name the processes that this one can see: the machine's boot, and its namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


class RayConnection:
    """The driver's end of one actor (`group.WorkerConnection`)."""

    def __init__(self, actor: Any, place: ActorProcess, listener: LogReceiver) -> None:
        self._actor, self._listener = actor, listener
        self._call = actor.call.options(num_returns=3)
        self.place = place
        self.pid = place.pid
        self._exit_reason: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed = 0.0
        # A process on this machine is watched as such, and killed as such where it does not end
        # when Ray asks it to: Ray calls it dead before it has ended.
        is_local = place.namespace == process_namespace()
        self._process = os.pidfd_open(place.pid) if is_local else -1

    def send(self, number: int, payload: Any, on_result: Callable[[Any], None]) -> None:
        """Have a call run."""
        ref, *blocks = self._call.remote(number, payload)
        spawn(self._await_result(ref, blocks, on_result), self._tasks)

    def exit_reason(self) -> str | None:
        """Say how the process ended, as far as Ray knows."""
        return self._exit_reason or ("died" if self._has_exited() else None)

    def kill(self) -> None:
        """End the process."""
        ray = ray_module()
        if ray.is_initialized():  # a session that is over has ended its processes
            ray.kill(self._actor, no_restart=True)
        self._killed = self._killed or time.monotonic()

    async def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until the process has ended, and for a moment until Ray says how."""
        give_up = time.monotonic() + timeout_s
        while not self._has_exited():
            if time.monotonic() > give_up:
                return False
            is_overdue = self._killed and time.monotonic() > self._killed + _EXIT_GRACE_S
            if is_overdue and self._process >= 0:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
            await asyncio.sleep(0.005)
        give_up = min(give_up, time.monotonic() + _DETAIL_S)
        while (
            self._tasks and not (self._exit_reason or self._killed) and time.monotonic() < give_up
        ):
            await asyncio.sleep(0.005)
        return True

    async def release(self) -> None:
        """Close what watches the process."""
        for task in self._tasks:
            task.cancel()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _has_exited(self) -> bool:
        if self._process >= 0:
            ends = select.poll()
            ends.register(self._process, select.POLLIN)
            return bool(ends.poll(0))
        return self._listener.has_ended.is_set() or self._exit_reason is not None

    async def _await_result(
        self, ref: Any, blocks: Sequence[Any], on_result: Callable[[Any], None]
    ) -> None:
        exceptions = ray_module().exceptions
        try:
            outcome = await ref
            if isinstance(outcome, SplitResult):
                for block, each in zip((outcome.block, outcome.extras), blocks, strict=True):
                    if block is not None:
                        block.handle = RayHandle(each, self._listener.role, self._listener.rank)
        except exceptions.RayError as error:
            for each in blocks:  # the same again, which Ray would print
                each.future().add_done_callback(lambda future: future.exception())
            if not isinstance(error, exceptions.RayTaskError):
                self._exit_reason = f"died ({_shorten_error(error)})"
                return
            # A result that cannot travel.
            outcome = CallFailure(_shorten_error(error.cause or error), _COLOUR.sub("", str(error)))
        on_result(outcome)


class RayHandle:
    """A `Handle` by a reference of Ray's, which frees the memory when the last one is gone.

    The driver owns what it was returned, so that it outlives the worker; not the worker's node.

    Args:
        role, rank: the worker whose it was.
    """

    def __init__(self, reference: Any, role: str, rank: int) -> None:
        self._reference, self._role, self._rank = reference, role, rank
        self._fetching: Future[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self._reference, self._role, self._rank)

    def prefetch(self) -> None:
        self._start_fetch()

    def get(self) -> Any:
        coming = self._start_fetch()
        try:
            return coming.result()
        except ray_module().exceptions.RayError as error:
            whose = f"{self._role}[{self._rank}]"
            raise WorkerError(
                f"what {whose} wrote is lost, as its node is gone ({type(error).__name__})",
                self._role,
                self._rank,
            ) from error
        finally:
            self._fetching = None  # a future holds what came

    def _start_fetch(self) -> Future[Any]:
        coming = self._fetching  # once: another thread may be done with it
        if coming is None:
            self._fetching = coming = self._reference.future()
        return coming


@dataclass(frozen=True)
class RayStore:
    """A `Store` in the object store of the worker's node."""

    role: str
    rank: int
    """The worker's."""

    def put(self, value: Any) -> RayHandle:
        return RayHandle(ray_module().put(value), self.role, self.rank)

    def clear(self) -> None:
        """Do nothing: Ray frees the memory with the last reference to it."""


def _shorten_error(error: BaseException) -> str:
    """Shorten Ray's many lines about an error to one."""
    text = str(error)
    detail = text.partition("Worker exit detail: ")[2] or text
    detail = detail.partition(" Some common causes include")[0]
    return " ".join(detail.split())[:300]
