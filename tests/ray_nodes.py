"""A Ray cluster of one or several nodes, all of them on this machine, whose workers are forked.

A worker of Ray's would import what it needs for seconds of CPU. Here a node starts
`tests/ray_worker.py`, which asks a process of `tests.forked` for one; that listens at a socket.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import forked, ray_worker, spares

_NODE = {"object_store_memory": 100 << 20, "setup_worker_path": ray_worker.__file__}
_HEAD = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # of the autoscaler
    "_system_config": {
        "health_check_initial_delay_ms": 500,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,  # each has ten seconds, where the node is slow
        "object_manager_pull_timeout_ms": 2000,  # until what lay on a node that is gone is missed
    },
}
_LONGEST_S = 60.0


class RayWorkers:
    """Forks workers for nodes; it ends with the server that it was forked from.

    Args:
        folder: for its socket; the path is to be short.
    """

    def __init__(self, server: forked.Server, folder: Path) -> None:
        self.path = folder / "workers"
        server.start(__name__, [str(self.path)])
        give_up = time.monotonic() + _LONGEST_S
        while not self.path.exists():
            assert time.monotonic() < give_up, "nobody listens for Ray's nodes"
            time.sleep(0.005)

    def node_of(self, worker: int) -> int:
        """The process of the node that a worker belongs to."""
        return int(self.path.with_name(str(worker)).read_text())

    def add_node(self, **offer: Any) -> None:
        """Have another node join the newest cluster."""
        before = signal.getsignal(signal.SIGTERM)
        self.cluster.add_node(**offer, **_NODE)
        signal.signal(signal.SIGTERM, before)

    @contextmanager
    def nodes(self, *nodes: dict[str, Any]) -> Iterator[str]:
        """The address of a cluster.

        Args:
            nodes: what each offers; the first is the head, which cannot be lost.
        """
        head, *more = nodes
        before = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            patch.setenv(ray_worker.PATH, str(self.path))
            from ray.cluster_utils import Cluster

            cluster = self.cluster = Cluster(
                initialize_head=True, head_node_args={**head, **_HEAD, **_NODE}
            )
            try:
                for offer in more:
                    cluster.add_node(**offer, **_NODE)
                signal.signal(signal.SIGTERM, before)
                yield cluster.address
            finally:
                cluster.shutdown()


def main() -> None:
    """Listen at a path until this process is killed; in a fork, be the worker."""
    path, own = Path(sys.argv[1]), os.getpid()
    draft = path.with_suffix(".draft")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(draft))
        door.listen(64)
        draft.rename(path)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            channel, _ = door.accept()
            if os.fork() == 0:
                break
            channel.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spares.be_spare(channel, own, _be_worker)


def _be_worker(node: str, words: Sequence[str]) -> None:
    Path(os.environ[ray_worker.PATH]).with_name(str(os.getpid())).write_text(node)
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")
