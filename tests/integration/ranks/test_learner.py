"""What a recipe asks a step to compute; and each line of it switched, in real runs of one step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from benchmarks.kill import differences
from safetensors.torch import load_file
from tests.objectives import legal_aggregation
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, cut_off, in_this_process
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.checkpoints.checkpoint import Checkpoint, load_state
from winnow.config.load import load_recipe
from winnow.learning.policy import KlTerm
from winnow.observe.jsonl import read_metrics
from winnow.ranks.learner import kl_notes, make_objective, needs_start

ONE_UPDATE = "trainer.mini_batch_groups=null"
SMALL = (
    *("warm_start=none", "sampling/filter=none", "rollout.n=3", "rollout.max_response_tokens=24"),
    *("rollout.engine.slots=12", "reward.overlong.buffer_tokens=20", "sampling.groups_per_step=4"),
    *("trainer.mini_batch_groups=2", "optim.warmup_steps=0", "optim.lr=1e-2"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "data.task.eval_problems=2"),
    *("evaluation.before=false", "evaluation.every=null", "evaluation.n=1"),
    *("evaluation.greedy=false", "observe.console=off", "run.threads=1"),
)
"""No model is good enough at first for a filter; answers differ in reward by their lengths."""

NAMES = [*ESTIMATORS], [*POLICY_LOSSES]
PAIRS = [[names[i % len(names)] for names in NAMES] for i in range(max(map(len, NAMES)))]
"""Each estimator and each loss at least once."""


KL = "algorithm/kl/loss=fixed"
RECOMPUTE = "algorithm.correction.mode=recompute"
OLD_POLICY = {
    "": "reuse",
    RECOMPUTE: "pass",
    "algorithm.correction.mode=reuse": "reuse",
    "trainer/strategy=fsdp2": "pass",
    "rollout.engine.processes=0": "reuse",
    "rollout.engine.processes=1": "pass",
    "trainer/mode=one_step_off": "pass",
    "model.dtype=bfloat16": "pass",
    "rollout.temperature=0.8": "reuse",
    "rollout.min_p=0.1 rollout.support=ignore": "pass",
    ONE_UPDATE: "current",
    "trainer.mini_batch_groups=64": "current",
    f"{ONE_UPDATE} {RECOMPUTE} trainer.epochs=2": "pass",
    "algorithm/policy_loss=reinforce": "current",
    f"algorithm/policy_loss=gpg {KL}": "current",
    f"algorithm/policy_loss=gpg {KL} algorithm.kl.loss.importance_weight=true": "reuse",
    f"{ONE_UPDATE} {KL}": "current",
    f"{ONE_UPDATE} {RECOMPUTE} algorithm/kl/reward=fixed": "pass",
    f"{ONE_UPDATE} algorithm/advantage=gae": "current",
    f"{ONE_UPDATE} algorithm/advantage=optimal_token_baseline": "pass",
    f"{ONE_UPDATE} algorithm/policy_loss=kl_cov": "reuse",
    f"{ONE_UPDATE} algorithm/correction/weight=truncated": "pass",
    f"{ONE_UPDATE} algorithm/correction/rejection=k2": "pass",
    f"{ONE_UPDATE} algorithm.correction.mode=fused": "current",
    "algorithm.correction.mode=bypass": "behav",
}


def test_a_pass_for_the_old_policy_is_made_only_where_something_needs_it() -> None:
    configs = {words: load_recipe("quickstart", words.split()) for words in OLD_POLICY}
    assert {words: make_objective(config).old for words, config in configs.items()} == OLD_POLICY


def test_the_objective_takes_over_what_the_recipe_says() -> None:
    objective = make_objective(
        load_recipe(
            "quickstart",
            [
                *("algorithm.aggregation=seq-mean-token-sum-norm", "algorithm.entropy_coef=0.01"),
                *("algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.2", ONE_UPDATE),
                *("algorithm.kl.loss.estimator=k2", "algorithm.correction.mode=fused"),
                *("algorithm/correction/weight=masked", "algorithm/correction/rejection=k1"),
            ],
        )
    )
    assert objective.options == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10}
    assert objective.norm_tokens == 64
    assert objective.entropy_coef == 0.01
    assert objective.kl == KlTerm(0.2, "k2", importance_weight=False)
    assert objective.correction == {
        "weight": {
            "name": "masked",
            "normalize": False,
            "level": "token",
            "low": 0.5,
            "high": 5.0,
        },
        "rejection": {"name": "k1", "level": "token", "over": "mean", "low": 0.5, "high": 2.0},
    }


NEEDS_START = {
    "": False,
    KL: True,
    "algorithm/kl/reward=adaptive": True,
    f"{KL} reference.path=elsewhere": False,
    "model/adapter=lora": True,
    "algorithm/advantage=gae": True,
    "algorithm/advantage=gae critic.path=elsewhere": False,
}


def test_the_start_is_needed_by_a_reference_or_a_critic_of_its_own() -> None:
    found = {words: needs_start(load_recipe("quickstart", words.split())) for words in NEEDS_START}
    assert found == NEEDS_START


def test_a_kl_whose_gradient_is_not_the_kls_is_told() -> None:
    told = [
        kl_notes(load_recipe("quickstart", ["algorithm/kl/loss=fixed", *more]).algorithm)
        for more in (["algorithm.kl.loss.estimator=k3"], [])
    ]
    assert [len(lines) for lines in told] == [1, 0]
    assert "estimator=k3 in the loss has a biased gradient; k2 or k3+ have" in told[0][0]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder `model` of random weights."""
    path = tmp_path_factory.mktemp("home")
    digits_folder(path / "model", initializer_range=0.3)
    return path


