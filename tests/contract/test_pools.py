"""Roles of one pool lie on the same slots, and what lay on a node is lost with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.ray_nodes import RayWorkers
from tests.recipes import recipe

from winnow.builders.processes import launcher
from winnow.config import roles
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.errors import ConfigError, WorkerError
from winnow.workers.array_refs import ArrayRef, SplitResult
from winnow.workers.group import WorkerGroups
from winnow.workers.ray.actors import start_ray
from winnow.workers.ray.session import Pool, ray_session, reserve

PROBE = "tests.workers:Probe"
TOGETHER = "cluster.roles={policy:all,rollout:all}"


@pytest.fixture(scope="module")
def cluster(ray_workers: RayWorkers) -> Iterator[str]:
    """Ray on two nodes of four cores and two devices, which are numbers only; its address."""
    head, node = {"num_cpus": 0, "num_gpus": 0}, {"num_cpus": 4, "num_gpus": 2}
    with ray_workers.nodes(head, node, node) as address:
        yield address


@pytest.fixture(scope="module")
def nodes(cluster: str) -> Iterator[None]:
    """A connection to it for all tests."""
    with ray_session(cluster):
        yield


def recipe_of(ranks: int, engines: int, *settings: str) -> Config:
    sizes = f"trainer.strategy.ranks={ranks}", f"rollout.engine.processes={engines}"
    return recipe("quickstart", "cluster=ray", "trainer/strategy=fsdp2", *sizes, *settings)


def answered_by(worker: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> Roles:
    """A recipe's roles, with another class in the place of all workers'."""
    monkeypatch.setattr(
        roles,
        "ROLES",
        [replace(role, worker=worker, worker_by_engine=None) for role in roles.ROLES],
    )
    return Roles(config)


Place = tuple[str, str | None]
"""Node and device, each by a name of its own."""


def places(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Place], list[Place]]:
    """Where a recipe's ranks and engines come to lie; others answer in their place."""
    placed = answered_by(PROBE, config, monkeypatch)
    policy, engine = placed["policy"], placed["rollout"]
    with closing(WorkerGroups()) as crew, launcher(config, placed, crew) as launch:
        started = (launch(engine, {}, number) for number in range(engine.count))
        groups = crew.start(launch(policy, {}, 0), *started)
        asked = "environment", "RAY_RAYLET_PID", "CUDA_VISIBLE_DEVICES"
        ranks, *alone = [[tuple(each) for each in group.call_blocking(*asked)] for group in groups]
    return ranks, [each for (each,) in alone]


