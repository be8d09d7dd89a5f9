"""Where a recipe's processes go: pools on Ray, GPUs of this machine; and who leaves GPUs alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.recipes import recipe

from winnow.config.root import Config
from winnow.errors import ConfigError
from winnow.runs import topology
from winnow.runs.build import use_machine
from winnow.runs.placement import (
    allocator_variables,
    devices_of,
    local_devices,
    pools_of,
    visible_devices,
)
from winnow.runs.state import _random_states, _set_random_states
from winnow.runs.topology import launcher, uses_device
from winnow.workers import group
from winnow.workers.group import WorkerGroups
from winnow.workers.ray.session import Pool

FOUR = "trainer/strategy=fsdp2", "trainer.strategy.ranks=4"
POOL = "cluster.pools={all:{nodes:2,per_node:2,cpus:3}}"
TOGETHER = (*FOUR, "rollout.engine.processes=4", POOL, "cluster.roles={policy:all,rollout:all}")
JUDGED = "reward/model=sequence_classifier", "reward.model.path=R"
SHARDED = (*JUDGED, "reward/model/strategy=fsdp2")


def on_ray(*overrides: str) -> Config:
    return recipe("quickstart", "cluster=ray", *overrides)


def test_without_pools_ranks_have_one_and_each_engine_a_slot_anywhere() -> None:
    config = on_ray(*FOUR, "rollout.engine.processes=3", "cluster.nodes=2")
    assert pools_of(config, True) == [
        Pool("policy", ("policy",), 2, 2, True),
        Pool("rollout", ("rollout",), 3, 1, True),
    ]


def test_only_engines_apart_need_no_pool_of_ranks() -> None:
    (pool,) = pools_of(on_ray("rollout.engine.processes=2", "cluster.cpus=0.5"), False)
    assert pool == Pool("rollout", ("rollout",), nodes=2, cpus=0.5)
    assert pool.share == {"CPU": 0.5}


def test_roles_of_one_pool_share_the_device_of_a_slot_and_have_their_own_cores() -> None:
    (pool,) = pools_of(on_ray(*TOGETHER), True)
    assert pool == Pool("all", ("policy", "rollout"), 2, 2, True, 3)
    assert pool.share == {"CPU": 3, "GPU": 0.5}
    assert pool.needs(pool.per_node) == {"CPU": 12, "GPU": 2}


@pytest.mark.parametrize(("judge", "device"), [((), False), (JUDGED, True)])
def test_what_scores_has_a_device_for_a_model_alone(judge: tuple[str, ...], device: bool) -> None:
    scored = *FOUR, "reward.processes=3", *judge
    pools = "cluster.pools={t:{per_node:4},r:{per_node:3}}", "cluster.roles={policy:t,reward:r}"
    for more in ((), pools):
        found = {role: p for p in pools_of(on_ray(*scored, *more), True) for role in p.roles}
        assert found["policy"].devices == 1
        assert (found["reward"].size, found["reward"].devices) == (3, device)
    beside = "cluster.pools={a:{per_node:4}}", "cluster.roles={policy:a,reward:a}"
    (pool,) = pools_of(on_ray(*scored, "reward.processes=4", *beside), True)
    assert pool.share["GPU"] == 0.5


def test_pools_of_a_recipe_may_be_apart() -> None:
    pools = "cluster.pools={t:{per_node:4},g:{nodes:2}}", "cluster.roles={policy:t,rollout:g}"
    config = on_ray(*FOUR, "rollout.engine.processes=2", *pools, "cluster.cpus=2")
    train, generate = pools_of(config, has_devices=True)
    assert (train.size, generate.size) == (4, 2)
    assert generate.share == {"CPU": 2, "GPU": 1}


def test_a_machine_with_too_few_gpus_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = recipe("quickstart", *FOUR, "trainer.strategy.ranks=2", "rollout.engine.processes=2")
    assert local_devices(two) == {"policy": range(2), "rollout": range(2, 4)}
    with pytest.raises(ConfigError) as caught:
        local_devices(recipe("quickstart", "rollout.engine.processes=4"))
    assert "1 that train (trainer.strategy.ranks) and 4 that write" in str(caught.value)
    assert "need 5, this machine has 4; have fewer" in str(caught.value)
    four = recipe("quickstart", "rollout.engine.processes=4")
    assert local_devices(four, trains=False)["rollout"] == range(4)
    local_devices(recipe("quickstart", "rollout.engine.processes=4", "run.device=cpu"))


def test_an_engine_over_two_gpus_has_both_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    two = "rollout/engine=vllm", "rollout.engine.processes=2", "rollout.engine.tensor_parallel=2"
    train, write = pools_of(on_ray(*FOUR, *two), True)
    assert (train.devices, write.devices) == (1, 2)
    assert (write.nodes, write.per_node, write.needs(1)) == (2, 1, {"CPU": 1, "GPU": 2})
    assert pools_of(on_ray(*two), False)[0].share == {"CPU": 1}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert local_devices(recipe("quickstart", *two)) == {"policy": range(1), "rollout": range(1, 5)}
    with pytest.raises(ConfigError, match=r"4 that write .* x tensor_parallel=2\) need 8, this"):
        local_devices(recipe("quickstart", *FOUR, *two))


def test_throughput_and_mfu_are_of_all_devices_that_learn_or_write() -> None:
    two = "rollout/engine=vllm", "rollout.engine.processes=2", "rollout.engine.tensor_parallel=2"
    assert devices_of(recipe("quickstart"), 1) == 1
    assert devices_of(recipe("quickstart", *FOUR, *two), 4) == 8
    assert devices_of(on_ray(*FOUR, *two), 4) == 8
    assert devices_of(on_ray(*TOGETHER), 4) == 4


@pytest.mark.parametrize(("seen", "shown"), [(None, "2,3"), ("4, 5,6,7", "6,7"), ("", "2,3")])
def test_an_engine_sees_its_own_gpus_of_those_that_the_run_sees(
    seen: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices(range(2, 4)) == {"CUDA_VISIBLE_DEVICES": shown}


def test_what_scores_has_a_slot_each_and_a_gpu_for_a_reward_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules, judged = (on_ray("reward.processes=3", *model) for model in ((), JUDGED))
    shares = [pool.share for each in (rules, judged) for pool in pools_of(each, True)]
    assert shares == [{"CPU": 1}, {"CPU": 1, "GPU": 1}]
    assert [pool.size for pool in pools_of(rules, True)] == [3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "reward" not in local_devices(recipe("quickstart", "reward.processes=3"))
    with pytest.raises(ConfigError, match=r"3 that score \(reward\.processes\) need 4, this"):
        local_devices(recipe("quickstart", "reward.processes=3", *JUDGED))


def test_a_sharded_reward_model_has_a_pool_and_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = "cluster.pools={t:{per_node:4},j:{nodes:2}}", "cluster.roles={policy:t,reward_model:j}"
    _, judge = pools_of(on_ray(*FOUR, *SHARDED, *more), True)
    assert judge == Pool("j", ("reward_model",), 2, 1, 1)
    assert [pool.size for pool in pools_of(on_ray(*FOUR, *SHARDED), True)] == [4, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert local_devices(recipe("quickstart", *SHARDED))["reward_model"] == range(1, 3)
    with pytest.raises(ConfigError, match=r"2 that score \(reward\.model\.strategy\.r.* need 6"):
        local_devices(recipe("quickstart", *FOUR, *SHARDED))


def test_a_reference_that_is_asked_for_has_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = *FOUR, "rollout.engine.processes=1", "reference/strategy=fsdp2"
    asked = *apart, "algorithm/kl/loss=fixed"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 9)
    found = local_devices(recipe("quickstart", *asked, *SHARDED))
    assert (found["reward_model"], found["reference"]) == (range(5, 7), range(7, 9))
    assert "reference" not in local_devices(recipe("quickstart", *apart, *SHARDED))
    imitates = "data/task=none", "sft=demonstrations", "sft.train_files=[a]", "warm_start=none"
    assert local_devices(recipe("sft", *asked, *imitates, "model.path=m")).keys() == {
        *("policy", "rollout")
    }
    with pytest.raises(ConfigError) as caught:
        local_devices(recipe("quickstart", *asked, *SHARDED, "rollout.engine.processes=2"))
    assert (
        "2 that score (reward.model.strategy.ranks) and 2 of the reference "
        "(reference.strategy.ranks) need 10, this machine has 9"
    ) in str(caught.value)
    pools = [pool.name for pool in pools_of(on_ray(*asked), True)]
    assert pools == ["policy", "rollout", "reference"]


def test_a_critic_that_is_asked_for_has_devices_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = *FOUR, "rollout.engine.processes=1", "critic/strategy=fsdp2"
    asked = *apart, "algorithm/advantage=gae"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    assert local_devices(recipe("quickstart", *asked))["critic"] == range(5, 7)
    assert "critic" not in local_devices(recipe("quickstart", *apart))
    with pytest.raises(ConfigError, match=r"2 of the critic \(critic\.strategy\.ranks\) need 8, t"):
        local_devices(recipe("quickstart", *asked, "rollout.engine.processes=2"))
    assert devices_of(recipe("quickstart", *asked), 4) == 7
    pools = "cluster.pools={a:{per_node:4},b:{per_node:1},c:{per_node:2}}"
    roles = "cluster.roles={policy:a,rollout:b,critic:c}"
    assert devices_of(on_ray(*asked, pools, roles), 4) == 7
    shared = "cluster.pools={a:{per_node:4},b:{per_node:1}}", "critic.strategy.ranks=4"
    assert (
        devices_of(on_ray(*asked, *shared, "cluster.roles={policy:a,rollout:b,critic:a}"), 4) == 5
    )


def test_a_judges_engines_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    two = "reward/judge=engine", "reward.judge.path=J", "reward.judge.engine.processes=2"
    split = *two, "reward/judge/engine=vllm", "reward.judge.engine.tensor_parallel=2"
    apart = *FOUR, "rollout.engine.processes=1"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 9)
    assert local_devices(recipe("quickstart", *apart, *two))["judge"] == range(5, 7)
    assert local_devices(recipe("quickstart", *apart, *split))["judge"] == range(5, 9)
    with pytest.raises(ConfigError, match=r"4 that judge \(reward\.judge\.eng.* need 11, this"):
        local_devices(recipe("quickstart", *apart, *SHARDED, *split))
    *_, judge = pools_of(on_ray(*apart, *split), True)
    assert judge == Pool("judge", ("judge",), 2, 1, 2)
    assert devices_of(recipe("quickstart", *apart, *split), 4) == 5


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^run\.device is cuda, but torch sees no GPU"):
        local_devices(recipe("quickstart", *FOUR, "rollout.engine.processes=1", "run.device=cuda"))


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
        (lambda: recipe("quickstart", *FOUR, "rollout.engine.processes=1", *SHARDED), "cpu"),
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


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_ranks_on_gpus_alone_have_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for role in ("policy", "reference", "reward_model", "critic"):
        assert allocator_variables(role, True, {}) == EXPANDABLE
        assert allocator_variables(role, False, {}) == {}
    for role in ("rollout", "reward"):
        assert allocator_variables(role, True, {}) == {}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_users_own_allocator_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert allocator_variables("policy", True, {name: "max_split_size_mb:64"}) == {}
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert allocator_variables("policy", True, {}) == {}


@pytest.mark.parametrize("on_gpus", [True, False])
def test_processes_here_get_their_variables_by_role(
    on_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(role: str, path: str, kwargs: Any, size: int, variables: Any, *_: Any) -> None:
        given[role] = variables

    devices = {"policy": range(2), "rollout": range(2, 3)} if on_gpus else {}
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(topology, "local_devices", lambda *_: devices)
    monkeypatch.setattr(group, "start_local", record)
    config = recipe("quickstart", "trainer/strategy=fsdp2", "rollout.engine.processes=1")
    with closing(WorkerGroups()) as crew, launcher(config, crew) as launch:
        launch("policy", {}, 0)
        launch("rollout", {}, 0)
    assert given["learner"].items() >= (EXPANDABLE.items() if on_gpus else set())
    assert ("PYTORCH_CUDA_ALLOC_CONF" in given["learner"]) == on_gpus
    assert "PYTORCH_CUDA_ALLOC_CONF" not in given["engine 0"]
