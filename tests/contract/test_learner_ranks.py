"""A whole step of learning on ranks comes to what it comes to in one process.

Each recipe's learner takes recorded answers, with every role that it has: passes, advantages,
corrections, selections, updates of policy and critic. Its figures and the weights after are held
against those of the same recipe in one process.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.ranks import Ranks
from tests.recorded import VOCABULARY, quickstart_model, recorded_groups
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.errors import WorkerError
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import CriticLearner
from winnow.learning.strategy import Strategy
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import Learning, make_critic, make_learner, make_settings
from winnow.runs.critic_ranks import WithCritic
from winnow.runs.loading import load_policy_model
from winnow.runs.reference_ranks import WithReference
from winnow.runs.topology import launcher
from winnow.types import Group
from winnow.workers.group import WorkerGroups

SMALL = (
    *("trainer.mini_batch_groups=2", "sampling.groups_per_step=4", "optim.warmup_steps=0"),
    *("trainer.steps=100", "trainer.microbatch_tokens=150", "optim.lr=1e-3", "warm_start=none"),
)
ON_RANKS = "trainer/strategy=fsdp2", "trainer.strategy.bucket_mb=1"
REFERENCE = "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.05"
RECIPES: dict[str, tuple[str, ...]] = {
    "dapo": (),
    "two epochs, prompt-mean": ("trainer.epochs=2", "algorithm.aggregation=prompt-mean-token-mean"),
    "ppo": (
        *("algorithm/advantage=gae", "critic.optim.lr=1e-3", "critic.optim.warmup_steps=0"),
        "critic.microbatch_tokens=200",
    ),
    "kl in reward, whitened": (
        *("algorithm/kl/reward=fixed", "algorithm.kl.reward.coef=0.05"),
        "algorithm/advantage=reinforce_plus_plus",
    ),
    "kl in loss": REFERENCE,
    "clip_cov": ("algorithm/policy_loss=clip_cov",),
    "kl_cov": ("algorithm/policy_loss=kl_cov",),
    "gspo": ("algorithm/policy_loss=gspo", "algorithm.aggregation=seq-mean-token-mean"),
    "corrected": (
        *("algorithm/correction/weight=truncated", "algorithm.correction.weight.normalize=true"),
        "algorithm/correction/rejection=k3",
    ),
    "token baseline": ("algorithm/advantage=optimal_token_baseline",),
    "lora with reference": ("model/adapter=lora", "model.adapter.rank=4", *REFERENCE),
    "frozen": ("model.freeze=[*embed_tokens*, *.layers.0.*]",),
}
LAYOUTS = {"one": (1, 1), "two": (1, 2), "four": (1, 4), "two by two": (2, 2)}
"""Replicas, shards; with fewer than four ranks each set of them does the whole."""
SEQUENCES = {"dapo": 2, "ppo": 4, "gspo": 2, "clip_cov": 4, "lora with reference": 2}
"""Ranks that run each micro-batch together."""
Found = tuple[list[dict[str, float]], dict[str, NDArray[Any]]]


class Own:
    """An extra of the policy, which goes to no other role's ranks."""

    def __reduce__(self) -> Any:
        raise AssertionError("an extra was sent")


def routed(group: Group) -> Group:
    extras = {"own": cast(Any, Own())}
    made = [replace(a, trajectory=replace(a.trajectory, extras=extras)) for a in group.answers]
    return replace(group, answers=tuple(made))


def groups_of_step(step: int) -> list[Group]:
    """Four recorded groups, of which each step has others."""
    every = recorded_groups(6, 4)
    return [replace(routed(every[(step + i) % len(every)]), id=10 * step + i) for i in range(4)]


