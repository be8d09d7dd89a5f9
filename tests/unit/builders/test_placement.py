"""Where a recipe's processes go: pools on Ray, GPUs of this machine; and who leaves GPUs alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.recipes import recipe

from winnow.builders import judge, processes
from winnow.builders.engines import driver_uses_device, engines_sleep, reserved_gib, staging_engines
from winnow.builders.placement import (
    assign_local_gpus,
    count_devices,
    make_pools,
    visible_devices_variable,
)
from winnow.builders.processes import launcher
from winnow.builders.run import prepare_device
from winnow.builders.topology import _release_memory
from winnow.checkpoints.run_state import _random_states, _set_random_states
from winnow.commands.evaluate import _with_local_engine
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import LocalCluster, RayCluster, WholeModels
from winnow.errors import ConfigError, TrainingError
from winnow.ranks.models import explain_oom, use_deterministic_kernels
from winnow.workers import group
from winnow.workers.group import WorkerGroups
from winnow.workers.ray.session import Pool

FOUR = "trainer/strategy=fsdp2", "trainer.strategy.ranks=4"
POOL = "cluster.pools={all:{nodes:2,per_node:2,cpus:3}}"
TOGETHER = (*FOUR, "rollout.engine.processes=4", POOL, "cluster.roles={policy:all,rollout:all}")
JUDGED = "reward/model=sequence_classifier", "reward.model.path=R"
SHARDED = (*JUDGED, "reward/model/strategy=fsdp2")
ENGINES = [f"rollout.engine.processes={count}" for count in range(5)]
VLLM, SPLIT = "rollout/engine=vllm", "rollout.engine.tensor_parallel=2"
WIDE = VLLM, "rollout.engine.processes=2", SPLIT
SHARED = "cluster.share_devices=true"
APART = *FOUR, "rollout.engine.processes=1"
REFERENCE = *APART, "reference/strategy=fsdp2", "algorithm/kl/loss=fixed", *SHARDED
CRITIC = *APART, "critic/strategy=fsdp2", "algorithm/advantage=gae"
JUDGE = "reward/judge=engine", "reward.judge.path=J", "reward.judge.engine.processes=2"
WIDE_JUDGE = *JUDGE, "reward/judge/engine=vllm", "reward.judge.engine.tensor_parallel=2"


def on_ray(*overrides: str) -> Config:
    return recipe("quickstart", "cluster=ray", *overrides)


def pools(config: Config, has_devices: bool) -> list[Pool]:
    assert isinstance(config.cluster, RayCluster)
    return make_pools(Roles(config), config.cluster, has_devices)


def devices(config: Config, trains: bool = True) -> dict[str, range]:
    return assign_local_gpus(Roles(config), config.run.device, trains)


def learning_devices(config: Config, ranks: int) -> int:
    return count_devices(Roles(config), ranks)


def see_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels as they were, after the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_without_pools_ranks_have_one_and_each_engine_a_slot_anywhere() -> None:
    config = on_ray(*FOUR, "rollout.engine.processes=3", "cluster.nodes=2")
    assert pools(config, True) == [
        Pool("policy", {"policy": 1}, 2, 2, True),
        Pool("rollout", {"rollout": 1}, 3, 1, True),
    ]


def test_environments_have_slots_without_gpus_and_no_processes_in_an_evaluation() -> None:
    tools = "environment=tools", "environment.tools=[python]", "environment.processes=2"
    config = on_ray(*FOUR, *tools, "run.device=cpu")
    assert Pool("environment", {"environment": 1}, 2, 1) in pools(config, True)
    assert devices(config) == {}
    local, _ = _with_local_engine(config, False)
    assert "environment" not in Roles(local)


def test_roles_of_one_pool_share_the_device_of_a_slot_and_have_their_own_cores() -> None:
    (pool,) = pools(on_ray(*TOGETHER), True)
    assert pool == Pool("all", {"policy": 1, "rollout": 1}, 2, 2, True, 3)
    assert pool.worker_resources == {"CPU": 3, "GPU": 0.5}
    assert pool.resources(pool.per_node) == {"CPU": 12, "GPU": 2}


def test_an_engine_takes_the_slots_of_as_many_ranks_as_it_has_gpus() -> None:
    wide = "cluster.nodes=2", SHARED, *WIDE[::2]
    (pool,) = pools(on_ray(*FOUR, *wide), True)
    assert pool == Pool("policy", {"policy": 1, "rollout": 2}, 2, 2, devices=1)
    assert learning_devices(on_ray(*FOUR, *wide), 4) == 4
    named = on_ray(*FOUR, *WIDE, POOL, "cluster.roles={policy:all,rollout:all}")
    assert [pool.roles for pool in pools(named, True)] == [{"policy": 1, "rollout": 2}]


def test_engines_sleep_where_they_share_gpus_with_ranks_in_sync_mode() -> None:
    def sleeps(*settings: str) -> bool:
        config = recipe("quickstart", *settings)
        return engines_sleep(config.rollout.engine, config.trainer, config.cluster, Roles(config))

    assert sleeps(*FOUR, SHARED)
    assert sleeps(SHARED)
    assert not sleeps(*FOUR, "rollout.engine.processes=4")
    assert not sleeps(*FOUR, SHARED, "trainer/mode=one_step_off")
    assert not sleeps(*FOUR, SHARED, "rollout.engine.sleep=false")


def test_a_pool_whose_roles_have_no_work_is_not_asked_for() -> None:
    """As where an engine alone of a recipe is checked."""
    apart = "cluster.pools={t:{per_node:4},w:{}}", "cluster.roles={policy:t,rollout:w}"
    config = on_ray(*FOUR, "rollout.engine.processes=1", *apart)
    alone = config.trainer.model_copy(update={"strategy": WholeModels()})
    (pool,) = pools(config.model_copy(update={"trainer": alone}), True)
    assert [*pool.roles] == ["rollout"]


@pytest.mark.parametrize(
    ("settings", "gpus", "wanted"),
    [
        (
            (*FOUR, "trainer.strategy.ranks=2", ENGINES[2]),
            4,
            {"policy": range(2), "rollout": range(2, 4)},
        ),
        (WIDE, 5, {"policy": range(1), "rollout": range(1, 5)}),
        (SHARDED, 3, {"reward_model": range(1, 3)}),
        (REFERENCE, 9, {"reward_model": range(5, 7), "reference": range(7, 9)}),
        (CRITIC, 7, {"critic": range(5, 7)}),
        ((*APART, *JUDGE), 9, {"judge": range(5, 7)}),
        ((*APART, *WIDE_JUDGE), 9, {"judge": range(5, 9)}),
        ((VLLM, SHARED), 1, {"policy": range(1), "rollout": range(1)}),
        ((*FOUR, VLLM, SHARED, SPLIT), 4, {"policy": range(4), "rollout": range(4)}),
        ((*CRITIC, SHARED, "rollout.engine.processes=null"), 6, {"critic": range(4, 6)}),
    ],
)
def test_each_role_has_devices_of_its_own_or_shares_those_of_the_ranks(
    settings: tuple[str, ...], gpus: int, wanted: dict[str, range], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(gpus, monkeypatch)
    assert devices(recipe("quickstart", *settings)).items() >= wanted.items()


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        (
            (ENGINES[4],),
            4,
            r"1 that trains, 4 engines \(rollout\.engine\.processes\) need 5, this machine has 4",
        ),
        ((*FOUR, *WIDE), 5, r"2 engines \(rollout.* x tensor_parallel=2\) need 8, this"),
        (
            (*FOUR, *SHARDED),
            3,
            r"2 ranks of the reward model \(reward\.model\.str.* need 6",
        ),
        (
            (*REFERENCE, ENGINES[2]),
            9,
            r"2 ranks of the reward model \(reward\.model\.strategy\.ranks\), 2 ranks of the "
            r"reference \(reference\.strategy\.ranks\) need 10, this machine has 9",
        ),
        (
            (*CRITIC, ENGINES[2]),
            7,
            r"2 ranks of the critic \(critic\.strategy\.r.* need 8, this",
        ),
        (
            (*APART, *SHARDED, *WIDE_JUDGE),
            9,
            r"2 engines of the judge \(reward\.j.* need 11, this",
        ),
    ],
)
def test_a_machine_with_too_few_gpus_is_told_before_anything_starts(
    settings: tuple[str, ...], gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(gpus, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        devices(recipe("quickstart", *settings))


def test_a_role_that_is_not_asked_for_or_not_on_a_gpu_has_no_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_gpus(9, monkeypatch)
    four = recipe("quickstart", ENGINES[4])
    assert devices(four, trains=False)["rollout"] == range(4)
    assert devices(recipe("quickstart", ENGINES[4], "run.device=cpu")) == {}
    for role in ("reference", "critic"):
        idle = recipe("quickstart", *APART, f"{role}/strategy=fsdp2", *SHARDED)
        assert role not in devices(idle)
    imitates = "data/task=none", "sft=demonstrations", "sft.train_files=[a]", "warm_start=none"
    asked = *APART, "reference/strategy=fsdp2", "algorithm/kl/loss=fixed"
    imitating = recipe("sft", *asked, *imitates, "model.path=m")
    assert devices(imitating).keys() == {"policy", "rollout"}


def test_pools_of_roles_that_have_one_each() -> None:
    train, write = pools(on_ray(*FOUR, *WIDE), True)
    assert (train.devices, write.devices) == (1, 2)
    assert (write.nodes, write.per_node, write.resources(1)) == (2, 1, {"CPU": 1, "GPU": 2})
    (engines,) = pools(on_ray(*WIDE, "cluster.cpus=0.5"), False)  # ranks need no pool
    assert engines == Pool("rollout", {"rollout": 1}, nodes=2, cpus=0.5)
    assert engines.worker_resources == {"CPU": 0.5}
    more = "cluster.pools={t:{per_node:4},j:{nodes:2}}", "cluster.roles={policy:t,reward_model:j}"
    _, judge = pools(on_ray(*FOUR, *SHARDED, *more), True)
    assert judge == Pool("j", {"reward_model": 1}, 2, 1, 1)
    found = pools(on_ray(*REFERENCE), True)
    assert [pool.name for pool in found] == ["policy", "rollout", "reward_model", "reference"]
    *_, judge = pools(on_ray(*APART, *WIDE_JUDGE), True)
    assert judge == Pool("judge", {"judge": 1}, 2, 1, 2)


def test_throughput_and_mfu_are_of_all_devices_that_learn_or_write() -> None:
    assert learning_devices(recipe("quickstart"), 1) == 1
    assert learning_devices(recipe("quickstart", *FOUR, *WIDE), 4) == 8
    assert learning_devices(on_ray(*FOUR, *WIDE), 4) == 8
    assert learning_devices(on_ray(*TOGETHER), 4) == 4
    assert learning_devices(recipe("quickstart", *APART, *WIDE_JUDGE), 4) == 5
    assert learning_devices(recipe("quickstart", *CRITIC), 4) == 7
    pools = "cluster.pools={a:{per_node:4},b:{per_node:1},c:{per_node:2}}"
    assert (
        learning_devices(on_ray(*CRITIC, pools, "cluster.roles={policy:a,rollout:b,critic:c}"), 4)
        == 7
    )
    assert learning_devices(on_ray(*CRITIC, *CRITIC_BESIDE), 4) == 5


CRITIC_BESIDE = (
    "cluster.pools={a:{per_node:4},b:{per_node:1}}",
    "cluster.roles={policy:a,rollout:b,critic:a}",
    "critic.strategy.ranks=4",
)


@pytest.mark.parametrize(
    ("settings", "gib"),
    [
        ((), 12),
        (("algorithm/advantage=gae",), 12 + 12 + 2),
        (("algorithm/advantage=gae", "algorithm/kl/loss=fixed"), 12 + 12 + 2 + 2),
        ((*FOUR, "algorithm/advantage=gae", "algorithm/kl/loss=fixed"), 3 + 3),
        ((*FOUR, "trainer.strategy.replicas=2"), 6),
        ((*FOUR, "trainer.strategy.offload=true"), 0),
        ((*FOUR, "trainer/strategy=megatron", "trainer.strategy.tensor=2"), 3),
        (CRITIC, 3),
        (("cluster=ray", *CRITIC, *CRITIC_BESIDE), 3 + 3),
    ],
)
def test_engines_leave_room_for_what_training_has_yet_to_allocate(
    settings: tuple[str, ...], gib: float
) -> None:
    """Of 2^30 weights in half precision: masters and moments of 12 bytes, copies of 2."""
    weights = torch.nn.Parameter(torch.empty(2**30, dtype=torch.bfloat16, device="meta"))
    config = recipe("quickstart", *settings)
    assert reserved_gib(config, Roles(config), [weights]) == gib


class Ranks:
    """A group of ranks that takes calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call_blocking(self, method: str) -> list[None]:
        self.calls.append(method)
        return [None]


