"""Pools of devices: what each worker gets, and whether a cluster could hold them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.errors import ConfigError
from winnow.workers.ray.session import Pool, Resources, check_capacity

POLICY = Pool("policy", {"policy": 1, "critic": 1}, 2, 4, devices=1, cpus=2)
JUDGE = Pool("judge", {"reward": 1}, per_node=2)


def node(cpus: float, devices: float = 0.0) -> Resources:
    return {"CPU": cpus, "GPU": devices}


@given(
    st.lists(
        st.builds(
            Pool,
            st.sampled_from("abc"),
            st.lists(st.sampled_from("wxyz"), min_size=1, max_size=3).map(tuple),
            st.integers(1, 3),
            st.integers(1, 4),
            st.booleans(),
            st.sampled_from([0.25, 0.1, 1, 3]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["CPU", "GPU"]),
)
def test_pools_are_refused_where_a_part_or_all_of_them_do_not_fit(
    pools: list[Pool], kind: str
) -> None:
    parts = [pool.resources(pool.per_node) for pool in pools for _ in range(pool.nodes)]
    check_capacity(pools, parts)
    largest = max(parts, key=lambda part: part.get(kind, 0.0))
    if largest.get(kind, 0.0) > 0:
        less = largest | {kind: largest[kind] - 0.05}
        with pytest.raises(ConfigError, match="do not fit the nodes"):
            check_capacity(pools, [less if part is largest else part for part in parts])
        split = [{name: value / 2 for name, value in part.items()} for part in parts * 2]
        with pytest.raises(ConfigError, match="do not fit the nodes"):
            check_capacity(pools, split)


def test_a_cluster_that_is_too_small_is_told_what_is_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        check_capacity([POLICY], [node(16, 8), node(15, 4)])
    assert str(caught.value) == (
        "the pools do not fit the nodes of the cluster: they need policy 2 x (4 devices and "
        "16 cores); it has 1 x (8 devices and 16 cores), 1 x (4 devices and 15 cores); "
        "make a pool smaller, colocate roles, or add nodes"
    )
    with pytest.raises(ConfigError, match="it has no node"):
        check_capacity([JUDGE], [])
    with pytest.raises(ConfigError, match=r"it has 1 x \(no core\); make"):
        check_capacity([JUDGE], [node(0)])
