"""Pools, roles and nodes as data: the workers that share devices, and room for them in a cluster.

A pool is `nodes` parts of `per_node` slots; a part lies on one node. A slot has one worker of each
role of the pool, so that roles of one pool share devices (colocated), and roles of different pools
do not. Nothing here knows Ray; `ray.session` reserves what is worked out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from winnow.errors import ConfigError

_CENT = 100
"""Cores are compared in hundredths, as whole numbers."""


@dataclass(frozen=True)
class Pool:
    """Slots for workers. Example: 2 nodes of 8 devices, `Pool("policy", 2, 8, True, cpus=4)`."""

    name: str
    nodes: int
    per_node: int
    has_devices: bool
    """Each slot is one accelerator; otherwise cores alone."""
    cpus: float = 1.0
    """Cores of each worker."""

    @property
    def slots(self) -> int:
        """The number of ranks of each of its roles."""
        return self.nodes * self.per_node


@dataclass(frozen=True)
class Bundle:
    """Resources that lie on one node."""

    cpus: float
    devices: float

    def __str__(self) -> str:
        """Say `4 devices and 8 cores`."""
        cores = f"{self.cpus:g} core{'' if self.cpus == 1 else 's'}"
        devices = f"{self.devices:g} device{'' if self.devices == 1 else 's'}"
        return f"{devices} and {cores}" if self.devices else cores


@dataclass(frozen=True)
class Node:
    """A node of a cluster, and the resources that it offers."""

    name: str
    offer: Bundle


@dataclass(frozen=True)
class Layout:
    """Pools, and the pool of each role.

    Raises:
        ConfigError: a pool is empty, named twice or has no role, or a role's pool is not there.
    """

    pools: tuple[Pool, ...]
    roles: Mapping[str, str]
    """From a role to its pool's name."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        for pool in self.pools:
            if pool.nodes < 1 or pool.per_node < 1:
                size = f"{pool.nodes} nodes of {pool.per_node}"
                raise ConfigError(f"pool {pool.name} needs at least 1 node of 1 worker, got {size}")
            if not pool.cpus > 0:
                raise ConfigError(f"pool {pool.name}: cpus must be above 0, got {pool.cpus:g}")
            if names.count(pool.name) > 1:
                raise ConfigError(f"pool {pool.name} is given twice; give each a name of its own")
            if pool.name not in self.roles.values():
                raise ConfigError(f"pool {pool.name} has no role; give it one, or leave it out")
        for role, name in self.roles.items():
            if name not in names:
                raise ConfigError(f"role {role}: no pool is named {name!r}, only {sorted(names)}")

    @classmethod
    def colocated(cls, pool: Pool, roles: Sequence[str]) -> Layout:
        """Put all roles in one pool."""
        return cls((pool,), dict.fromkeys(roles, pool.name))

    def pool_of(self, role: str) -> Pool:
        """Return the pool of a role."""
        return next(pool for pool in self.pools if pool.name == self.roles[role])

    def size(self, role: str) -> int:
        """Count a role's workers."""
        return self.pool_of(role).slots

    def share(self, role: str) -> Bundle:
        """Return the part of its slot that one worker of a role takes."""
        pool = self.pool_of(role)
        return Bundle(pool.cpus, 1 / self._roles_in(pool) if pool.has_devices else 0.0)

    def slot(self, pool: Pool) -> Bundle:
        """Return the needs of one slot, which has a worker of each role."""
        return Bundle(pool.cpus * self._roles_in(pool), 1.0 if pool.has_devices else 0.0)

    def part(self, pool: Pool) -> Bundle:
        """Return the needs of a part of a pool, which lies on one node."""
        slot = self.slot(pool)
        return Bundle(slot.cpus * pool.per_node, slot.devices * pool.per_node)

    def assign(self, nodes: Sequence[Node]) -> dict[str, list[str]]:
        """Choose the node of each slot, by pool; slots of one part follow each other.

        Finds a way if there is one; parts may share a node.

        Raises:
            ConfigError: these nodes cannot hold the pools.
        """
        parts = [pool for pool in self.pools for _ in range(pool.nodes)]
        parts.sort(key=lambda pool: _whole(self.part(pool)), reverse=True)
        found = _packed([_whole(self.part(p)) for p in parts], [_whole(n.offer) for n in nodes])
        if found is None:
            raise ConfigError(self._too_small(nodes))
        chosen: dict[str, list[str]] = {pool.name: [] for pool in self.pools}
        for pool, index in zip(parts, found, strict=True):
            chosen[pool.name] += [nodes[index].name] * pool.per_node
        return chosen

    def _roles_in(self, pool: Pool) -> int:
        return sum(name == pool.name for name in self.roles.values())

    def _too_small(self, nodes: Sequence[Node]) -> str:
        needs = ", ".join(f"{pool.name} {pool.nodes} x ({self.part(pool)})" for pool in self.pools)
        kinds: dict[str, int] = {}
        for node in nodes:
            kinds[str(node.offer)] = kinds.get(str(node.offer), 0) + 1
        offers = ", ".join(f"{count} x ({kind})" for kind, count in kinds.items()) or "no node"
        return (
            f"the cluster cannot hold the pools, node by node: they need {needs}; it has {offers}; "
            "make a pool smaller, put roles together, or add nodes"
        )


def _whole(bundle: Bundle) -> tuple[int, int]:
    """Count devices and cores in hundredths, whose sums are exact."""
    return round(bundle.devices * _CENT), round(bundle.cpus * _CENT)


def _packed(items: list[tuple[int, int]], bins: list[tuple[int, int]]) -> list[int] | None:
    """Choose the index of each item's bin; None where they do not fit. Items: largest first."""
    left = list(bins)
    chosen: list[int] = []
    hopeless: set[tuple[int, tuple[tuple[int, int], ...]]] = set()

    def fits(item: int) -> bool:
        if item == len(items):
            return True
        state = item, tuple(sorted(left))
        if state in hopeless:
            return False
        devices, cpus = items[item]
        # The tightest first; of bins with as much left, one stands for all.
        for space in sorted(set(left)):
            if space[0] >= devices and space[1] >= cpus:
                index = left.index(space)
                left[index] = space[0] - devices, space[1] - cpus
                chosen.append(index)
                if fits(item + 1):
                    return True
                chosen.pop()
                left[index] = space
        hopeless.add(state)
        return False

    enough = all(sum(i[k] for i in items) <= sum(b[k] for b in bins) for k in (0, 1))
    return chosen if enough and fits(0) else None
