"""A connection to Ray for the length of a block, and pools of slots reserved on its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import write_atomic
from winnow.workers.ray.guardian import MARK, SHUT_DOWN

log = logging.getLogger(__name__)

_REACH_S = 10.0
_LOST = 2
"""Ray's NodeDeathInfo.UNEXPECTED_TERMINATION."""
_LONGEST_FOLDER = 30
"""Characters: Ray has sockets in it, whose paths have at most 107 bytes."""


def ray_module() -> Any:
    """Import the module `ray`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        message = "cluster=ray needs Ray; install it: pip install 'winnow-rl[ray]'"
        raise ConfigError(message) from None


@contextlib.contextmanager
def ray_session(
    address: str | None,
    *,
    cpus: int | None = None,
    devices: int | None = None,
    store_bytes: int = 512 << 20,
    temp_dir: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    has_timeline: bool = False,
) -> Iterator[None]:
    """Connect to a cluster, or start a private instance that ends with the block.

    Call it from the main thread, whose end kills a private instance. A connected Ray is used.

    Args:
        address: `auto`, or HOST:PORT; None starts a private instance.
        cpus: number of CPUs of a private instance; by default all.
        devices: number of accelerators of a private instance; by default all.
        store_bytes: object store memory of a private instance.
        temp_dir: parent of a private instance's folder.
        runtime_env: Ray's, for all actors of the connection; its folders are copied to the nodes.
        has_timeline: record the tasks of a private instance, for `write_timeline`.

    Raises:
        ConfigError: Ray is not installed, or cannot use `runtime_env` or `temp_dir`.
        WinnowError: the cluster cannot be reached, or a private instance does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = ray_module()
    if address is not None and address != "auto":
        _check_reachable(address)
    if ray.is_initialized():
        if runtime_env:
            raise ConfigError(
                f"cluster.runtime_env has {', '.join(runtime_env)}, but this process is connected "
                "to Ray already; pass them to its ray.init"
            )
        yield
        return
    options: dict[str, Any] = {"address": address or "local", "logging_level": logging.ERROR}
    options["log_to_driver"] = False  # `workers.logs` does that
    with contextlib.ExitStack() as after:
        if address is None:
            folder = after.enter_context(_guarded_folder(temp_dir))
            options |= {
                "num_cpus": cpus,
                "num_gpus": devices,
                "include_dashboard": False,
                "object_store_memory": store_bytes,
                "_temp_dir": folder,
            }
            if not has_timeline:
                # Only the dashboard shows task events, and they slow down each call.
                options["_system_config"] = {"task_events_report_interval_ms": 0}
        after.callback(ray.shutdown)
        try:
            options["runtime_env"] = dict(ray.runtime_env.RuntimeEnv(**runtime_env or {}))
            with _marked_start(options.get("_temp_dir")):
                ray.init(**options)
        except Exception as error:
            what = (
                "the private Ray instance did not start"
                if address is None
                else f"no Ray at {address}"
            )
            line = " ".join(str(error).split())[:300]
            if runtime_env and isinstance(error, ValueError | TypeError):
                raise ConfigError(f"cluster.runtime_env: {line}") from error
            raise WinnowError(f"cluster.address: {what}: {line}") from error
        yield


def write_timeline(path: Path) -> None:
    """Write Ray's timeline of all tasks, for chrome://tracing; log a warning if that fails."""
    ray = ray_module()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(ray.timeline()).encode())
    except (OSError, RuntimeError, WinnowError, ray.exceptions.RayError) as error:
        log.warning("cluster.timeline_file: cannot write the timeline: %s", error)


Resources = dict[str, float]
"""As Ray names them. Example: `{"CPU": 4.0, "GPU": 1.0}`."""


