"""Where a recipe's processes go: pools on Ray, GPUs of this machine; and who leaves GPUs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.recipes import recipe

from winnow.config.root import Config
from winnow.errors import ConfigError
from winnow.runs.build import use_machine
from winnow.runs.launch import LocalLauncher, layout_of
from winnow.runs.state import _random_states, _set_random_states
from winnow.runs.topology import uses_device
from winnow.workers.placement import Bundle, Node

FOUR = "trainer/strategy=fsdp2", "trainer.strategy.ranks=4"
POOL = "cluster.pools={all:{nodes:2,per_node:2,cpus:3}}"
TOGETHER = (*FOUR, "rollout.engine.processes=4", POOL, "cluster.roles={policy:all,rollout:all}")
JUDGED = "reward/model=sequence_classifier", "reward.model.path=R"


def on_ray(*overrides: str) -> Config:
    return recipe("quickstart", "cluster=ray", *overrides)


def test_without_pools_ranks_have_one_and_each_engine_a_slot_anywhere() -> None:
    layout = layout_of(on_ray(*FOUR, "rollout.engine.processes=3", "cluster.nodes=2"), True)
    assert {pool.name: (pool.nodes, pool.per_node, pool.cpus) for pool in layout.pools} == {
        "policy": (2, 2, 1.0),
        "rollout": (3, 1, 1.0),
    }
    # Two nodes of 3 GPUs and one of 1: no engine needs to lie beside another.
    chosen = layout.assign([Node(f"n{i}", Bundle(8, gpus)) for i, gpus in enumerate((3, 3, 1))])
    assert sorted(chosen["rollout"]) == ["n0", "n1", "n2"]
    ranks = [chosen["policy"][:2], chosen["policy"][2:]]
    assert all(len(set(part)) == 1 for part in ranks)


def test_only_engines_apart_need_no_pool_of_ranks() -> None:
    layout = layout_of(on_ray("rollout.engine.processes=2", "cluster.cpus=0.5"), False)
    assert dict(layout.roles) == {"rollout": "rollout"}
    assert layout.share("rollout") == Bundle(0.5, 0)


def test_roles_of_one_pool_share_the_device_of_a_slot_and_have_their_own_cores() -> None:
    layout = layout_of(on_ray(*TOGETHER), True)
    assert layout.share("policy") == layout.share("rollout") == Bundle(3, 0.5)
    assert layout.part(layout.pools[0]) == Bundle(12, 2)
    assert set(layout.assign([Node("a", Bundle(12, 2)), Node("b", Bundle(12, 2))])["all"]) == {
        "a",
        "b",
    }


@pytest.mark.parametrize(("judge", "device"), [((), False), (JUDGED, True)])
def test_what_scores_has_a_device_for_a_model_alone(judge: tuple[str, ...], device: bool) -> None:
    scored = *FOUR, "reward.processes=3", *judge
    pools = "cluster.pools={t:{per_node:4},r:{per_node:3}}", "cluster.roles={policy:t,reward:r}"
    for layout in (layout_of(on_ray(*scored), True), layout_of(on_ray(*scored, *pools), True)):
        assert layout.pool_of("policy").has_devices
        assert (layout.size("reward"), layout.pool_of("reward").has_devices) == (3, device)
    beside = "cluster.pools={a:{per_node:4}}", "cluster.roles={policy:a,reward:a}"
    layout = layout_of(on_ray(*scored, "reward.processes=4", *beside), True)
    assert layout.share("policy").devices == 0.5


def test_pools_of_a_recipe_may_be_apart() -> None:
    pools = "cluster.pools={t:{per_node:4},g:{nodes:2}}", "cluster.roles={policy:t,rollout:g}"
    layout = layout_of(
        on_ray(*FOUR, "rollout.engine.processes=2", *pools, "cluster.cpus=2"), has_devices=True
    )
    assert [layout.size(role) for role in ("policy", "rollout")] == [4, 2]
    assert layout.share("rollout") == Bundle(2, 1)


def test_a_machine_with_too_few_gpus_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = recipe("quickstart", *FOUR[:1], "rollout.engine.processes=2")
    LocalLauncher(two)
    with pytest.raises(ConfigError) as caught:
        LocalLauncher(recipe("quickstart", "rollout.engine.processes=4"))
    assert "1 that train (trainer.strategy.ranks) and 4 that write" in str(caught.value)
    assert "need 5, this machine has 4; have fewer" in str(caught.value)
    LocalLauncher(recipe("quickstart", "rollout.engine.processes=4", "run.device=cpu"))


def test_what_scores_has_a_slot_each_and_a_gpu_for_a_reward_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules, judged = (on_ray("reward.processes=3", *model) for model in ((), JUDGED))
    assert [layout_of(each, True).share("reward") for each in (rules, judged)] == [
        Bundle(1, 0),
        Bundle(1, 1),
    ]
    assert layout_of(rules, True).size("reward") == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    LocalLauncher(recipe("quickstart", "reward.processes=3"))
    with pytest.raises(ConfigError, match=r"3 that score \(reward\.processes\) need 4, this"):
        LocalLauncher(recipe("quickstart", "reward.processes=3", *JUDGED))


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^run\.device is cuda, but torch sees no GPU"):
        LocalLauncher(recipe("quickstart", *FOUR, "rollout.engine.processes=1", "run.device=cuda"))


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (lambda: recipe("quickstart"), "cuda"),
        (lambda: recipe("quickstart", *FOUR), "cuda"),  # its engine writes
        (lambda: recipe("quickstart", *FOUR, "rollout.engine.processes=1"), "cpu"),
        (lambda: recipe("quickstart", *FOUR, "rollout.engine.processes=1", *JUDGED), "cuda"),
        (
            lambda: recipe(
                "quickstart", *FOUR, "rollout.engine.processes=1", "reward.processes=1", *JUDGED
            ),
            "cpu",
        ),
        (lambda: on_ray(*TOGETHER, "run.device=cuda"), "cpu"),
        (lambda: on_ray(*TOGETHER, *JUDGED), "cpu"),
        (lambda: on_ray("rollout.engine.processes=1"), "cuda"),
    ],
)
def test_a_run_whose_models_are_elsewhere_leaves_gpus_alone(
    config: Callable[[], Config], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = config()
    assert use_machine(chosen, uses_device(chosen)).type == device


def test_random_states_open_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any) -> Any:
        raise AssertionError("a GPU was opened")

    states = {**_random_states(), "cuda": [torch.zeros(16, dtype=torch.uint8)]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("_lazy_init", "get_rng_state_all", "set_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, opened)
    assert "cuda" not in _random_states()
    _set_random_states(states)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="opened"):  # a process that uses one saves its state
        _random_states()
    with pytest.raises(AssertionError, match="opened"):
        _set_random_states(states)
