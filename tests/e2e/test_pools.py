"""A run whose ranks and engines share slots on Ray is the run that has them apart; so is one whose
reward model, reference and critic are sharded over ranks of their own, in another pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kill import STEPS, differences
from tests.processes import workers_of
from tests.ray_nodes import ray_nodes
from tests.reward_models import classifier_folder
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.observe.jsonl import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 5 / 4
"""
SETTINGS = (
    *("warm_start=none", "model.path=model", "reward.function.path=score.py", "reward.workers=0"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "data.task.eval_problems=2"),
    *("rollout.n=4", "rollout.max_response_tokens=16", "rollout.engine.slots=8"),
    *("reward.overlong.enabled=false", "sampling.groups_per_step=4", f"trainer.steps={STEPS}"),
    *("trainer.mini_batch_groups=2", "optim.warmup_steps=1", "evaluation.every=3"),
    *("evaluation.n=1", "run.threads=1", "observe.console=off"),
    *("trainer/strategy=fsdp2", "rollout.engine.processes=2"),
    *("sampling.score_lag_ticks=16", "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.1"),
    *("algorithm/advantage=gae", "critic.optim.lr=1e-3", "critic.optim.warmup_steps=0"),
)
JUDGED = "reward/model=sequence_classifier", "reward.model.path=judge"
"""In the run's own process."""
POOLS = """
defaults: [quickstart]
cluster:
  name: ray
  pools:
    all: {nodes: 2}
    rest: {nodes: 2}
  roles: {policy: all, rollout: all, reward_model: rest, reference: rest, critic: rest}
critic:
  strategy: {name: fsdp2}
reference:
  strategy: {name: fsdp2}
reward:
  model: {name: sequence_classifier, path: judge, strategy: {name: fsdp2}}
"""


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train(home: Path, recipe: str, name: str, *settings: str) -> None:
    run = f"run.name={name}"
    in_this_process("train", recipe, *SETTINGS, run, *settings, folder=home).check()


def test_colocation_changes_no_bit_and_the_driver_opens_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> Any:
        raise AssertionError("the driver opened a GPU")

    digits_folder(tmp_path / "model")
    classifier_folder(tmp_path / "judge")
    (tmp_path / "score.py").write_text(SCORER)
    (tmp_path / "pooled.yaml").write_text(POOLS)
    train(tmp_path, "quickstart", "apart", *JUDGED)
    with ray_nodes({"num_cpus": 5}, {"num_cpus": 5}) as address:
        # As where this process sees GPUs that it is to leave to others.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "_lazy_init", opened)
        there = f"cluster.address={address}", "cluster.environment={HF_HUB_OFFLINE: '1'}"
        train(tmp_path, "pooled.yaml", "together", *there)
    apart, together = tmp_path / "runs/apart", tmp_path / "runs/together"
    assert differences(apart, together) == []
    norms = [line["actor/grad_norm"] for line in read_metrics(apart / "metrics.jsonl")[1:]]
    assert len(norms) == STEPS
    assert min(norms) > 0
    own = {f"{role}[{rank}]" for role in ("reward model", "reference", "critic") for rank in (0, 1)}
    assert {*workers_of(together)} - {*workers_of(apart)} == own
    scored = [line for line in read_metrics(together / "metrics.jsonl") if line["step"]]
    assert all(r["score/parts/model/min"] < r["score/parts/model/max"] for r in scored)
    assert max(r["actor/kl_loss"] for r in scored) > 0
    assert scored[-1]["critic/value/min"] < scored[-1]["critic/value/max"]
