"""Workers in Ray actors, on the nodes that a layout's pools were given (`session.reserve`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from winnow.errors import WorkerError
from winnow.workers.array_refs import SplitResult
from winnow.workers.group import START_TIMEOUT_S, WorkerGroup
from winnow.workers.host import (
    Call,
    CallFailure,
    CallResult,
    Outcome,
    WorkerJob,
    merged_environment,
)
from winnow.workers.logs import LogReceiver
from winnow.workers.protocol import OnLog, RankInfo
from winnow.workers.ray.session import Placement, ray_module
from winnow.workers.ray.wire import RayHandle, pack
from winnow.workers.ray.worker import Place, RayWorker, process_namespace

log = logging.getLogger(__name__)

_CALLS_AT_ONCE = 1000
_COLOUR = re.compile(r"\x1b\[\d*m")
_ASKED_S = 1.0
"""Seconds for a process to end as Ray ends one, which asks it."""
_DETAIL_S = 2.0
"""Seconds for Ray to say how an actor died."""


async def start_ray(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    placement: Placement,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    on_log: OnLog | None = None,
) -> WorkerGroup:
    """Start workers in actors of the Ray that this process is connected to.

    Args:
        path: `module:Class` of the worker (`protocol`); importable on the nodes.
        kwargs: what each is made with, beside its rank.
        environment: variables for them, over this process's own.
        stall_timeout_s: how long a call may be under way without progress.
        on_log: gets their lines; by default they go to this process's logging.

    Raises:
        WorkerError, WinnowError: one cannot be made; no process is left.
    """
    listeners = [LogReceiver(role, rank, on_log) for rank in range(placement.size)]
    switchboard = await _Switchboard.open(listeners)
    actors: list[Any] = []
    links: list[RayConnection] = []
    try:
        for rank in range(placement.size):
            options = _options(placement, rank, merged_environment(environment or {}))
            actor_class = ray_module().remote(RayWorker).options(**options)
            actors.append(actor_class.remote(switchboard.address, switchboard.tokens[rank]))
        for rank, actor in enumerate(actors):
            links.append(RayConnection(actor, await _place(role, rank, actor), listeners[rank]))
    except BaseException:
        for actor in actors:
            ray_module().kill(actor)
        for link in links:
            await link.gone(_DETAIL_S)
            await link.release()
        switchboard.close()
        raise
    first = links[0].place
    device = 0 if placement.share.devices else None  # of those that Ray lets the process see
    size, address = placement.size, (first.address, first.free_port)
    infos = [RankInfo(rank, size, *address, device) for rank in range(size)]
    pairs = list(zip(links, listeners, strict=True))
    # The store pays where several read: it takes a millisecond, more than all the rest of a call.
    send = _for_all if placement.size > 1 else pack
    group = WorkerGroup(role, pairs, send, stall_timeout_s, switchboard.close)
    await group.start(path, kwargs, infos)
    return group


def _options(placement: Placement, rank: int, variables: dict[str, str]) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": placement.share.cpus,
        "num_gpus": placement.share.devices,
        "max_concurrency": _CALLS_AT_ONCE,
        "max_restarts": 0,
        "runtime_env": {"env_vars": variables},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=placement.group,
            placement_group_bundle_index=placement.first + rank,
        ),
    }


async def _place(role: str, rank: int, actor: Any) -> Place:
    try:
        found = await asyncio.wait_for(actor.connect.remote(), START_TIMEOUT_S)
    except TimeoutError:
        line = f"{role}[{rank}] did not start within {START_TIMEOUT_S:g} s; is its node reachable?"
        raise WorkerError(line, role, rank) from None
    except ray_module().exceptions.RayError as error:
        line = f"{role}[{rank}] did not start: {_in_words(error)}"
        raise WorkerError(line, role, rank) from error
    assert isinstance(found, Place)
    return found


def _for_all(asked: WorkerJob | Call) -> Any:
    return ray_module().put(pack(asked))


class _Switchboard:
    """A server to which actors connect to send their logs."""

    def __init__(self, listeners: Sequence[LogReceiver]) -> None:
        self.tokens = [secrets.token_hex(16) for _ in listeners]
        self._listeners = dict(zip(self.tokens, listeners, strict=True))
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ("", 0)

    @classmethod
    async def open(cls, listeners: Sequence[LogReceiver]) -> _Switchboard:
        """Listen at this node's address, for these workers alone."""
        board = cls(listeners)
        host = ray_module().util.get_node_ip_address()
        board._server = await asyncio.start_server(board._connected, host, 0)
        board.address = board._server.sockets[0].getsockname()[:2]
        return board

    def close(self) -> None:
        """Close all connections."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(ValueError, ConnectionError):  # a stranger's long line
            token = (await reader.readline()).decode("ascii", "replace").strip()
            listener = self._listeners.pop(token, None)
            if listener is not None:
                await listener.follow(reader)
        writer.close()


class RayConnection:
    """The driver's end of one actor (`group.WorkerConnection`)."""

    def __init__(self, actor: Any, place: Place, listener: LogReceiver) -> None:
        self._actor, self._listener = actor, listener
        self._call = actor.call.options(num_returns=2)
        self.place = place
        self.pid = place.pid
        self._how: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed = 0.0
        # A process on this machine is watched as such, and killed as such where it does not end
        # when Ray asks it to.
        is_here = place.namespace == process_namespace()
        self._process = os.pidfd_open(place.pid) if is_here else -1

    def send(self, number: int, payload: Any, tell: Callable[[Outcome], None]) -> None:
        """Have a call run."""
        told, kept = self._call.remote(number, payload)
        task = asyncio.get_running_loop().create_task(self._answer(told, kept, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ending(self) -> str | None:
        """Say how the process ended, as far as Ray knows."""
        return self._how or ("died" if self._has_gone() else None)

    def kill(self) -> None:
        """End the process."""
        ray = ray_module()
        if ray.is_initialized():  # a session that is over has ended its processes
            ray.kill(self._actor, no_restart=True)
        self._killed = self._killed or time.monotonic()

    async def gone(self, timeout_s: float) -> bool:
        """Wait until the process has ended, and for a moment until Ray says how."""
        give_up = time.monotonic() + timeout_s
        while not self._has_gone():
            if time.monotonic() > give_up:
                return False
            if self._killed and time.monotonic() > self._killed + _ASKED_S:
                self._kill_by_force()
            await asyncio.sleep(0.005)
        give_up = min(give_up, time.monotonic() + _DETAIL_S)
        while self._tasks and not (self._how or self._killed) and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        return True

    async def release(self) -> None:
        """Close what watches the process."""
        for task in self._tasks:
            task.cancel()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    def _kill_by_force(self) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _has_gone(self) -> bool:
        if self._process >= 0:
            ends = select.poll()
            ends.register(self._process, select.POLLIN)
            return bool(ends.poll(0))
        return self._listener.has_ended.is_set() or self._how is not None

    async def _answer(self, told: Any, kept: Any, tell: Callable[[Outcome], None]) -> None:
        exceptions = ray_module().exceptions
        try:
            outcome: Outcome = await told
            if isinstance(outcome, CallResult) and isinstance(outcome.value, SplitResult):
                handle = RayHandle(kept, self._listener.role, self._listener.rank)
                outcome.value.block.handle = handle
        except exceptions.RayTaskError as error:  # a result that cannot travel
            kept.future().add_done_callback(_seen)  # the same again, which Ray would print
            outcome = CallFailure(_in_words(error.cause or error), _COLOUR.sub("", str(error)))
        except exceptions.RayError as error:
            kept.future().add_done_callback(_seen)
            self._how = f"died ({_in_words(error)})"
            return
        tell(outcome)


def _seen(future: Future[Any]) -> None:
    future.exception()


def _in_words(error: BaseException) -> str:
    """Shorten Ray's many lines about an error to one."""
    text = str(error)
    detail = text.partition("Worker exit detail: ")[2] or text
    detail = detail.partition(" Some common causes include")[0]
    return " ".join(detail.split())[:300]
