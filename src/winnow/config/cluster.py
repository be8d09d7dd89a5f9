"""Where the processes of a run are: ranks that train, engines that write, what scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section


class LocalCluster(Section):
    """On this machine; of several GPUs each process has one of its own."""

    name: Literal["local"] = "local"


class PoolConfig(Section):
    """A pool of slots; each has one worker of every role of the pool, and on GPUs one GPU where one
    of them has a model."""

    nodes: int = Field(1, ge=1)
    """Parts of the pool; each lies on one node."""
    per_node: int = Field(1, ge=1)
    """Slots of each part."""
    cpus: float | None = Field(None, gt=0)
    """Cores that each worker takes; null is cluster.cpus."""


class RolesConfig(Section):
    """The pool of each role that has workers. Roles of one pool are colocated, slot by slot."""

    policy: str | None = None
    """Of the ranks (trainer/strategy=fsdp2), which hold critic and reference, too."""
    rollout: str | None = None
    """Of the engines (rollout.engine.processes)."""
    reward: str | None = None
    """Of what scores (reward.processes)."""


class RayCluster(Section):
    """In actors on a Ray cluster (winnow[ray]); see docs/cluster.md."""

    name: Literal["ray"] = "ray"
    address: str | None = Field(None, min_length=1)
    """auto (this machine's cluster, or the job's), or HOST:PORT; null starts one for the run."""
    nodes: int = Field(1, ge=1)
    """Nodes that the ranks are spread over, as many on each; pools say that themselves."""
    cpus: float = Field(1.0, gt=0)
    """Cores that each worker takes."""
    pools: dict[str, PoolConfig] = Field({})
    """Pools of slots by name; empty gives the ranks one of cluster.nodes, and each engine and each
    process that scores a slot anywhere."""
    roles: RolesConfig = RolesConfig()
    """The pool of each role; all null without pools."""
    environment: dict[str, str] = Field({})
    """Variables of the processes, such as NCCL_DEBUG."""


Cluster = Annotated[LocalCluster | RayCluster, Field(discriminator="name")]
