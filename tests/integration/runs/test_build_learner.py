"""What a recipe asks a step to compute; and each line of it switched, in real runs of one step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from benchmarks.kill import contents, figures, same
from safetensors.torch import load_file
from tests.objectives import legal_aggregation
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_this_process
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.load import load_recipe
from winnow.learning.policy import KlTerm
from winnow.observe.jsonl import read_metrics
from winnow.runs.build_learner import make_objective, needs_start, old_source
from winnow.runs.checkpoint import checkpoints_in, load_state

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


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ([], "pass"),
        ([ONE_UPDATE], "current"),
        (["trainer.mini_batch_groups=64"], "current"),
        ([ONE_UPDATE, "trainer.epochs=2"], "pass"),
        (["algorithm/policy_loss=reinforce"], "current"),
        (["algorithm/policy_loss=gpg", "algorithm/kl/loss=fixed"], "current"),
        (
            [
                *("algorithm/policy_loss=gpg", "algorithm/kl/loss=fixed"),
                "algorithm.kl.loss.importance_weight=true",
            ],
            "pass",
        ),
        ([ONE_UPDATE, "algorithm/kl/loss=fixed"], "current"),
        ([ONE_UPDATE, "algorithm/kl/reward=fixed"], "pass"),
        ([ONE_UPDATE, "algorithm/advantage=gae"], "current"),
        ([ONE_UPDATE, "algorithm/advantage=optimal_token_baseline"], "pass"),
        ([ONE_UPDATE, "algorithm/policy_loss=kl_cov"], "pass"),
        ([ONE_UPDATE, "algorithm/correction/weight=truncated"], "pass"),
        ([ONE_UPDATE, "algorithm/correction/rejection=k2"], "pass"),
        ([ONE_UPDATE, "algorithm.correction.mode=fused"], "current"),
        (["algorithm.correction.mode=bypass"], "behav"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_pass_for_the_old_policy_is_made_only_where_something_needs_it(
    settings: list[str], wanted: str
) -> None:
    config = load_recipe("quickstart", settings)
    assert old_source(config) == make_objective(config).old == wanted


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
    assert objective.norm_tokens == 128
    assert objective.entropy_coef == 0.01
    assert objective.kl == KlTerm(0.2, "k2", importance_weight=False)
    assert objective.correction == {
        "weight": "masked",
        "normalize": False,
        "weight_options": {"level": "token", "low": 0.5, "high": 5.0},
        "rejection": "k1",
        "rejection_options": {"level": "token", "over": "mean", "low": 0.5, "high": 2.0},
    }


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ([], False),
        (["algorithm/kl/loss=fixed"], True),
        (["algorithm/kl/reward=adaptive"], True),
        (["algorithm/kl/loss=fixed", "reference.path=elsewhere"], False),
        (["model/adapter=lora"], True),
        (["algorithm/advantage=gae"], True),
        (["algorithm/advantage=gae", "critic.path=elsewhere"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_start_is_needed_by_a_reference_or_a_critic_of_its_own(
    settings: list[str], wanted: bool
) -> None:
    assert needs_start(load_recipe("quickstart", settings)) == wanted


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder `model` of random weights."""
    path = tmp_path_factory.mktemp("home")
    digits_folder(path / "model", initializer_range=0.3)
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def train(home: Path, name: str, *settings: str) -> Outcome:
    return attempt(home, name, *settings).check()


def attempt(home: Path, name: str, *settings: str) -> Outcome:
    model = f"model.path={home / 'model'}"
    command = ("train", "quickstart", *SMALL, model, f"run.name={name}", *settings)
    return in_this_process(*command, folder=home)


def weights(home: Path, name: str, step: int = 1) -> Mapping[str, Tensor]:
    return load_file(home / f"runs/{name}/checkpoints/step-{step}/model/model.safetensors")


def has_learnt(home: Path, name: str) -> None:
    started, found = load_file(home / "model/model.safetensors"), weights(home, name)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    assert all(not torch.equal(found[key], tensor) for key, tensor in started.items())
    (record,) = (r for r in read_metrics(home / f"runs/{name}/metrics.jsonl") if r["step"] == 1)
    assert record["actor/updates"] == 2
    assert record["actor/skipped_updates"] == 0


@pytest.mark.parametrize("advantage", ESTIMATORS)
def test_a_run_switches_its_advantage_by_one_line(advantage: str, home: Path) -> None:
    train(home, advantage, "trainer.steps=1", f"algorithm/advantage={advantage}")
    has_learnt(home, advantage)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_a_run_switches_its_policy_loss_by_one_line(loss: str, home: Path) -> None:
    aggregation, name = f"algorithm.aggregation={legal_aggregation(loss)}", f"loss-{loss}"
    train(home, name, "trainer.steps=1", f"algorithm/policy_loss={loss}", aggregation)
    has_learnt(home, name)


OWN = """
import torch
from winnow.algorithms.losses import ratio

def topr(logp, old, advantage, tokens, *, high=1.0):
    r = ratio(logp, old).clamp(max=high).detach()
    weight = torch.where(advantage > 0, torch.ones_like(r), r)
    return -weight * advantage * logp, {"cut_share": (tokens.mask & (r >= high)).sum()}

def against_the_batch(inputs, *, scale=1.0):
    return scale * (inputs.rewards - inputs.rewards.mean())
"""


