"""A role is added by one entry: what places, starts, plans and shows processes knows it by that."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.recipes import recipe

from winnow.builders.placement import assign_local_gpus, make_pools
from winnow.builders.preflight import startup_notes
from winnow.builders.processes import launcher
from winnow.config import roles
from winnow.config.load import dump_config
from winnow.config.roles import Role, Roles
from winnow.config.trainer import RayCluster
from winnow.dashboard.pages import Pages
from winnow.dashboard.runs import RunSet
from winnow.errors import ConfigError
from winnow.observe.files import RunFolder
from winnow.plan.estimate import Machine, find_gpu
from winnow.plan.plan import PlanRequest, make_plan
from winnow.workers.group import WorkerGroups

TOOLS = Role("tools", "evaluation.n", "tests.workers:Probe", (), "pipelines", "tool{s}")
ALL = (
    *("evaluation.n=2", "trainer/strategy=fsdp2", "rollout.engine.processes=2"),
    *("algorithm/advantage=gae", "critic/strategy=fsdp2"),
    *("algorithm/kl/loss=fixed", "reference/strategy=fsdp2", "reward/judge=engine"),
    *("reward.judge.path=J", "reward/model=sequence_classifier", "reward.model.path=M"),
    *("reward/model/strategy=fsdp2", "data.task.eval_problems=8"),
)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up role, of as many processes as evaluation.n."""
    monkeypatch.setattr(roles, "ROLES", [*roles.ROLES, TOOLS])


def test_it_is_placed_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("quickstart", "evaluation.n=2", "cluster=ray")
    assert isinstance(config.cluster, RayCluster)
    assert [[*pool.roles] for pool in make_pools(Roles(config), config.cluster, True)] == [
        ["tools"]
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert assign_local_gpus(Roles(config), "cuda") == {"policy": range(1), "tools": range(1, 3)}
    machine = Machine(*find_gpu("h100"), nodes=1, per_node=2)
    with pytest.raises(ConfigError, match=r"policy and 2 tools take 3; .* evaluation\.n\Z"):
        make_plan(PlanRequest("quickstart", ("evaluation.n=2",), machine))


def test_it_is_started() -> None:
    config = recipe("quickstart", "evaluation.n=2", "run.device=cpu")
    placed = Roles(config)
    assert startup_notes(placed, None) == [
        "Starting processes, 2 tools: half a minute, longer for large models"
    ]
    with closing(WorkerGroups()) as groups, launcher(config, placed, groups, False) as launch:
        (group,) = groups.start(launch(placed["tools"], {}, 0))
        assert [info.rank for info, _, _ in group.call_blocking("about")] == [0, 1]


def test_a_page_lists_the_processes_of_every_role(tmp_path: Path) -> None:
    RunFolder(tmp_path / "runs" / "all").save_config(dump_config(recipe("quickstart", *ALL)))
    (page,) = Pages(RunSet([str(tmp_path / "runs")])).by_name().values()
    assert {each["name"]: each["count"] for each in page.system()["processes"]} == {
        "driver": 1,
        "ranks of the policy": 2,
        "engines": 2,
        "ranks of the reward model": 2,
        "engines of the judge": 1,
        "ranks of the reference": 2,
        "ranks of the critic": 2,
        "tools": 2,
    }


def test_a_page_of_a_recipe_that_cannot_be_read_here_lists_what_its_keys_say(
    tmp_path: Path,
) -> None:
    text = dump_config(recipe("quickstart", "trainer/strategy=fsdp2", "evaluation.n=3"))
    folder = RunFolder(tmp_path / "runs" / "other")
    folder.save_config(f"{text}\nnew_section: {{a: 1}}\n")
    (page,) = Pages(RunSet([str(tmp_path / "runs")])).by_name().values()
    found = {each["name"]: each["count"] for each in page.system()["processes"]}
    assert found == {"driver": 1, "ranks of the policy": 2}
