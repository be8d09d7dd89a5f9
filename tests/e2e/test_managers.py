"""Runs scored by each manager: the same bits wherever scores come from, and each part's figures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS, contents, differences, figures
from tests import winnow_command
from tests.processes import gone
from tests.winnow_command import WINNOW, Outcome, cut_off, winnow

from winnow.builders.run import ASYNC_SCORE_LAG_TICKS
from winnow.checkpoints.checkpoint import checkpoints_in, load_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
REWARD = """
def one(text, truth):
    right = text.rpartition("#")[2] == truth
    return {"score": 1.0 if right else -0.5, "acc": float(right), "hashes": text.count("#")}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return one(solution_str, ground_truth)

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [one(*each) for each in zip(solution_strs, ground_truths)]

class Own:
    def __init__(self, config): ...

    async def score(self, prompt, text):
        return one(text, prompt.ground_truth)
"""
SHORT = (
    *SETTINGS,
    *("trainer.steps=2", "evaluation.every=2", "trainer.save_every=2"),
    # Whoever scores: when a score arrives is the same.
    "sampling.score_lag_ticks=4",
)
FUNCTION = "reward.function.path=reward.py"
BATCH = ("reward/manager=batch", FUNCTION, "reward.function.name=compute_scores")


def train(home: Path, name: str, *settings: str) -> Outcome:
    return winnow(home, "train", "quickstart", *SHORT, f"run.name={name}", *settings)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With a reward file, and a run that it scored in the run's own process."""
    (home / "reward.py").write_text(REWARD)
    train(home, "naive", "reward/manager=naive", FUNCTION).check()
    return home


@pytest.fixture(scope="module")
def service(home: Path) -> Iterator[str]:
    """The address of `winnow reward serve`, which ends at SIGTERM and leaves nothing."""
    process = subprocess.Popen(
        [WINNOW, "reward", "serve", "--function", "reward.py", "--port", "0", "--workers", "1"],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = re.search(r"http://\S+", said)
    assert found, said
    yield found[0]
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    workers = {int(word) for task in tasks for word in (task / "children").read_text().split()}
    assert workers
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert errors == "winnow: stopped by SIGTERM\n"
    assert gone(workers)


def is_the_same(home: Path, name: str) -> bool:
    runs = [home / "runs" / each for each in ("naive", name)]
    return all(
        look(runs[0]) == look(runs[1])
        for look in (
            figures,
            lambda run: contents(run / "rollouts"),
            lambda run: contents(run / "checkpoints/step-2/model"),
        )
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch", (*BATCH, "reward.workers=2", "reward.manager.max_answers=3")),
        ("custom", ("reward/manager=custom", "reward.manager.path=reward.py:Own")),
    ],
)
def test_who_calls_the_scorer_changes_no_bit(
    name: str, settings: tuple[str, ...], home: Path
) -> None:
    train(home, name, *settings).check()
    assert is_the_same(home, name)


def test_a_service_changes_no_bit_either(home: Path, service: str) -> None:
    train(home, "remote", "reward/manager=remote", f"reward.manager.url={service}").check()
    assert is_the_same(home, "remote")


def test_a_continued_run_keeps_the_lag_that_nobody_set_wherever_scorers_run_now(
    home: Path,
) -> None:
    two = "trainer.steps=2"
    said = winnow_command.train(home, "apart", two, "reward.workers=1").check().out
    lag = f"a score arrives {ASYNC_SCORE_LAG_TICKS} decode ticks after its answer ends"
    assert lag in " ".join(said.split())
    run = cut_off(home, "apart", "continued", 1)
    winnow_command.train(home, run.name, two, "reward.workers=0").check()
    newest = checkpoints_in(run / "checkpoints")[-1]
    assert load_state(newest)["sampler"]["score_lag_ticks"] == ASYNC_SCORE_LAG_TICKS
    assert differences(home / "runs/apart", run, steps=2) == []
