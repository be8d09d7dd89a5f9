"""Scorers that misbehave, in runs of their own: what the user is told, what stays the same."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from benchmarks.kill import (
    LATE_SCORER,
    LONGEST_S,
    Lab,
    code_of,
    differences,
    size,
    wait_for,
)
from tests.fault.quick_lab import QuickLab
from tests.pauses import go_on
from tests.processes import descendants, gone, is_alive, workers_of

from winnow.checkpoints.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LATE_ASYNC = LATE_SCORER.replace("def compute", "async def compute").replace(
    "time.sleep", "await sleep"
)
LATE_ASYNC = "from asyncio import sleep\n" + LATE_ASYNC
STUCK = """
import os, re, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, folder=""):
    open(f"{folder}/{os.getpid()}", "w").close()
    print("stuck", flush=True)
    time.sleep(1000)
"""


def reward(scorer: Path, **kwargs: object) -> list[str]:
    given = ", ".join(f"{key}: {value}" for key, value in kwargs.items())
    return [f"reward.function.path={scorer}", f"+reward.function.kwargs={{{given}}}"]


# Without the number of ticks the lag would depend on where answers are scored.
COMMON = ("trainer.save_every=1", "sampling.score_lag_ticks=16")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A function that takes another time for each answer and in each run."""
    file = tmp_path_factory.mktemp("late") / "scorer.py"
    file.write_text(LATE_SCORER)
    return file


@pytest.fixture(scope="module")
def calm(lab: Lab, scorer: Path) -> Path:
    """An undisturbed run that scores in its own process, at once."""
    settings = *reward(scorer, longest=0.0), *COMMON, "reward.workers=0"
    assert lab.start("here", *settings).wait(120) == 0
    return lab.run("here")


def test_where_and_when_answers_are_scored_changes_no_bit(
    lab: QuickLab, scorer: Path, calm: Path, tmp_path: Path
) -> None:
    waiting = tmp_path / "waiting.py"
    waiting.write_text(LATE_ASYNC)
    late_async = [*reward(waiting, longest=0.05), *COMMON, "reward.workers=0"]
    assert lab.start("here-async", *late_async).wait(240) == 0
    assert differences(calm, lab.run("here-async")) == []

    late = [*reward(scorer, longest=0.05), *COMMON, "reward.workers=2"]
    run = lab.run("apart-killed")
    process = lab.start(run.name, *late, pauses={2: 0.05})
    lab.stands_still(process, run.name, 2)
    process.kill()
    process.wait()
    assert checkpoints_in(run / "checkpoints")
    assert lab.start(run.name, *late).wait(240) == 0
    assert differences(calm, run) == []


def test_a_scoring_process_that_is_killed_costs_nothing_but_time_and_no_bit(
    lab: QuickLab, scorer: Path, calm: Path
) -> None:
    run = lab.run("reward-killed")
    settings = *reward(scorer, longest=0.02), *COMMON, "reward.workers=1"
    more = "reward.processes=2", "trainer.max_restarts=2"
    process = lab.start(run.name, *settings, *more, pauses={2: 0.05})
    driver = lab.stands_still(process, run.name, 2)
    workers = workers_of(run)
    assert sorted(workers) == ["reward[0]", "reward[1]"]
    found = list(workers.values())
    theirs = {child for victim in found for child in descendants(victim)}
    assert len(theirs) == 2  # the function's own processes
    os.kill(found[1], signal.SIGKILL)
    go_on(driver)
    assert gone({*found, *theirs})
    assert code_of(process, 300) == 0
    assert differences(calm, run) == []
    assert re.search(r"reward\[\d\] was killed by SIGKILL", (run / "log.txt").read_text())


@pytest.mark.parametrize(
    ("number", "code", "supervised"),
    [
        (signal.SIGKILL, -9, False),
        (signal.SIGTERM, 75, False),
        (signal.SIGKILL, -9, True),
    ],
)
def test_no_worker_outlives_its_run(
    number: int, code: int, supervised: bool, lab: Lab, tmp_path: Path
) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(STUCK)
    notes = tmp_path / "workers"
    notes.mkdir()
    name = f"orphans-{number}-{supervised}"
    process = lab.start(
        name,
        *reward(scorer, folder=f"'{notes}'"),
        *("reward.workers=2", "reward.timeout_s=1000", "evaluation.before=false"),
        *(["trainer.max_restarts=2"] if supervised else []),
    )
    assert wait_for(process, lambda: len(list(notes.iterdir())) == 2)
    workers = {int(path.name) for path in notes.iterdir()}
    assert all(map(is_alive, workers))
    process.send_signal(number)
    assert code_of(process, LONGEST_S) == code
    assert gone(workers)
    assert size(lab.run(name) / "log.txt") > 0