def learnt(learning: Learning, steps: int) -> Found:
    """Figures of each step, and all weights after the last."""
    records = []
    for step in range(1, steps + 1):
        metrics = Metrics()
        learned = learning.learner.learn(groups_of_step(step), step, metrics, Stopwatch())
        record = {n: float(v) for n, v in metrics.record().items() if not n.startswith("ranks/")}
        records.append(record | {f"advantage {i}": a for i, a in enumerate(learned.advantages)})
    weights = {
        f"{role}: {name}": tensor.detach().double().numpy().copy()
        for role, strategy in {"policy": learning.policy, **learning.others}.items()
        for name, tensor in strategy.export_weights()
    }
    return records, weights


def in_one_process(config: Config, folder: str, steps: int) -> Found:
    model = load_policy_model(config.model, folder, torch.device("cpu"), config.run.seed)
    return learnt(make_learner(config, model, VOCABULARY, folder), steps)


def on_rank(config: Config, folder: str, layout: tuple[int, int], steps: int) -> Found:
    cpu, mesh = torch.device("cpu"), mesh_of(layout)
    model = load_policy_model(config.model, folder, cpu, config.run.seed, hollow=True)
    return learnt(make_learner(config, model, VOCABULARY, folder, mesh), steps)


def mesh_of(layout: tuple[int, int]) -> DeviceMesh:
    replicas, shards = layout
    if replicas > 1:
        return init_device_mesh("cpu", layout, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (4 // shards, shards), mesh_dim_names=("sets", "shard"))["shard"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    quickstart_model(hidden_size=32, intermediate_size=48).save_pretrained(path)
    return str(path)


def recipe(folder: str, settings: tuple[str, ...]) -> Config:
    return load_recipe("quickstart", [*SMALL, f"model.path={folder}", *settings])


def assert_alike(found: Found, wanted: Found) -> None:
    (ours, weights), (theirs, exact) = found, wanted
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one.keys() == two.keys()
        for name, value in two.items():
            assert one[name] == pytest.approx(value, rel=2e-4, abs=1e-5), (step, name)
    assert weights.keys() == exact.keys()
    for name, tensor in exact.items():
        away = np.linalg.norm(weights[name] - tensor) / (np.linalg.norm(tensor) + 1e-12)
        assert away < 1e-4, name


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_on_ranks_is_a_step_in_one_process(name: str, folder: str, ranks: Ranks) -> None:
    settings = RECIPES[name]
    wanted = in_one_process(recipe(folder, settings), folder, 2)
    layout = LAYOUTS["two by two" if name == "dapo" else "four"]
    together = f"trainer.strategy.sequence={SEQUENCES.get(name, 1)}"
    config = recipe(folder, (*settings, *ON_RANKS, "trainer.strategy.ranks=4", together))
    answers = ranks.run(on_rank, config, folder, layout, 2)
    for found in answers:
        assert_alike(found, wanted)
    figures = [found[0] for found in answers]
    # Each rank computes them; they may not drift apart by a bit.
    assert all(repr(each) == repr(figures[0]) for each in figures)


@pytest.mark.parametrize("name", ["one", "two", "four"])
def test_what_five_steps_learn_does_not_depend_on_the_number_of_ranks(
    name: str, folder: str, ranks: Ranks
) -> None:
    wanted, _ = in_one_process(recipe(folder, ()), folder, 5)
    config = recipe(folder, ON_RANKS)
    for found, _ in ranks.run(on_rank, config, folder, LAYOUTS[name], 5):
        for one, two in zip(found, wanted, strict=True):
            assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-4)


def test_a_reference_on_ranks_of_its_own_is_the_one_beside_the_policy(folder: str) -> None:
    beside, apart = REFERENCE, (*REFERENCE, "reference/strategy=fsdp2", "run.threads=1")
    wanted = in_one_process(recipe(folder, beside), folder, 2)
    config = recipe(folder, apart)
    model = load_policy_model(config.model, folder, torch.device("cpu"), config.run.seed)
    learning = make_learner(config, model, VOCABULARY, folder)
    assert learning.passes.forwards == 1  # for `old`; it holds no reference
    with closing(WorkerGroups()) as crew, launcher(config, crew) as launch:
        given = {"config": config, "start": folder, "vocabulary": VOCABULARY}
        (ranks,) = crew.start(launch("reference", given, 0))
        learner: Any = WithReference(learning.learner, ranks)
        assert_alike(learnt(replace(learning, learner=learner), 2), wanted)
        give_up = time.monotonic() + 30  # ranks tell of their progress once a second
        while learner.progress == learning.learner.progress:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        assert wanted[0][1]["actor/kl_loss"] > 1e-4  # what the second step measures
        os.kill(ranks.processes()[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"^reference\[1\] was killed by SIGKILL [^\n]*$"):
            learnt(replace(learning, learner=learner), 1)


PPO = RECIPES["ppo"]
NARROWED = (
    *("algorithm/correction/rejection=k3", "algorithm.overlong_filtering=true"),
    *("trainer.epochs=2", "critic.warmup_steps=1"),
)
"""Some tokens do not learn, and the policy begins with the second step."""


def values_of_steps(config: Config, folder: str, hold: Any) -> list[NDArray[Any]]:
    """The values [T] of three steps in float64, whose returns and masks are made up."""
    critic = make_critic(config, folder, torch.device("cpu"), False, hold)
    learner, found = CriticLearner(critic, make_settings(config)), []
    for step in (1, 2, 3):
        sharder = critic.strategy.sharder
        batch = sharder.pack(groups_of_step(1), learner.microbatch_tokens)
        learner.values(batch, step)
        found.append(batch.whole(batch.columns["values"]).numpy())
        at = batch.own(torch.arange(int(batch.lengths.sum())))
        batch.columns["returns"] = torch.sin(at.double())
        learner.update(replace(batch, loss_mask=batch.gen_mask & (at % 3 > 0)), step)
    return found


def values_on_rank(config: Config, folder: str, layout: tuple[int, int]) -> list[NDArray[Any]]:
    def hold(model: nn.Module, **options: Any) -> Strategy:
        return FSDP2Strategy(model.double(), mesh_of(layout), Sharding(), **options)

    return values_of_steps(config, folder, hold)


@pytest.mark.parametrize("layout", ["four", "two by two"])
def test_a_critic_on_ranks_learns_what_it_learns_whole(
    layout: str, folder: str, ranks: Ranks
) -> None:
    config = recipe(folder, PPO)
    wanted = values_of_steps(config, folder, lambda model, **o: Strategy(model.double(), **o))
    assert float(np.abs(wanted[2]).max()) > 1e-3
    for found in ranks.run(values_on_rank, config, folder, LAYOUTS[layout]):
        for one, two in zip(found, wanted, strict=True):
            assert np.abs(one - two).max() < 1e-10


def test_a_critic_on_ranks_of_its_own_is_the_one_beside_the_policy(folder: str) -> None:
    beside = *PPO, *NARROWED
    wanted, weights = in_one_process(recipe(folder, beside), folder, 3)
    config = recipe(folder, (*beside, "critic/strategy=fsdp2", "run.threads=1"))
    model = load_policy_model(config.model, folder, torch.device("cpu"), config.run.seed)
    learning = make_learner(config, model, VOCABULARY, folder)
    assert not learning.others
    with closing(WorkerGroups()) as crew, launcher(config, crew) as launch:
        (ranks,) = crew.start(launch("critic", {"config": config, "start": folder}, 0))
        learner: Any = WithCritic(learning.learner, cast(Any, None), ranks)
        own = {name: array for name, array in weights.items() if name.startswith("policy")}
        assert_alike(learnt(replace(learning, learner=learner), 3), (wanted, own))
        assert wanted[1]["correction/rejected_tokens"] > 0.01
        assert wanted[2]["critic/value/min"] < -0.01
        assert "actor/loss" not in wanted[0]
        give_up = time.monotonic() + 30  # ranks tell of their progress once a second
        while learner.progress == learning.learner.progress:
            assert time.monotonic() < give_up
            time.sleep(0.05)
        os.kill(ranks.processes()[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"^critic\[1\] was killed by SIGKILL [^\n]*$"):
            learnt(replace(learning, learner=learner), 1)