@dataclass(frozen=True)
class Pool:
    """Slots for workers: `nodes` parts, each of `per_node` slots on one node.

    A slot has one worker of each role of the pool; they share its devices (are colocated). Roles of
    two pools share nothing. Example: `Pool("policy", {"policy": 1}, 2, 8, 1, cpus=4)`.
    """

    name: str
    roles: Mapping[str, int]
    """By role, the slots of one worker: an engine over several GPUs may take several."""
    nodes: int = 1
    per_node: int = 1
    devices: int = 0
    """Accelerators of each slot; 0 for CPUs only."""
    cpus: float = 1.0
    """Cores of each worker."""

    @property
    def worker_resources(self) -> Resources:
        """The part of its slot that one worker takes."""
        device = {"GPU": self.devices / len(self.roles)} if self.devices else {}
        return {"CPU": self.cpus, **device}

    def resources(self, slots: int) -> Resources:
        """Return the resources of a number of slots."""
        devices = {"GPU": float(self.devices * slots)} if self.devices else {}
        return {"CPU": self.cpus * len(self.roles) * slots, **devices}


@dataclass(frozen=True)
class Placement:
    """The slots of a group's workers, and the resources of each worker."""

    slots: Sequence[tuple[Any, int]]
    """By rank: Ray's placement group and the index of the bundle."""
    worker_resources: Resources
    span: int = 1
    """Slots from that one on whose devices a worker sees."""


class Reservation:
    """Resources of a cluster that are reserved for pools until they are released.

    Args:
        parts: by pool, Ray's placement group of each part.
    """

    def __init__(self, pools: Sequence[Pool], parts: dict[str, list[Any]]) -> None:
        self._pools, self._parts = pools, parts

    def placement(self, role: str, number: int | None = None) -> Placement:
        """Return the first slot of each of a role's workers, or only of worker `number`."""
        pool = next(pool for pool in self._pools if role in pool.roles)
        slots = [(part, i) for part in self._parts[pool.name] for i in range(pool.per_node)]
        span = pool.roles[role]
        firsts = range(0, len(slots), span) if number is None else [number * span]
        return Placement([slots[i] for i in firsts], pool.worker_resources, span)

    def release(self) -> None:
        """Free the resources, and kill remaining workers. May be called twice."""
        from ray.util import remove_placement_group

        while self._parts:
            for part in self._parts.popitem()[1]:
                remove_placement_group(part)


def node_resources() -> dict[str, Resources]:
    """Return the total resources of the cluster's live nodes, by node id."""
    return {
        node["NodeID"]: {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")}
        for node in ray_module().nodes()
        if node["Alive"]
    }


async def reserve(
    pools: Sequence[Pool], timeout_s: float = 60.0, lost_timeout_s: float = 0.0
) -> Reservation:
    """Reserve pools, each part on one node, the largest part first.

    The node with the least room is a hint for Ray, which keeps parts together; Ray takes another
    one if that is in use or gone.

    Args:
        lost_timeout_s: how long to wait for a node that Ray has lost, if the others do not suffice:
            a supervised run that ended with its node starts before that is back.

    Raises:
        ConfigError: the cluster is too small, or its resources are not free within the timeout.
    """
    from ray.util import placement_group

    spare = await _wait_for_capacity(pools, lost_timeout_s)
    nodes = list(spare.values())
    parts: dict[str, list[Any]] = {pool.name: [] for pool in pools}
    for pool in sorted(pools, key=lambda p: _size_key(p.resources(p.per_node)), reverse=True):
        slots, part = [pool.resources(1)] * pool.per_node, pool.resources(pool.per_node)
        for _ in range(pool.nodes):
            room = [node for node, free in spare.items() if _fits([part], [free])]
            node = min(room, key=lambda node: _size_key(spare[node]), default=None)
            if node is not None:
                spare[node] = {kind: free - part.get(kind, 0) for kind, free in spare[node].items()}
            group = placement_group(slots, strategy="STRICT_PACK", _soft_target_node_id=node)
            parts[pool.name].append(group)
    reserved = Reservation(pools, parts)
    waiting = [part.ready().future() for groups in parts.values() for part in groups]
    try:
        await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, waiting)), timeout_s)
    except TimeoutError:
        reserved.release()
        raise ConfigError(
            f"the cluster had not enough free for the pools within {timeout_s:g} s: "
            f"{_describe_fit(pools, nodes)}; wait for other jobs to end, or make the pools smaller"
        ) from None
    except BaseException:
        reserved.release()
        raise
    return reserved


