"""Rules of processes and where they are: ranks, engines, what scores, pools and roles."""

from __future__ import annotations

from winnow.config.cluster import RayCluster
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2


def workers_of(config: Config) -> dict[str, int]:
    """How many processes each role has beside the run's own; 0: the run's does its work."""
    strategy = config.trainer.strategy
    return {
        "policy": strategy.ranks if isinstance(strategy, Fsdp2) else 0,
        "rollout": config.rollout.engine.processes,
        "reward": config.reward.processes,
    }


_ASKED_BY = {
    "policy": ("trainer.strategy.ranks", "trainer/strategy=fsdp2"),
    "rollout": ("rollout.engine.processes", "rollout.engine.processes=1"),
    "reward": ("reward.processes", "reward.processes=1"),
}
"""Of each role: the key that says how many workers it has, and what gives it some."""


def _something_to_place(c: Config) -> str | None:
    if not isinstance(c.cluster, RayCluster) or any(workers_of(c).values()):
        return None
    return (
        "cluster=ray has nothing to place: trainer/strategy=single, rollout.engine.processes=0 and "
        "reward.processes=0 keep everything in the run's process; set trainer/strategy=fsdp2, "
        "rollout.engine.processes=1 or cluster=local"
    )


def _nodes(c: Config) -> str | None:
    if not isinstance(c.cluster, RayCluster) or c.cluster.nodes == 1:
        return None
    nodes, ranks = c.cluster.nodes, workers_of(c)["policy"]
    if c.cluster.pools:
        return (
            f"cluster.nodes={nodes} spreads ranks where no pools are given, but cluster.pools has "
            f"{', '.join(c.cluster.pools)}; set nodes of the pool, and leave cluster.nodes at 1"
        )
    if ranks % nodes == 0:
        return None
    return (
        f"trainer.strategy.ranks={ranks} cannot be spread over cluster.nodes={nodes}, "
        "as many on each; use a divisor of ranks"
    )


def _pools(c: Config) -> str | None:
    """One line for each role or pool that does not fit."""
    if not isinstance(c.cluster, RayCluster):
        return None
    pools, roles = c.cluster.pools, c.cluster.roles.model_dump()
    if not pools and not any(roles.values()):
        return None
    faults = [_role(c, role, pool) for role, pool in roles.items()]
    faults += [
        f"cluster.pools.{name} has no role; name it in cluster.roles, or leave it out"
        for name in pools
        if name not in roles.values()
    ]
    return "\n".join(fault for fault in faults if fault) or None


def _role(c: Config, role: str, name: str | None) -> str | None:
    assert isinstance(c.cluster, RayCluster)
    pools, workers = c.cluster.pools, workers_of(c)[role]
    asked, gives = _ASKED_BY[role]
    if name is None:
        if not workers:
            return None
        return (
            f"cluster.roles.{role} is null, but {asked}={workers} must be placed, too; "
            f"set cluster.roles.{role} to a pool ({', '.join(pools) or 'add one to cluster.pools'})"
        )
    if name not in pools:
        known = f"has {', '.join(pools)}; name one of them, or" if pools else "is empty;"
        return (
            f"cluster.roles.{role}={name} is no pool: cluster.pools {known} add "
            f"cluster.pools.{name}.per_node={max(workers, 1)}"
        )
    if not workers:
        return (
            f"cluster.roles.{role}={name} has no workers to place; set {gives}, "
            f"or cluster.roles.{role}=null"
        )
    pool = pools[name]
    slots = pool.nodes * pool.per_node
    if slots == workers:
        return None
    return (
        f"{asked}={workers} does not fit cluster.pools.{name}, whose {pool.nodes} nodes x "
        f"{pool.per_node} are {slots} slots for one worker of each of its roles; set {asked}="
        f"{slots}, or change nodes or per_node"
    )


CLUSTER_RULES = (_something_to_place, _nodes, _pools)