def train(home: Path, name: str, *settings: str) -> Outcome:
    model = f"model.path={home / 'model'}"
    command = ("train", "quickstart", *SMALL, model, f"run.name={name}", *settings)
    return in_this_process(*command, folder=home).check()


def weights(home: Path, name: str, step: int = 1) -> Mapping[str, Tensor]:
    return load_file(home / f"runs/{name}/checkpoints/step-{step}/model/model.safetensors")


def has_learnt(home: Path, name: str) -> None:
    started, found = load_file(home / "model/model.safetensors"), weights(home, name)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert all(not torch.equal(found[key], tensor) for key, tensor in started.items())
    (record,) = (r for r in read_metrics(home / f"runs/{name}/metrics.jsonl") if r["step"] == 1)
    assert record["actor/updates"] == 2
    assert record["actor/skipped_updates"] == 0


@pytest.mark.parametrize(("advantage", "loss"), PAIRS)
def test_a_run_switches_its_advantage_and_its_policy_loss_by_a_line_each(
    advantage: str, loss: str, home: Path
) -> None:
    name = f"{advantage}-{loss}"
    chosen = f"algorithm/advantage={advantage}", f"algorithm/policy_loss={loss}"
    aggregation = f"algorithm.aggregation={legal_aggregation(loss)}"
    train(home, name, "trainer.steps=1", *chosen, aggregation)
    has_learnt(home, name)


GAE = (
    *("algorithm/advantage=gae", "algorithm/kl/reward=adaptive", "algorithm.kl.reward.target=0.01"),
    *("algorithm.kl.reward.coef=0.1", "algorithm.kl.reward.horizon_samples=20"),
    *("critic.warmup_steps=1", "critic.optim.lr=1e-2", "trainer.steps=3"),
    *("trainer.save_every=1", "trainer.keep_last=null"),
)


def test_a_run_with_a_critic_and_adaptive_kl_goes_on_with_the_same_bits(home: Path) -> None:
    train(home, "whole", *GAE)
    whole, cut = home / "runs/whole", cut_off(home, "whole", "cut", 2)
    train(home, "cut", *GAE)
    assert differences(whole, cut, steps=3) == []
    states = {
        step: load_state(Checkpoint(whole / f"checkpoints/step-{step}", step)) for step in (1, 2, 3)
    }
    # The comparison is of something: what the critic and the KL's weight were, they are no more.
    critic = [states[step]["others"]["critic"] for step in (2, 3)]
    assert critic[0]["optimizer"]["score.weight"]["step"] == 4
    assert critic[1]["optimizer"]["score.weight"]["step"] == 6
    assert not torch.equal(
        critic[0]["weights"]["score.weight"], critic[1]["weights"]["score.weight"]
    )
    coefs = [states[step]["learner"]["advantage"]["penalty"]["coef"] for step in (1, 2, 3)]
    assert len({0.1, *coefs}) == 4
    # The first step taught the critic alone.
    started = load_file(home / "model/model.safetensors")
    assert all(torch.equal(started[key], tensor) for key, tensor in weights(home, "whole").items())
    has_moved = weights(home, "whole", 2)
    assert not any(torch.equal(started[key], tensor) for key, tensor in has_moved.items())
