"""A run whose scorers work in a process apart, with the lag that nobody set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.kill import SETTINGS, differences
from tests.winnow_command import Outcome, in_this_process

from winnow.runs.build import LAG_OF_SCORERS_APART
from winnow.runs.checkpoint import checkpoints_in, load_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6
APART = "reward.workers=1"


@pytest.fixture(scope="module", autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "cache").symlink_to(warm_starts)
    said = train(home, "apart", APART).check().out
    assert f"a score is seen {LAG_OF_SCORERS_APART} decode ticks after its answer's end" in (
        " ".join(said.split())
    )
    return home


def train(home: Path, name: str, *settings: str) -> Outcome:
    return in_this_process(
        *("train", "quickstart", *SETTINGS, f"run.name={name}", "trainer.save_every=1"),
        *("trainer.keep_last=null", "observe.console=plain", *settings),
        folder=home,
        environment={"WINNOW_CACHE": str(home / "cache")},
    )


def cut_off(home: Path, name: str, step: int) -> Path:
    """A copy of the run that died after `step` was saved."""
    run = home / "runs" / name
    shutil.copytree(home / "runs/apart", run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    return run


@pytest.mark.parametrize("workers", [0, 1])
def test_a_continued_run_keeps_its_lag_wherever_scorers_run_now(workers: int, home: Path) -> None:
    run = cut_off(home, f"continued-{workers}", 3)
    train(home, run.name, f"reward.workers={workers}").check()
    newest = checkpoints_in(run / "checkpoints")[-1]
    assert load_state(newest)["sampler"]["score_lag_ticks"] == LAG_OF_SCORERS_APART
    assert differences(home / "runs/apart", run) == []


def test_a_lag_set_later_is_another_recipe(home: Path) -> None:
    run = cut_off(home, "other", 3)
    said = train(home, run.name, APART, f"sampling.score_lag_ticks={LAG_OF_SCORERS_APART + 1}")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert f"sampling.score_lag_ticks was null and is {LAG_OF_SCORERS_APART + 1}" in said.err


def test_the_lag_matters_to_the_bits(home: Path) -> None:
    train(home, "none", APART, "sampling.score_lag_ticks=0").check()
    assert differences(home / "runs/apart", home / "runs/none") != []
