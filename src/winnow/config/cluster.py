"""Where the processes of a run are: ranks that train, engines that write."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section


class LocalCluster(Section):
    """On this machine."""

    name: Literal["local"] = "local"


class RayCluster(Section):
    """In actors on a Ray cluster (winnow[ray]); see docs/cluster.md."""

    name: Literal["ray"] = "ray"
    address: str | None = Field(None, min_length=1)
    """auto (this machine's cluster, or the job's), or HOST:PORT; null starts one for the run."""
    nodes: int = Field(1, ge=1)
    """Nodes that the ranks are spread over, as many on each."""
    cpus: float = Field(1.0, gt=0)
    """Cores that each process takes."""
    environment: dict[str, str] = Field({})
    """Variables of the processes, such as NCCL_DEBUG."""


Cluster = Annotated[LocalCluster | RayCluster, Field(discriminator="name")]