def test_all_ranks_in_the_pool_of_engines_release_memory_for_them() -> None:
    pools = "cluster.pools={a:{per_node:4},b:{per_node:2}}", "critic.strategy.ranks=4"
    roles = "cluster.roles={policy:a,rollout:a,critic:a,reward_model:b}"
    placed = Roles(on_ray(*CRITIC, "rollout.engine.processes=4", *SHARDED, *pools, roles))
    groups: dict[str, Any] = {role.name: [Ranks()] for role in placed}
    _release_memory(placed, groups)
    released = {name for name, (group,) in groups.items() if group.calls == ["release_memory"]}
    assert released == {"policy", "critic"}


@pytest.mark.parametrize(("seen", "shown"), [(None, "2,3"), ("4, 5,6,7", "6,7"), ("", "2,3")])
def test_an_engine_sees_its_own_gpus_of_those_that_the_run_sees(
    seen: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices_variable(range(2, 4)) == {"CUDA_VISIBLE_DEVICES": shown}


def test_what_scores_has_a_slot_each_and_a_gpu_for_a_reward_model_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules, judged = (on_ray("reward.processes=3", *model) for model in ((), JUDGED))
    shares = [pool.worker_resources for each in (rules, judged) for pool in pools(each, True)]
    assert shares == [{"CPU": 1}, {"CPU": 1, "GPU": 1}]
    assert [pool.nodes * pool.per_node for pool in pools(rules, True)] == [3]
    see_gpus(1, monkeypatch)
    assert "reward" not in devices(recipe("quickstart", "reward.processes=3"))
    with pytest.raises(ConfigError, match=r"3 scorers \(reward\.processes\) need 4, this"):
        devices(recipe("quickstart", "reward.processes=3", *JUDGED))


def test_a_gpu_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"^run\.device=cuda, but PyTorch finds no GPU"):
        devices(recipe("quickstart", *APART, "run.device=cuda"))


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ((), "cuda"),
        (FOUR, "cuda"),  # its engine writes
        (APART, "cpu"),
        ((*APART, *JUDGED), "cuda"),
        ((*APART, "reward.processes=1", *JUDGED), "cpu"),
        ((*APART, *SHARDED), "cpu"),
        (("cluster=ray", *TOGETHER, "run.device=cuda"), "cpu"),
        (("cluster=ray", *TOGETHER, *JUDGED), "cpu"),
        (("cluster=ray", "rollout.engine.processes=1"), "cuda"),
    ],
)
def test_a_run_whose_models_are_elsewhere_leaves_gpus_alone(
    settings: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = recipe("quickstart", *settings)
    engine, roles = chosen.rollout.engine, Roles(chosen)
    uses_device = driver_uses_device(engine, chosen.reward, chosen.cluster, roles)
    assert prepare_device(chosen.run, None, uses_device).type == device


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_deterministic_kernels_are_chosen_for_a_gpu_before_it_is_opened(
    device: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = recipe("quickstart", f"run.device={device}", f"run.deterministic={chosen}")
    assert prepare_device(config.run, None).type == device
    is_set = chosen and device == "cuda"
    assert torch.are_deterministic_algorithms_enabled() == is_set
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if is_set else None)
    assert not torch.cuda.is_initialized()


def test_a_kernel_without_a_deterministic_form_is_named() -> None:
    use_deterministic_kernels()
    named = (
        r"^run\.deterministic=true: put_ has no deterministic form .*; set run\.determ\S+=false$"
    )
    with pytest.raises(TrainingError, match=named), explain_oom(recipe("quickstart")):
        torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


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


def test_engines_of_evaluations_and_judges_have_the_recipes_time_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clusters: list[Any] = []

    def launcher(config: Config, *_: Any, **__: Any) -> Any:
        clusters.append(config.cluster)
        raise LookupError

    patient = on_ray(*FOUR, *JUDGE, "cluster.start_timeout_s=7")
    clusters.append(_with_local_engine(patient, has_servers=False)[0].cluster)
    monkeypatch.setattr(judge, "launcher", launcher)
    with pytest.raises(LookupError), judge._start_judge_engines(patient, cast(Any, None)):
        pass
    assert clusters == [LocalCluster(start_timeout_s=7)] * 2


def test_a_model_of_a_removed_checkpoint_is_replaced_by_the_newest(tmp_path: Path) -> None:
    removed = tmp_path / "checkpoints" / "step-2" / "model"
    assert processes.existing_model(str(removed)) == str(removed)
    for step in (4, 10):
        (tmp_path / "checkpoints" / f"step-{step}" / "model").mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step-10" / "model"
    assert processes.existing_model(str(removed)) == str(newest)
    for path in (str(newest.parents[1] / "step-4" / "model"), "Qwen/Qwen3-0.6B"):
        assert processes.existing_model(path) == path


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("on_gpus", [True, False])
def test_processes_here_get_their_variables_by_role(
    on_gpus: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(role: str, path: str, kwargs: Any, size: int, variables: Any, *_: Any) -> None:
        given[role] = variables

    gpus = {"policy": range(2), "rollout": range(2, 3)} if on_gpus else {}
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(processes, "assign_local_gpus", lambda *_: gpus)
    monkeypatch.setattr(group, "start_local", record)
    apart = "trainer/strategy=fsdp2", "rollout.engine.processes=1"
    config = recipe("quickstart", *apart, f"run.deterministic={deterministic}")
    with closing(WorkerGroups()) as crew, launcher(config, Roles(config), crew) as launch:
        for role in Roles(config):
            launch(role, {}, 0)()
    assert given["learner"].items() >= (EXPANDABLE.items() if on_gpus else set())
    assert ("PYTORCH_CUDA_ALLOC_CONF" in given["learner"]) == on_gpus
    assert "PYTORCH_CUDA_ALLOC_CONF" not in given["engine 0"]
    assert all(("CUBLAS_WORKSPACE_CONFIG" in each) == deterministic for each in given.values())


ON_RANKS = ("cluster.share_devices=true", "trainer/strategy=fsdp2", "trainer.strategy.ranks=2")


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [
        (("trainer/mode=async", "run.deterministic=false", "rollout.engine.processes=3"), 3),
        (("trainer/mode=async", "run.deterministic=false"), 1),
        (("trainer/mode=async", "run.deterministic=false", *ON_RANKS), 0),
        (("trainer/mode=one_step_off", "rollout.engine.processes=3"), 0),
        (("rollout.engine.processes=3",), 0),
    ],
)
def test_updates_come_beside_the_weights_where_answers_go_on(
    overrides: tuple[str, ...], engines: int
) -> None:
    config = recipe("quickstart", *overrides)
    assert staging_engines(config.trainer, Roles(config)) == engines
