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
from torch.distributed.device_mesh import init_device_mesh

from winnow.builders.processes import launcher
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.errors import WorkerError
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.learner import Learning, make_learner
from winnow.ranks.models import load_policy_model
from winnow.ranks.remote import AssistedLearner
from winnow.types import Group
from winnow.workers.group import WorkerGroup, WorkerGroups

pytestmark = pytest.mark.usefixtures("forked_workers")
SMALL = (
    *("trainer.mini_batch_groups=2", "sampling.groups_per_step=4", "optim.warmup_steps=0"),
    *("trainer.steps=100", "trainer.microbatch_tokens=150", "optim.lr=1e-3", "warm_start=none"),
    "algorithm.correction.mode=recompute",  # as ranks do
)
ON_RANKS = "trainer/strategy=fsdp2", "trainer.strategy.bucket_mb=1"
REFERENCE = "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.05"
PPO = (
    *("algorithm/advantage=gae", "critic.optim.lr=1e-3", "critic.optim.warmup_steps=0"),
    "critic.microbatch_tokens=200",
)
RECIPES: dict[str, tuple[tuple[str, ...], int]] = {
    "two epochs, prompt-mean": (
        ("trainer.epochs=2", "algorithm.aggregation=prompt-mean-token-mean"),
        2,
    ),
    "ppo": (PPO, 4),
    "kl in reward, whitened, gspo": (
        (
            *("algorithm/kl/reward=fixed", "algorithm.kl.reward.coef=0.05"),
            *("algorithm/advantage=reinforce_plus_plus", "algorithm/policy_loss=gspo"),
            "algorithm.aggregation=seq-mean-token-mean",
        ),
        1,
    ),
    "kl_cov": (("algorithm/policy_loss=kl_cov",), 1),
    "lora with reference": (("model/adapter=lora", "model.adapter.rank=4", *REFERENCE), 2),
}
"""By name: settings, and how many ranks run each micro-batch together. `test_own_rows` has every
way to estimate and correct, over tables in the place of models."""
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
    return learnt(make_learner(config, Roles(config), model, VOCABULARY, folder), steps)


def on_rank(config: Config, folder: str, is_replicated: bool, steps: int) -> Found:
    cpu = torch.device("cpu")
    layout: Any = ((2, 2), ("replicate", "shard")) if is_replicated else ((4,), ("shard",))
    mesh = init_device_mesh("cpu", layout[0], mesh_dim_names=layout[1])
    model = load_policy_model(config.model, folder, cpu, config.run.seed, hollow=True)
    return learnt(make_learner(config, Roles(config), model, VOCABULARY, folder, mesh), steps)


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
    settings, sequence = RECIPES[name]
    wanted = in_one_process(recipe(folder, settings), folder, 2)
    on_ranks = "trainer.strategy.ranks=4", f"trainer.strategy.sequence={sequence}"
    config = recipe(folder, (*settings, *ON_RANKS, *on_ranks))
    answers = ranks.run(on_rank, config, folder, "epochs" in name, 2)
    for found in answers:
        assert_alike(found, wanted)
    figures = [found[0] for found in answers]
    # Each rank computes them; they may not drift apart by a bit.
    assert all(repr(each) == repr(figures[0]) for each in figures)


def check_progress_and_death(learning: Learning, learner: Any, ranks: WorkerGroup) -> None:
    """What ranks of a role's own do counts as progress, and one that dies is named."""
    give_up = time.monotonic() + 30  # ranks tell of their progress once a second
    while learner.progress == learning.learner.progress:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    os.kill(ranks.pids()[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"^{ranks.role}\[1\] was killed by SIGKILL [^\n]*$"):
        learnt(replace(learning, learner=learner), 1)


def test_a_reference_on_ranks_of_its_own_is_the_one_beside_the_policy(folder: str) -> None:
    beside, apart = REFERENCE, (*REFERENCE, "reference/strategy=fsdp2", "run.threads=1")
    wanted = in_one_process(recipe(folder, beside), folder, 2)
    config = recipe(folder, apart)
    model = load_policy_model(config.model, folder, torch.device("cpu"), config.run.seed)
    learning = make_learner(config, Roles(config), model, VOCABULARY, folder)
    assert learning.passes.forwards == 1  # for `old`; it holds no reference
    with closing(WorkerGroups()) as crew, launcher(config, Roles(config), crew) as launch:
        given = {"config": config, "start": folder, "vocabulary": VOCABULARY}
        (ranks,) = crew.start(launch(Roles(config)["reference"], given, 0))
        learner: Any = AssistedLearner(learning.learner, cast(Any, None), ranks, None)
        assert_alike(learnt(replace(learning, learner=learner), 2), wanted)
        assert wanted[0][1]["actor/kl_loss"] > 1e-4  # what the second step measures
        check_progress_and_death(learning, learner, ranks)


NARROWED = (
    *("algorithm/correction/rejection=k3", "algorithm.overlong_filtering=true"),
    *("trainer.epochs=2", "critic.warmup_steps=1"),
)
"""Some tokens do not learn, and the policy begins with the second step."""


def test_a_critic_on_ranks_of_its_own_is_the_one_beside_the_policy(folder: str) -> None:
    beside = *PPO, *NARROWED
    wanted, weights = in_one_process(recipe(folder, beside), folder, 3)
    config = recipe(folder, (*beside, "critic/strategy=fsdp2", "run.threads=1"))
    model = load_policy_model(config.model, folder, torch.device("cpu"), config.run.seed)
    learning = make_learner(config, Roles(config), model, VOCABULARY, folder)
    assert not learning.others
    with closing(WorkerGroups()) as crew, launcher(config, Roles(config), crew) as launch:
        given = {"config": config, "start": folder}
        (ranks,) = crew.start(launch(Roles(config)["critic"], given, 0))
        learner: Any = AssistedLearner(learning.learner, cast(Any, None), None, ranks)
        own = {name: array for name, array in weights.items() if name.startswith("policy")}
        assert_alike(learnt(replace(learning, learner=learner), 3), (wanted, own))
        assert wanted[1]["correction/rejected_tokens"] > 0.01
        assert wanted[2]["critic/value/min"] < -0.01
        assert "actor/loss" not in wanted[0]
        check_progress_and_death(learning, learner, ranks)
