"""A run whose answers are scored in two processes apart, and what becomes of it when one dies."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from benchmarks.kill import LATE_SCORER, Lab, code_of, differences
from tests.fault.quick_lab import QuickLab
from tests.pauses import go_on
from tests.processes import descendants, gone, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
APART = "reward.processes=2"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A user's function in workers, which takes another time for each answer and in each run."""
    file = tmp_path_factory.mktemp("late") / "late.py"
    file.write_text(LATE_SCORER)
    return (
        *(f"reward.function.path={file}", "+reward.function.kwargs={longest: 0.02}"),
        *("reward.workers=1", "trainer.save_every=1"),
    )


@pytest.fixture(scope="module")
def calm(lab: Lab, settings: tuple[str, ...]) -> Path:
    """An undisturbed run that scores in its own process."""
    assert lab.start("calm-rewards", *settings).wait(240) == 0
    return lab.run("calm-rewards")


def test_where_answers_are_scored_changes_no_bit(
    calm: Path, lab: QuickLab, settings: tuple[str, ...]
) -> None:
    run = lab.run("rewards-apart")
    assert lab.start(run.name, *settings, APART, afresh=True).wait(240) == 0
    assert differences(calm, run) == []


def test_a_scoring_process_that_is_killed_costs_nothing_but_time(
    calm: Path, lab: QuickLab, settings: tuple[str, ...]
) -> None:
    run = lab.run("reward-killed")
    more = APART, "trainer.max_restarts=2"
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
