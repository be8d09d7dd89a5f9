"""Pools of devices: what each role gets, and whether a cluster can hold them."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.errors import ConfigError
from winnow.workers.placement import Bundle, Layout, Node, Pool

POLICY = Pool("policy", 2, 4, has_devices=True, cpus=2)
ROLLOUT = Pool("rollout", 1, 4, has_devices=True, cpus=3)
JUDGE = Pool("judge", 1, 2, has_devices=False)


def nodes(*offers: tuple[float, float]) -> list[Node]:
    return [Node(f"n{i}", Bundle(cpus, devices)) for i, (cpus, devices) in enumerate(offers)]


@st.composite
def planted(draw: st.DrawFn) -> tuple[Layout, list[Node]]:
    """Pools, and nodes that were made by putting the pools' parts on them."""
    pools = tuple(
        Pool(
            f"p{i}",
            draw(st.integers(1, 3)),
            draw(st.integers(1, 4)),
            draw(st.booleans()),
            draw(st.sampled_from([0.25, 0.5, 1, 3])),
        )
        for i in range(draw(st.integers(1, 3)))
    )
    roles = {f"r{i}": pool.name for i, pool in enumerate(pools)}
    roles["more"] = draw(st.sampled_from(pools)).name
    layout = Layout(pools, roles)
    count = draw(st.integers(1, 4))
    cpus, devices = [0.0] * count, [0.0] * count
    for pool in pools:
        for _ in range(pool.nodes):
            where = draw(st.integers(0, count - 1))
            cpus[where] += layout.part(pool).cpus
            devices[where] += layout.part(pool).devices
    return layout, nodes(*zip(cpus, devices, strict=True))


def holds(layout: Layout, offers: list[Node], chosen: dict[str, list[str]]) -> bool:
    """Whether no node has more than it offers."""
    for node in offers:
        counts = {pool.name: chosen[pool.name].count(node.name) for pool in layout.pools}
        slots = [(layout.slot(pool), counts[pool.name]) for pool in layout.pools]
        if sum(slot.devices * n for slot, n in slots) > node.offer.devices:
            return False
        if sum(slot.cpus * n for slot, n in slots) > node.offer.cpus + 1e-9:
            return False
    return True


@given(planted())
def test_pools_that_fit_are_given_nodes_part_by_part(case: tuple[Layout, list[Node]]) -> None:
    layout, offers = case
    chosen = layout.assign(offers)
    assert holds(layout, offers, chosen)
    for pool in layout.pools:
        places = chosen[pool.name]
        assert len(places) == pool.slots
        parts = [places[i : i + pool.per_node] for i in range(0, pool.slots, pool.per_node)]
        assert all(len(set(part)) == 1 for part in parts)


@given(planted(), st.integers(0, 3), st.sampled_from(["cpus", "devices"]))
def test_pools_are_refused_only_where_nothing_holds_them(
    case: tuple[Layout, list[Node]], which: int, what: str
) -> None:
    layout, offers = case
    node = offers[which % len(offers)]
    less = {"cpus": node.offer.cpus, "devices": node.offer.devices}
    less[what] = max(0, less[what] - 1)
    offers = [Node(n.name, Bundle(**less)) if n is node else n for n in offers]
    parts = [pool for pool in layout.pools for _ in range(pool.nodes)]
    ways = itertools.product(offers, repeat=len(parts))
    if len(offers) ** len(parts) > 5000:
        ways = itertools.islice(ways, 0)

    def slots(way: tuple[Node, ...]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {pool.name: [] for pool in layout.pools}
        for pool, there in zip(parts, way, strict=True):
            found[pool.name] += [there.name] * pool.per_node
        return found

    exists = any(holds(layout, offers, slots(way)) for way in ways)
    try:
        assert holds(layout, offers, layout.assign(offers))
    except ConfigError:
        assert not exists


@given(planted())
def test_the_workers_of_a_slot_take_it_whole(case: tuple[Layout, list[Node]]) -> None:
    layout, _ = case
    for pool in layout.pools:
        shares = [layout.share(role) for role, name in layout.roles.items() if name == pool.name]
        assert sum(share.devices for share in shares) == pytest.approx(float(pool.has_devices))
        assert sum(share.cpus for share in shares) == pytest.approx(layout.slot(pool).cpus)
    assert all(layout.size(role) == layout.pool_of(role).slots for role in layout.roles)


def test_separate_pools_share_a_large_node() -> None:
    roles = {"policy": "policy", "critic": "policy", "engine": "rollout", "reward": "judge"}
    layout = Layout((POLICY, ROLLOUT, JUDGE), roles)
    assert layout.share("critic") == Bundle(2, 0.5)
    assert layout.share("engine") == Bundle(3, 1)
    assert layout.share("reward") == Bundle(1, 0)
    chosen = layout.assign(nodes((32, 8), (16, 4)))
    assert {name: len(places) for name, places in chosen.items()} == {
        "policy": 8,
        "rollout": 4,
        "judge": 2,
    }
    assert Counter(place for name in ("policy", "rollout") for place in chosen[name]) == {
        "n0": 8,
        "n1": 4,
    }


def test_a_greedy_choice_that_fails_is_taken_back() -> None:
    """Parts of 3 and of 2 cores on nodes of 6 and 5: the 3s belong together."""
    layout = Layout((Pool("a", 2, 3, False), Pool("b", 2, 2, False)), {"a": "a", "b": "b"})
    chosen = layout.assign(nodes((6, 0), (4, 0)))
    assert (set(chosen["a"]), set(chosen["b"])) == ({"n0"}, {"n1"})


def test_many_nodes_are_assigned_at_once() -> None:
    pools = (Pool("policy", 64, 8, True, 4), Pool("rollout", 128, 4, True, 4))
    layout = Layout(pools, {"policy": "policy", "rollout": "rollout"})
    assert len(layout.assign(nodes(*[(64, 8)] * 128))["policy"]) == 512
    with pytest.raises(ConfigError, match="cannot hold the pools"):
        layout.assign(nodes(*[(64, 8)] * 127))


def test_a_cluster_that_is_too_small_is_told_what_is_missing() -> None:
    layout = Layout.colocated(POLICY, ["policy", "critic"])
    with pytest.raises(ConfigError) as caught:
        layout.assign(nodes((16, 8), (15, 4)))
    assert str(caught.value) == (
        "the cluster cannot hold the pools, node by node: they need policy 2 x (4 devices and "
        "16 cores); it has 1 x (8 devices and 16 cores), 1 x (4 devices and 15 cores); "
        "make a pool smaller, put roles together, or add nodes"
    )
    with pytest.raises(ConfigError, match="it has no node"):
        layout.assign([])


@pytest.mark.parametrize(
    ("pools", "roles", "told"),
    [
        ((POLICY,), {"policy": "polcy"}, "pool policy has no role"),
        ((POLICY,), {"policy": "policy", "x": "y"}, r"role x: no pool is named 'y'"),
        ((POLICY, POLICY), {"policy": "policy"}, "pool policy is given twice"),
        ((Pool("a", 0, 1, False),), {"a": "a"}, "pool a needs at least 1 node of 1 worker"),
        ((Pool("a", 1, 1, False, 0),), {"a": "a"}, "pool a: cpus must be above 0, got 0"),
    ],
)
def test_layouts_that_mean_nothing_are_refused(
    pools: tuple[Pool, ...], roles: dict[str, str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        Layout(pools, roles)
