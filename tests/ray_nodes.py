"""A Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_STORE = {"object_store_memory": 100 << 20}
_QUICK = {"health_check_period_ms": 1000}
"""A node that is gone is told after seconds, not half a minute; one that is slow has as long."""


@contextmanager
def ray_nodes(*nodes: dict[str, Any]) -> Iterator[str]:
    """The address of a cluster of a head without cores, and of nodes that each offer something."""
    before = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own, for good
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **_STORE}
        head["_system_config"] = _QUICK
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for offer in nodes:
                cluster.add_node(**offer, **_STORE)
            yield cluster.address
        finally:
            cluster.shutdown()
            signal.signal(signal.SIGTERM, before)


def parent_of(pid: int) -> int:
    """The process that started another: of an actor, its node's raylet."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