async def _wait_for_capacity(pools: Sequence[Pool], timeout_s: float) -> dict[str, Resources]:
    """Return `node_resources` once pools fit; wait only if Ray has lost a node of the cluster."""
    give_up, is_waiting = time.monotonic() + timeout_s, False
    while True:
        nodes = node_resources()
        try:
            check_capacity(pools, list(nodes.values()))
        except ConfigError as error:
            lost = [n for n in ray_module().nodes() if n.get("DeathReason") == _LOST]
            if not lost or time.monotonic() > give_up:
                raise
            if not is_waiting:
                log.warning(
                    "Waiting at most %g s (cluster.start_timeout_s): Ray has lost %d of the "
                    "cluster's nodes, and %s",
                    *(timeout_s, len(lost), error),
                )
            is_waiting = True
            await asyncio.sleep(1.0)
        else:
            return nodes


def check_capacity(pools: Sequence[Pool], nodes: Sequence[Resources]) -> None:
    """Refuse pools that do not fit an idle cluster of these nodes.

    Raises:
        ConfigError: no node is large enough for a part, or all parts together are too large.
    """
    needs = [pool.resources(pool.per_node) for pool in pools for _ in range(pool.nodes)]
    has_nodes = all(any(_fits([part], [node]) for node in nodes) for part in needs)
    if not has_nodes or not _fits(needs, nodes):
        raise ConfigError(
            "the pools do not fit the nodes of the cluster: "
            f"{_describe_fit(pools, nodes)}; make a pool smaller, colocate roles, or add nodes"
        )


def _fits(needs: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    def total(parts: Sequence[Resources], kind: str) -> float:
        return sum(part.get(kind, 0.0) for part in parts)

    return all(total(needs, kind) <= total(nodes, kind) + 1e-6 for kind in ("CPU", "GPU"))


def _size_key(resources: Resources) -> tuple[float, float]:
    return resources.get("GPU", 0.0), resources["CPU"]


def _describe_fit(pools: Sequence[Pool], nodes: Sequence[Resources]) -> str:
    """Return `they need policy 2 x (4 devices and 16 cores); it has 1 x (8 devices and 9 cores)`"""
    needs = (f"{p.name} {p.nodes} x ({_format_resources(p.resources(p.per_node))})" for p in pools)
    kinds = Counter(map(_format_resources, nodes))
    offered = ", ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "no node"
    return f"they need {', '.join(needs)}; it has {offered}"


def _format_resources(resources: Resources) -> str:
    named = ((resources.get("GPU"), "device"), (resources["CPU"], "core"))
    amounts = [f"{n:g} {what}{'' if n == 1 else 's'}" for n, what in named if n]
    return " and ".join(amounts) or "no core"


def _check_reachable(address: str) -> None:
    """Refuse an address without a listener: Ray would wait for minutes, then end the process."""
    host, _, port = address.rpartition(":")
    # The system takes a larger port modulo 2**16, and so another listener.
    if not host or not port.isdecimal() or "/" in host or int(port) >= 1 << 16:
        raise ConfigError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise WinnowError(
            f"cluster.address: no Ray at {address}: {error}; see `ray status` on its head node"
        ) from error


@contextlib.contextmanager
def _guarded_folder(root: str | None) -> Iterator[str]:
    """Make a folder for a private Ray, and start its guardian, which kills remaining processes."""
    if root is None:
        root = tempfile.gettempdir()
        root = root if len(root) <= _LONGEST_FOLDER else "/tmp"
    elif len(root := os.path.abspath(root)) > _LONGEST_FOLDER or not os.access(root, os.W_OK):
        raise ConfigError(
            f"cluster.init.temp_dir must be a writable folder with a path of at most "
            f"{_LONGEST_FOLDER} characters (Ray has sockets in it), got {root}"
        )
    folder = tempfile.mkdtemp(prefix="winnow-ray-", dir=root)
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", "winnow.workers.ray.guardian", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        guardian.communicate(SHUT_DOWN)


@contextlib.contextmanager
def _marked_start(folder: str | None) -> Iterator[None]:
    """Set the guardian's variable for what starts in the block, and keep the SIGTERM handler."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if folder is not None:
        os.environ[MARK] = folder
    try:
        yield
    finally:
        os.environ.pop(MARK, None)
        if is_main:  # Ray has replaced it
            signal.signal(signal.SIGTERM, before)
