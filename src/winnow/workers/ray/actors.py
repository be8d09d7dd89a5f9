"""Workers in Ray actors, on reserved slots (`session.reserve`).

A worker's process is an actor of `RayWorker`; `RayConnection` is the driver's end of it. Calls and
results are sent by Ray, calls to several ranks through the object store. Logs and output are sent
to the driver over a separate connection (`logs`), not to Ray's log files. Arrays that a worker
stores stay in the object store of its node, and a `RayHandle` is sent instead.
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
import struct
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fcntl import ioctl
from functools import partial
from typing import Any, TypeVar

from winnow.errors import WorkerError
from winnow.observe.usage import label_process
from winnow.workers.array_refs import SplitResult
from winnow.workers.group import START_TIMEOUT_S, WorkerGroup
from winnow.workers.host import Call, CallFailure, Host, WorkerSpec, free_port, worker_environment
from winnow.workers.logs import LogReceiver, LogSender
from winnow.workers.ray.session import Placement, ray_module
from winnow.workers.threads import spawn

_T = TypeVar("_T")
_CALLS_AT_ONCE = 1000
_CONNECT_S = 60.0
_COLOUR = re.compile(r"\x1b\[\d*m")
_GET_ADDRESS = 0x8915
"""The request SIOCGIFADDR of Linux."""
_EXIT_GRACE_S = 1.0
"""Seconds for a process to exit after Ray's kill, before a SIGKILL."""
_UNREACHABLE_S = 120
"""Seconds after which a worker ends whose driver cannot be reached."""
_LOST_NODE = re.compile(r"\bip: (\S+).*its node has died", re.DOTALL)
_DETAIL_S = 2.0
"""Seconds for Ray to report how an actor died."""