def test_an_engine_over_several_slots_sees_the_devices_of_its_ranks(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = "rollout/engine=vllm", "rollout.engine.tensor_parallel=2", "cluster.share_devices=true"
    config = recipe_of(4, 2, *wide, "cluster.nodes=2", f"cluster.address={cluster}")
    ranks, engines = places(config, monkeypatch)
    pairs = [ranks[:2], ranks[2:]]
    assert [node for node, _ in engines] == [node for ((node, _), _) in pairs]
    assert {device for _, device in engines} == {"0,1"}
    for pair, (node, devices) in zip(pairs, engines, strict=True):
        assert [node, node] == [node for node, _ in pair]
        assert ",".join(str(device) for _, device in pair) == devices


CARRIED = """
import os
from pathlib import Path
from tests.workers import Probe

class Carried(Probe):
    def about(self):
        here = Path(__file__).parent
        names = [str(path.relative_to(here)) for path in here.rglob("*.*") if path.suffix != ".pyc"]
        found = [os.environ.get(name) for name in ("OURS", "THEIRS", "PYTHONHASHSEED")]
        return sorted(names), found, os.environ["PYTHONUNBUFFERED"]
"""


def test_actors_have_the_files_and_variables_of_the_recipe_and_leave_a_timeline(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test: the others share a connection, which has an environment of its own."""
    code = tmp_path / "code"
    (code / "runs" / "old").mkdir(parents=True)
    for name, text in {"carried.py": CARRIED, "big.bin": "", "runs/old/model.txt": ""}.items():
        (code / name).write_text(text)
    env = f"working_dir: {code}, excludes: ['*.bin'], env_vars: {{THEIRS: b, PYTHONHASHSEED: '7'}}"
    made = f"cluster.address={cluster}", f"run.dir={code}/runs", "cluster.environment={OURS: a}"
    timeline = f"cluster.timeline_file={tmp_path}/new/timeline.json"
    config = recipe_of(1, 0, *made, f"cluster.runtime_env={{{env}}}", timeline)
    placed = answered_by("carried:Carried", config, monkeypatch)
    with closing(WorkerGroups()) as crew, launcher(config, placed, crew) as launch:
        (ranks,) = crew.start(launch(placed["policy"], {}, 0))
        ((files, variables, unbuffered),) = ranks.call_blocking("about")
    assert files == ["carried.py"]
    assert variables == ["a", "b", "7"]
    assert unbuffered == "1"  # of ours, which the recipe leaves alone
    events = json.loads((tmp_path / "new" / "timeline.json").read_text())
    assert any("RayWorker" in event["cat"] for event in events)


def test_an_environment_that_ray_cannot_use_is_told_in_one_line(
    cluster: str, nodes: None, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"^cluster\.runtime_env has pip, but this process is connected"
    ):
        ray_session(cluster, runtime_env={"pip": ["six"]}).__enter__()


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("pool", "node_count", "devices"),
    [
        # A node has cores for one slot only. This process sees no GPU, and run.device=auto takes
        # those of the cluster.
        ("{nodes:2,cpus:1.5}", 2, None),
        ("{per_node:2}", 1, ["0", "1"]),
    ],
)
def test_rank_and_engine_of_a_slot_share_node_and_device(
    pool: str, node_count: int, devices: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe_of(2, 2, f"cluster.pools={{all:{pool}}}", TOGETHER)
    ranks, engines = places(config, monkeypatch)
    assert ranks == engines
    assert len({node for node, _ in ranks}) == node_count
    seen = sorted(str(device) for _, device in ranks)
    assert seen == devices or (devices is None and {*seen} <= {"0", "1"})


@pytest.mark.usefixtures("nodes")
def test_roles_of_two_pools_share_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = "cluster.pools={train:{per_node:2},write:{nodes:2}}"
    config = recipe_of(2, 2, pools, "cluster.roles={policy:train,rollout:write}")
    ranks, engines = places(config, monkeypatch)
    assert len({*ranks, *engines}) == 4
    assert len({node for node, _ in ranks}) == 1


@pytest.mark.usefixtures("nodes")
def test_a_recipe_for_cpus_reserves_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, engines = places(recipe_of(1, 1, "run.device=cpu"), monkeypatch)
    assert [device for _, device in ranks + engines] == [None, None]


async def start_twice() -> None:
    reserved = await reserve([Pool("a", {"wide": 2}, per_node=2, devices=1)])
    try:
        first = await start_ray("wide", PROBE, {}, reserved.placement("wide"))
        with pytest.raises(WorkerError, match=r"^wide\[0\] did not start within cluster\.start_t"):
            await start_ray("wide", PROBE, {}, reserved.placement("wide"), start_timeout_s=0.5)
        await first.close()
    finally:
        reserved.release()


@pytest.mark.usefixtures("nodes")
def test_devices_that_others_hold_are_waited_for_as_long_as_a_start_may_take() -> None:
    asyncio.run(asyncio.wait_for(start_twice(), 200))


async def lose_a_node(workers: RayWorkers, caplog: pytest.LogCaptureFixture) -> None:
    count = 200_000
    pools = [Pool("a", {"a": 1}, cpus=3.0), Pool("b", {"b": 1}, cpus=3.0)]
    reserved = await reserve(pools)
    writer = await start_ray("writer", PROBE, {}, reserved.placement("a"))
    reader = await start_ray("reader", PROBE, {}, reserved.placement("b"))
    lost_node, other_node = (workers.node_of(each.pids()[0]) for each in (writer, reader))
    assert lost_node != other_node
    try:
        kept: SplitResult = await writer.call_rank(0, "keep", count, 4)
        stored = ArrayRef(kept.block, 0, 0, 3, np.int64)
        expected = np.random.default_rng([4, 0]).integers(9, size=count)[:3]
        other: SplitResult = await writer.call_rank(0, "keep", count, 5)
        late = ArrayRef(other.block, 0, 0, 3, np.int64)
        ((found,),) = await reader.call("read", stored)
        np.testing.assert_array_equal(found, expected)
        os.kill(lost_node, signal.SIGKILL)
        lost = r"data of writer\[0\] is lost: its node is gone"
        with pytest.raises(WorkerError, match=lost):
            await reader.call("read", late)
        with pytest.raises(WorkerError, match=lost):
            np.asarray(late)
    finally:
        await writer.close()
        await reader.close()
        reserved.release()
    with pytest.raises(ConfigError, match="do not fit"):
        await reserve(pools)
    again = asyncio.ensure_future(reserve(pools, lost_timeout_s=100.0))
    while "Ray has lost 1 of the cluster's nodes, and the pools do not fit" not in caplog.text:
        assert not again.done()
        await asyncio.sleep(0.01)
    workers.add_node(num_cpus=4)
    (await again).release()


@pytest.mark.usefixtures("nodes")
def test_what_was_kept_on_a_node_that_is_gone_is_told_as_lost_and_pools_wait_for_another(
    ray_workers: RayWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """The last test: one of the two nodes is gone afterwards, and another is there."""
    asyncio.run(asyncio.wait_for(lose_a_node(ray_workers, caplog), 200))
