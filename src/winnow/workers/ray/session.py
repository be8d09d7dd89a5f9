"""A connection to Ray for the length of a block, and reservations on its cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from winnow.errors import ConfigError, WinnowError
from winnow.workers.placement import Bundle, Layout, Node
from winnow.workers.ray.guardian import MARK, SHUT_DOWN

PRIVATE_STORE_BYTES = 512 << 20
_REACH_S = 10.0
_LONGEST_FOLDER = 30
"""Characters: Ray puts sockets under it, whose paths the system allows 107 bytes."""
_NODE_LABEL = "ray.io/node-id"
_LOOK_S = 1.0
"""Seconds between two looks at the nodes while a reservation is awaited."""


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
    store_bytes: int = PRIVATE_STORE_BYTES,
) -> Iterator[None]:
    """Connect to a cluster, or start a small instance that ends with the block, however that ends.

    Call it from the main thread: Linux kills a private instance's processes when the thread ends
    that started them. Where Ray is connected already, as in a task of Ray's, it is left as it is.

    Args:
        address: `auto`, or HOST:PORT; None starts a private instance.
        cpus: that a private instance says it has; by default all.
        devices: likewise accelerators.
        store_bytes: a private instance's shared memory for what is passed around.

    Raises:
        ConfigError: Ray is not installed.
        WinnowError: the cluster cannot be reached, or a private instance does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = ray_module()
    if address is not None and address != "auto":
        _reach(address)
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {
        "address": address or "local",
        "log_to_driver": False,  # lines come by `workers.logs`
        "logging_level": logging.ERROR,
    }
    with contextlib.ExitStack() as after:
        if address is None:
            folder = after.enter_context(_guarded_folder())
            options |= {
                "num_cpus": cpus,
                "num_gpus": devices,
                "include_dashboard": False,
                "object_store_memory": store_bytes,
                "_temp_dir": folder,
                # Without a dashboard nobody can look at them, and they cost part of each call.
                "_system_config": {"task_events_report_interval_ms": 0},
            }
        after.enter_context(_own_handlers())
        after.callback(ray.shutdown)
        try:
            with _own_handlers(), _marked(options.get("_temp_dir")):
                ray.init(**options)
        except Exception as error:
            what = "a private Ray did not start" if address is None else f"no Ray at {address}"
            line = " ".join(str(error).split())
            raise WinnowError(f"cluster.address: {what}: {line[:300]}") from error
        yield


@dataclass(frozen=True)
class Placement:
    """The slots of a group's workers, and the resources that each takes."""

    group: Any
    """Ray's placement group of the pool."""
    size: int
    share: Bundle
    first: int = 0
    """The slot of rank 0; the others' follow."""


class Reserved:
    """A cluster's resources that are held free for a layout's pools, until they are released."""

    def __init__(self, layout: Layout, groups: dict[str, Any]) -> None:
        self._layout, self._groups = layout, groups

    def placement(self, role: str) -> Placement:
        """Place a role's workers: rank r at slot r of its pool."""
        group = self._groups[self._layout.roles[role]]
        return Placement(group, self._layout.size(role), self._layout.share(role))

    def slot(self, role: str, number: int) -> Placement:
        """Place one worker of a role that is a group of its own: at slot `number` of its pool."""
        assert 0 <= number < self._layout.size(role)
        whole = self.placement(role)
        return Placement(whole.group, 1, whole.share, first=number)

    async def is_ready(self, nodes: Set[str], give_up: float) -> bool:
        """Wait until all are held; False when one of the nodes is gone, or the time is up."""
        for group in self._groups.values():
            ready = asyncio.ensure_future(group.ready())
            while not ready.done():
                is_late = time.monotonic() > give_up
                if is_late or not nodes <= {node.name for node in offers()}:
                    ready.cancel()
                    return False
                await asyncio.wait([ready], timeout=_LOOK_S)
            await ready
        return True

    def release(self) -> None:
        """Give them back; a second time does nothing. Workers that are still there are killed."""
        from ray.util import remove_placement_group

        while self._groups:
            remove_placement_group(self._groups.popitem()[1])


def offers() -> list[Node]:
    """List the living nodes of the cluster with all of their resources, in use or not."""
    return [
        Node(
            node["NodeID"],
            Bundle(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)),
        )
        for node in ray_module().nodes()
        if node["Alive"]
    ]


async def reserve(layout: Layout, timeout_s: float = 60.0) -> Reserved:
    """Reserve a layout's pools, each part on one node; other nodes where a chosen one goes.

    Raises:
        ConfigError: the cluster is too small, or has not enough free within the time.
    """
    give_up = time.monotonic() + timeout_s
    while True:
        chosen = layout.assign(offers())
        nodes = {node for names in chosen.values() for node in names}
        reserved = _asked_for(layout, chosen)
        try:
            if await reserved.is_ready(nodes, give_up):
                return reserved
        except BaseException:
            reserved.release()
            raise
        reserved.release()
        if time.monotonic() > give_up:
            raise ConfigError(
                f"the cluster had not enough free for the pools within {timeout_s:g} s; wait for "
                "its other work to end, or make the pools smaller"
            )


def _asked_for(layout: Layout, chosen: Mapping[str, Sequence[str]]) -> Reserved:
    from ray.util import placement_group

    groups = {}
    for pool in layout.pools:
        slot = layout.slot(pool)
        needs = {"CPU": slot.cpus} | ({"GPU": slot.devices} if slot.devices else {})
        groups[pool.name] = placement_group(
            [needs] * pool.slots,
            strategy="PACK",
            bundle_label_selector=[{_NODE_LABEL: node} for node in chosen[pool.name]],
        )
    return Reserved(layout, groups)


def _reach(address: str) -> None:
    """Check that somebody listens there: Ray would wait for minutes, then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ConfigError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise WinnowError(
            f"cluster.address: no Ray at {address}: {error}; see `ray status` on its head"
        ) from error


@contextlib.contextmanager
def _guarded_folder() -> Iterator[str]:
    """Make a folder for a private Ray, and start its guardian, which ends what is left."""
    root = tempfile.gettempdir()
    root = root if len(root) <= _LONGEST_FOLDER else "/tmp"
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
def _marked(folder: str | None) -> Iterator[None]:
    """Mark what is started within the block, and what that starts, as the folder's."""
    if folder is not None:
        os.environ[MARK] = folder
    try:
        yield
    finally:
        os.environ.pop(MARK, None)


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """Put this program's signal handlers back after a block in which Ray sets its own."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
