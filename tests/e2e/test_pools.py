"""Runs on a cluster: the bits of a run on one machine, and what comes to the driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kill import differences
from tests.processes import workers_of
from tests.ray_nodes import RayWorkers
from tests.reward_models import classifier_folder
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.workers.ray.actors import RayHandle

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("forked_workers"),
]
STEPS = 2
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 5 / 4
"""
SETTINGS = (
    *("warm_start=none", "model.path=model", "trainer/strategy=fsdp2", f"trainer.steps={STEPS}"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "data.task.eval_problems=2"),
    *("rollout.n=4", "rollout.max_response_tokens=16", "rollout.engine.slots=8"),
    *("reward.overlong.enabled=false", "trainer.mini_batch_groups=2", "evaluation.n=1"),
    *("run.threads=1", "observe.console=off"),
)
ALL_ROLES = (
    *("reward.function.path=score.py", "reward.workers=0", "rollout.engine.processes=2"),
    *("sampling.groups_per_step=4", "optim.warmup_steps=1"),
    *("sampling.score_lag_ticks=16", "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.1"),
    *("algorithm/advantage=gae", "critic.optim.lr=1e-3", "critic.optim.warmup_steps=0"),
)
FAR = (
    *("sampling.groups_per_step=2", "sampling/filter=none", "optim.warmup_steps=0"),
    *("cluster=ray", "cluster.cpus=0.5", "trainer.strategy.ranks=1", "reward.processes=1"),
    *("rollout.engine.processes=1", "observe.rollout_text_groups=0"),
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
  roles: {policy: all, rollout: all, critic: all, reward_model: rest, reference: rest}
critic:
  strategy: {name: fsdp2}
reference:
  strategy: {name: fsdp2}
reward:
  model: {name: sequence_classifier, path: judge, strategy: {name: fsdp2}}
"""


@pytest.fixture(scope="module")
def cluster(ray_workers: RayWorkers) -> Iterator[str]:
    """The address of a Ray cluster of two nodes."""
    with ray_workers.nodes({"num_cpus": 5}, {"num_cpus": 5}) as address:
        yield address


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the files of the recipes."""
    digits_folder(tmp_path / "model")
    classifier_folder(tmp_path / "judge")
    (tmp_path / "score.py").write_text(SCORER)
    (tmp_path / "pooled.yaml").write_text(POOLS)
    return tmp_path


def train(home: Path, recipe: str, name: str, *settings: str) -> Path:
    run = f"run.name={name}"
    in_this_process("train", recipe, *SETTINGS, run, *settings, folder=home).check()
    return home / "runs" / name


def test_colocation_changes_no_bit_and_the_driver_opens_no_gpu(
    home: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any) -> Any:
        raise AssertionError("the driver opened a GPU")

    apart = train(home, "quickstart", "apart", *ALL_ROLES, *JUDGED)
    shared = train(home, "quickstart", "shared", *ALL_ROLES, *JUDGED, "cluster.share_devices=true")
    assert differences(apart, shared, STEPS) == []
    # As where this process sees GPUs that it is to leave to others.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", opened)
    there = f"cluster.address={cluster}", "cluster.environment={HF_HUB_OFFLINE: '1'}"
    together = train(home, "pooled.yaml", "together", *ALL_ROLES, *there)
    assert differences(apart, together, STEPS) == []
    norms = [line["actor/grad_norm"] for line in read_metrics(apart / "metrics.jsonl")[1:]]
    assert len(norms) == STEPS
    assert min(norms) > 0
    own = {f"{role}[{rank}]" for role in ("reward model", "reference", "critic") for rank in (0, 1)}
    assert {*workers_of(together)} - {*workers_of(apart)} == own
    scored = [line for line in read_metrics(together / "metrics.jsonl") if line["step"]]
    assert all(r["score/parts/model/min"] < r["score/parts/model/max"] for r in scored)
    assert max(r["actor/kl_loss"] for r in scored) > 0
    assert scored[-1]["critic/value/min"] < scored[-1]["critic/value/max"]


def test_no_token_and_no_weight_comes_to_the_driver(
    home: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    read_by: list[str] = []
    init, get = RayHandle.__init__, RayHandle.get

    def note_made(self: RayHandle, *args: Any) -> None:
        made.append(args[1])
        init(self, *args)

    def note_read(self: RayHandle) -> Any:
        read_by.append(threading.current_thread().name)
        return get(self)

    monkeypatch.setattr(RayHandle, "__init__", note_made)
    monkeypatch.setattr(RayHandle, "get", note_read)
    run = train(home, "quickstart", "far", *FAR, f"cluster.address={cluster}")
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["length/response/mean"] > 0
    assert made.count("engine 0") >= 4, "answers to held-out prompts, and those of two steps"
    assert made.count("learner") >= 3, "weights of the start and of two steps"
    # Of groups that are carried over, when a checkpoint is written.
    assert set(read_by) <= {"checkpoint"}
