"""Roles of one pool lie on the same slots: the same node, and the same device of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.ray_nodes import parent_of, ray_nodes
from tests.recipes import recipe

from winnow.config.root import Config
from winnow.errors import ConfigError
from winnow.runs.placement import pools_of
from winnow.runs.topology import CLASSES, ENGINES, launcher
from winnow.workers.group import WorkerGroups
from winnow.workers.ray.session import ray_session, reserve

PROBE = "tests.workers:Probe"
TOGETHER = "cluster.roles={policy:all,rollout:all}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Ray on two nodes of four cores and two devices, which are numbers only; its address."""
    with ray_nodes(*[{"num_cpus": 4, "num_gpus": 2}] * 2) as address:
        yield address


@pytest.fixture(scope="module")
def nodes(cluster: str) -> Iterator[None]:
    """A connection to it for all tests."""
    with ray_session(cluster):
        yield


def recipe_of(ranks: int, engines: int, *settings: str) -> Config:
    sizes = f"trainer.strategy.ranks={ranks}", f"rollout.engine.processes={engines}"
    return recipe("quickstart", "cluster=ray", "trainer/strategy=fsdp2", *sizes, *settings)


Place = tuple[int, str | None]
"""Node and device, each by a name of its own."""


def places(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Place], list[Place]]:
    """Where a recipe's ranks and engines come to lie; others answer in their place."""
    monkeypatch.setitem(CLASSES, "policy", PROBE)
    monkeypatch.setitem(ENGINES, config.rollout.engine.name, PROBE)
    with closing(WorkerGroups()) as crew, launcher(config, crew) as launch:
        engines = range(config.rollout.engine.processes)
        groups = crew.start(launch("policy", {}, 0), *(launch("rollout", {}, i) for i in engines))
        ranks, *alone = [
            [
                (parent_of(pid), device)
                for (_, pid, _), (device,) in zip(group.ask("about"), devices, strict=True)
            ]
            for group in groups
            for devices in (group.ask("environment", "CUDA_VISIBLE_DEVICES"),)
        ]
    return ranks, [each for (each,) in alone]


CARRIED = """
import os
from pathlib import Path
from tests.workers import Probe

class Carried(Probe):
    def about(self):
        here = Path(__file__).parent
        names = [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
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
    monkeypatch.setitem(CLASSES, "policy", "carried:Carried")
    with closing(WorkerGroups()) as crew, launcher(config, crew) as launch:
        (ranks,) = crew.start(launch("policy", {}, 0))
        ((files, variables, unbuffered),) = ranks.ask("about")
    assert files == ["carried.py"]
    assert variables == ["a", "b", "7"]
    assert unbuffered == "1"  # of ours, which the recipe leaves alone
    events = json.loads((tmp_path / "new" / "timeline.json").read_text())
    assert any("RayWorker" in event["cat"] for event in events)


def test_an_environment_that_ray_cannot_use_is_told_in_one_line(
    cluster: str, nodes: None, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.runtime_env has pip, which come with"):
        ray_session(cluster, runtime_env={"pip": ["six"]}).__enter__()


@pytest.mark.usefixtures("nodes")
def test_rank_and_engine_of_a_slot_share_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe_of(2, 2, "cluster.pools={all:{nodes:2,cpus:1.5}}", TOGETHER)
    ranks, engines = places(config, monkeypatch)
    assert ranks == engines
    assert len({node for node, _ in ranks}) == 2  # a node has cores for one slot only
    # This process sees no GPU, and run.device=auto takes those of the cluster.
    assert {device for _, device in ranks} <= {"0", "1"}


@pytest.mark.usefixtures("nodes")
def test_rank_and_engine_of_a_slot_share_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe_of(2, 2, "cluster.pools={all:{per_node:2}}", TOGETHER)
    ranks, engines = places(config, monkeypatch)
    assert ranks == engines
    assert len({node for node, _ in ranks}) == 1
    assert sorted(str(device) for _, device in ranks) == ["0", "1"]


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


@pytest.mark.usefixtures("nodes")
def test_pools_that_do_not_fit_are_told_by_name() -> None:
    config = recipe_of(3, 3, "cluster.pools={all:{per_node:3}}", TOGETHER)
    with pytest.raises(ConfigError, match=r"they need all 1 x \(3 devices and 6 cores\)"):
        asyncio.run(reserve(pools_of(config, has_devices=True)))
