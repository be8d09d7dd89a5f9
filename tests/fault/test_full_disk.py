"""A disk that refuses to take more: one line says which file, and the run goes on when it can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_own_process

from winnow.checkpoint import checkpoints_in
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit (util-linux)"),
]

KIB = 1024
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)
"""
COMMAND = [
    *("train", "mine.yaml", "run.name=demo", "run.threads=1", "model.path=model"),
    *("data.train_files=[rows.jsonl]", "data.eval_files=[rows.jsonl]", "evaluation.max_prompts=1"),
    *("reward.function.path=reward.py", "rollout.n=4", "rollout.max_response_tokens=8"),
    *("sampling.groups_per_step=4", "trainer.steps=2", "trainer.save_every=1"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    digits_folder(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text("rollout: {engine: {slots: 16}}\n")
    (tmp_path / "reward.py").write_text(REWARD)
    row = {"data_source": "digits", "prompt": "12:", "reward_model": {"ground_truth": "12"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    return tmp_path


def run(place: Path, largest_file: int | None = None) -> Outcome:
    return in_own_process(*COMMAND, folder=place, largest_file=largest_file)


@pytest.mark.parametrize(
    ("largest_file", "refused"),
    [
        (4 * KIB, "cannot write runs/demo/eval/step-0.parquet: "),
        (20 * KIB, "cannot save the checkpoint runs/demo/checkpoints/step-"),
    ],
)
def test_a_full_disk_is_named_and_the_run_continues_once_there_is_space(
    place: Path, largest_file: int, refused: str
) -> None:
    said = run(place, largest_file)
    assert said.code == 2
    assert said.err.startswith(f"winnow: {refused}")
    assert said.err.count("\n") == 1
    folder = place / "runs" / "demo"
    assert not [path for path in folder.rglob("*") if path.name.endswith(".partial")]
    for checkpoint in checkpoints_in(folder / "checkpoints"):
        assert (checkpoint.path / "manifest.json").is_file()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line)

    assert run(place).code == 0
    assert [record["step"] for record in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    steps = read_rollouts(folder / "rollouts").column("step").to_pylist()
    assert set(steps) == {1, 2}
    assert checkpoints_in(folder / "checkpoints")[-1].step == 2