def test_a_run_learns_with_a_loss_and_an_estimator_of_the_users_own(home: Path) -> None:
    (home / "mine.py").write_text(OWN)
    own = (
        *("algorithm/policy_loss=custom", f"algorithm.policy_loss.path={home}/mine.py:topr"),
        *("algorithm.policy_loss.options={high: 0.9}", "algorithm/advantage=custom"),
        f"algorithm.advantage.path={home}/mine.py:against_the_batch",
        "+algorithm.advantage.options.scale=2.0",
    )
    train(home, "own", "trainer.steps=1", *own)
    has_learnt(home, "own")
    (record,) = (r for r in read_metrics(home / "runs/own/metrics.jsonl") if r["step"] == 1)
    assert 0 < record["actor/cut_share"] <= 1
    assert record["actor/old_pass"] == 1, "two updates a step, and a loss that may read `old`"
    train(home, "plain", "trainer.steps=1", "algorithm/policy_loss=reinforce")
    assert any(
        not torch.equal(a, weights(home, "plain")[k]) for k, a in weights(home, "own").items()
    )


def test_a_run_with_a_loss_that_cannot_train_ends_in_one_line(home: Path) -> None:
    (home / "bad.py").write_text(
        "def mean_of_all(logp, *_):\n    return logp * 0 + logp.mean(), {}"
    )
    own = ("algorithm/policy_loss=custom", f"algorithm.policy_loss.path={home}/bad.py:mean_of_all")
    said = attempt(home, "bad", "trainer.steps=1", *own)
    assert said.code == 2
    assert "bad.py:mean_of_all: the loss of a token changes by" in said.err
    assert "Traceback" not in said.err


GAE = (
    *("algorithm/advantage=gae", "algorithm/kl/reward=adaptive", "algorithm.kl.reward.target=0.01"),
    *("algorithm.kl.reward.coef=0.1", "algorithm.kl.reward.horizon_samples=20"),
    *("critic.warmup_steps=1", "critic.optim.lr=1e-2", "trainer.steps=4"),
    *("trainer.save_every=1", "trainer.keep_last=null"),
)


def test_a_run_with_a_critic_and_adaptive_kl_goes_on_with_the_same_bits(home: Path) -> None:
    train(home, "whole", *GAE)
    whole, cut = home / "runs/whole", home / "runs/cut"
    shutil.copytree(whole, cut)
    for checkpoint in checkpoints_in(cut / "checkpoints"):
        if checkpoint.step > 2:
            shutil.rmtree(checkpoint.path)
    said = train(home, "cut", *GAE)
    assert said.code == 0
    assert figures(whole) == figures(cut)
    assert contents(whole / "rollouts") == contents(cut / "rollouts")
    states = {
        step: load_state(next(c for c in checkpoints_in(whole / "checkpoints") if c.step == step))
        for step in (1, 2, 4)
    }
    (last,) = (c for c in checkpoints_in(cut / "checkpoints") if c.step == 4)
    assert same(load_state(last), states[4])
    assert (last.model / "model.safetensors").read_bytes() == (
        whole / "checkpoints/step-4/model/model.safetensors"
    ).read_bytes()
    # The comparison is of something: what the critic and the KL's weight were, they are no more.
    critic = [states[step]["others"]["critic"] for step in (2, 4)]
    assert critic[0]["optimizer"]["score.weight"]["step"] == 4
    assert critic[1]["optimizer"]["score.weight"]["step"] == 8
    assert not torch.equal(
        critic[0]["weights"]["score.weight"], critic[1]["weights"]["score.weight"]
    )
    coefs = [states[step]["learner"]["advantage"]["penalty"]["coef"] for step in (1, 2, 4)]
    assert len({0.1, *coefs}) == 4
    # The first step taught the critic alone.
    started = load_file(home / "model/model.safetensors")
    assert all(torch.equal(started[key], tensor) for key, tensor in weights(home, "whole").items())
    has_moved = weights(home, "whole", 2)
    assert not any(torch.equal(started[key], tensor) for key, tensor in has_moved.items())


def test_a_kl_in_the_loss_whose_gradient_is_not_the_kls_is_warned_of(home: Path) -> None:
    kl = ("algorithm/kl/loss=fixed", "algorithm.kl.loss.estimator=k3", "observe.console=plain")
    said = train(home, "warned", "trainer.steps=1", *kl)
    assert "Warning: algorithm.kl.loss.estimator=k3 in the loss has a biased gradient" in said.out
    kl = ("algorithm/kl/loss=fixed", "algorithm.kl.loss.estimator=k2", "observe.console=plain")
    assert "Warning" not in train(home, "quiet", "trainer.steps=1", *kl).out


def test_a_run_shorter_than_its_warm_ups_cuts_them_and_says_so(home: Path) -> None:
    warm = ("optim.warmup_steps=5", "algorithm/advantage=gae", "critic.warmup_steps=3")
    said = train(home, "short", "trainer.steps=2", *warm, "observe.console=plain")
    assert "Warning: optim.warmup_steps=5 is more than trainer.steps=2" in said.out
    assert "Warning: critic.warmup_steps=3 leaves none of trainer.steps=2" in said.out
    records = {r["step"]: r for r in read_metrics(home / "runs/short/metrics.jsonl")}
    # The critic learns alone in step 1; in step 2, its last, the policy is at its peak.
    assert "actor/lr" not in records[1]
    assert records[2]["actor/lr"] == 1e-2