async def start_ray(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    placement: Placement,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    nsight: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> WorkerGroup:
    """Start workers in actors of the Ray cluster that this process is connected to.

    Args:
        path: `module:Class` of the worker (`host`); importable on the nodes.
        kwargs: keyword arguments of each, besides its rank.
        environment: variables that override this process's.
        stall_timeout_s: how long a call may take without progress.
        nsight: options of `nsys profile`, if the workers run under it.
        start_timeout_s: how long the creation of workers may take.

    Raises:
        WorkerError, WinnowError: a worker cannot be created; all processes are ended.
    """
    listeners = [LogReceiver(role, rank) for rank in range(len(placement.slots))]
    tokens = [secrets.token_hex(16) for _ in listeners]
    address, close_logs = await _serve_logs(dict(zip(tokens, listeners, strict=True)))
    # The object store pays off for several readers: a put takes longer than the rest of a call.
    pack = ray_module().put if len(listeners) > 1 else lambda request: request
    actors: list[Any] = []
    profiling = {"nsight": dict(nsight)} if nsight else {}
    group = WorkerGroup(role, pack, stall_timeout_s, close_logs, start_timeout_s)
    try:
        async with group.closed_on_error():
            for rank, token in enumerate(tokens):
                shown = _visible_devices(placement, rank)
                devices = await _within(start_timeout_s, role, rank, shown)
                variables = devices | dict(environment or {})
                options = {
                    **_slot_options(placement, placement.slots[rank]),
                    "max_concurrency": _CALLS_AT_ONCE,
                    "max_restarts": 0,
                    "runtime_env": {"env_vars": worker_environment(variables), **profiling},
                }
                actor_class = ray_module().remote(RayWorker).options(**options)
                actors.append(actor_class.remote(address, token))
            processes = []
            for listener, actor in zip(listeners, actors, strict=True):
                connected = actor.connect.remote()
                place = await _within(start_timeout_s, role, listener.rank, connected)
                assert isinstance(place, ActorProcess)
                processes.append(place)
                group.add(RayConnection(actor, processes[-1], listener), listener)
            device = 0 if placement.worker_resources.get("GPU") else None  # of the visible ones
            master = processes[0].address, processes[0].free_port
            store = partial(RayStore, role)
            await group.start(path, kwargs, master, [device] * len(actors), store)
    except BaseException:
        for actor in actors:
            ray_module().kill(actor)
        raise
    return group


def _slot_options(placement: Placement, slot: tuple[Any, int]) -> dict[str, Any]:
    """Return Ray's options of an actor or a task on a slot."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, index = slot
    return {
        "num_cpus": placement.worker_resources["CPU"],
        "num_gpus": placement.worker_resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }


async def _visible_devices(placement: Placement, rank: int) -> dict[str, str]:
    """Return variables that show a worker the devices of all its slots, of which Ray shows one."""
    if placement.span == 1 or not placement.worker_resources.get("GPU"):
        return {}
    group, first = placement.slots[rank]
    task, names = ray_module().remote(_slot_devices), list[str]()
    for index in range(first, first + placement.span):
        names += await task.options(**_slot_options(placement, (group, index))).remote()
    # Without the first variable Ray would overwrite the second.
    keep = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    return {keep: "1", "CUDA_VISIBLE_DEVICES": ",".join(names)}


def _slot_devices() -> list[str]:
    """Return the devices that Ray has given to this task."""
    names: list[str] = ray_module().get_runtime_context().get_accelerator_ids()["GPU"]
    return names


async def _within(timeout_s: float, role: str, rank: int, started: Awaitable[_T]) -> _T:
    """Wait for a part of the start of a worker.

    Raises:
        WorkerError: it takes too long, or Ray cannot do it.
    """
    name = f"{role}[{rank}]"
    try:
        return await asyncio.wait_for(started, timeout_s)
    except TimeoutError:
        line = (
            f"{name} did not start within cluster.start_timeout_s={timeout_s:g} s; raise it, or "
            "check that its node is reachable"
        )
        raise WorkerError(line, role, rank) from None
    except ray_module().exceptions.RayError as error:
        line = f"{name} did not start: {_shorten_error(error)}"
        raise WorkerError(line, role, rank) from error


async def _serve_logs(
    receivers: dict[str, LogReceiver],
) -> tuple[tuple[str, int], Callable[[], None]]:
    """Listen on this node for the logs of actors.

    Args:
        receivers: by the token that an actor sends first.

    Returns:
        Host and port, and a function that closes all connections.
    """
    writers: list[asyncio.StreamWriter] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ValueError, ConnectionError):  # a long line of another client
            token = (await reader.readline()).decode("ascii", "replace").strip()
            receiver = receivers.pop(token, None)
            if receiver is not None:
                await receiver.follow(reader)
        writer.close()

    def close() -> None:
        server.close()
        for writer in writers:
            writer.close()

    host = ray_module().util.get_node_ip_address()
    server = await asyncio.start_server(on_connection, host, 0)
    return server.sockets[0].getsockname()[:2], close


@dataclass(frozen=True)
class ActorProcess:
    """The process and the node of an actor."""

    pid: int
    namespace: str
    """The machine's boot and its PID namespace: processes with the same one see each other."""
    address: str
    """The node's address on its route to the driver."""
    free_port: int


class RayWorker:
    """Hosts one worker; runs in the actor's process.

    Ray delivers calls in any order; they start in the order of their numbers.

    Args:
        driver: host and port of the driver's log server.
        token: identifies the worker to the log server, and is secret.
    """

    def __init__(self, driver: tuple[str, int], token: str) -> None:
        self._driver, self._token = driver, token
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    async def connect(self) -> ActorProcess:
        """Redirect the output to the driver; return the process and its node.

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
        # An unreachable driver closes no connection: this worker ends some time after Ray has given
        # up its node, and frees its device. So does one whose driver stands still for so long.
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            self._stream.setsockopt(socket.IPPROTO_TCP, option, _UNREACHABLE_S // 4)
        limit_ms = _UNREACHABLE_S * 1000
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
        if interface := interface_of(address):
            # By default gloo listens on the address of the machine's name, often a loopback's.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        return ActorProcess(os.getpid(), process_namespace(), address, free_port(address))

    async def call(self, number: int, request: WorkerSpec | Call) -> tuple[Any, Any, Any]:
        """Run a call after all earlier ones have started.

        Returns:
            The result, and the arrays of its two blocks, which Ray keeps on this node.
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
        """Return whether the driver has closed the connection or exited."""
        try:
            return self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def interface_of(address: str) -> str | None:
    """Return the network interface whose IPv4 address this is; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address, or was removed
                request = struct.pack("256s", name.encode())
                if socket.inet_ntoa(ioctl(probe, _GET_ADDRESS, request)[20:24]) == address:
                    return name
    return None


def process_namespace() -> str:
    """Return an id of the machine's boot and this process's PID namespace."""
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
        # Ray reports an actor as dead before its process exits. One on this machine is watched,
        # and killed if it does not exit.
        is_local = place.namespace == process_namespace()
        self._process = os.pidfd_open(place.pid) if is_local else -1
        if is_local:
            label_process(place.pid, listener.role)

    def send(self, number: int, payload: Any, on_result: Callable[[Any], None]) -> None:
        """Send a call."""
        ref, *blocks = self._call.remote(number, payload)
        spawn(self._await_result(ref, blocks, on_result), self._tasks)

    def exit_reason(self) -> str | None:
        """Return how the process ended, as far as Ray knows."""
        return self._exit_reason or ("died" if self._has_exited() else None)

    def kill(self) -> None:
        """End the process."""
        ray = ray_module()
        if ray.is_initialized():  # else the session has ended its processes
            ray.kill(self._actor, no_restart=True)
        self._killed = self._killed or time.monotonic()

    async def wait_for_exit(self, timeout_s: float) -> bool:
        """Wait until the process has exited, and shortly for Ray to report how."""
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
        """Close the pidfd, and cancel pending calls."""
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
            for each in blocks:  # they have the same error, which Ray would print
                each.future().add_done_callback(lambda future: future.exception())
            if not isinstance(error, exceptions.RayTaskError):
                self._exit_reason = f"died ({_shorten_error(error)})"
                return
            # A result that cannot be pickled.
            outcome = CallFailure(_shorten_error(error.cause or error), _COLOUR.sub("", str(error)))
        on_result(outcome)


class RayHandle:
    """A `Handle` with a reference of Ray's, which frees the memory after the last reference.

    The driver owns results of calls, so that they outlive the worker, but not the worker's node.

    Args:
        role, rank: the worker that stored the value.
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
            name, reason = f"{self._role}[{self._rank}]", type(error).__name__
            line = f"data of {name} is lost: its node is gone ({reason})"
            raise WorkerError(line, self._role, self._rank) from error
        finally:
            self._fetching = None  # the future refers to the value

    def _start_fetch(self) -> Future[Any]:
        coming = self._fetching  # read once: another thread may reset it
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
    """Return Ray's message about an error in one line."""
    text = str(error)
    if lost := _LOST_NODE.search(text):
        return f"its node {lost[1]} has ended or cannot be reached; see `ray status`"
    detail = text.partition("Worker exit detail: ")[2] or text
    detail = detail.partition(" Some common causes include")[0]
    return " ".join(detail.split())[:300]
