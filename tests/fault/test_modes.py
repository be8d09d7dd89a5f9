"""Modes that sample beside learning: killed, stopped, with failing scorers, in real processes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.kill import LONGEST_S, STEPS, Lab, code_of, differences
from tests.fault.quick_lab import QuickLab
from tests.fault.test_ranks import check_same
from tests.pauses import go_on
from tests.processes import workers_of

from winnow.checkpoints.checkpoint import checkpoints_in, load_state
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BESIDE = ("trainer/mode=one_step_off", "sampling.max_staleness=2", "evaluation.every=3")


@pytest.fixture(scope="module")
def calm(lab: Lab) -> Path:
    """An undisturbed run of one_step_off."""
    assert lab.start("calm-beside", *BESIDE, "trainer.save_every=1").wait(240) == 0
    return lab.run("calm-beside")


def test_groups_are_one_step_off_and_a_boundary_holds_the_step_that_is_cut(calm: Path) -> None:
    records = read_metrics(calm / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["sampling/staleness/max"] == 0
    assert all(1 <= record["sampling/staleness/max"] <= 2 for record in records[1:])
    for checkpoint in checkpoints_in(calm / "checkpoints"):
        state = load_state(checkpoint)
        steps = [step.version + 1 for step in state["pending"]["steps"]]
        assert steps == ([checkpoint.step + 1] if checkpoint.step < STEPS else [])
        assert state["sampler"]["ledger"]["version"] == checkpoint.step


def killed(lab: QuickLab, name: str, settings: Sequence[str], rng: random.Random) -> Path:
    """Kill a run at a random moment of its third step; finish it."""
    moments = {2: rng.random() * lab.seconds / STEPS}
    process = lab.start(name, *settings, pauses=moments)
    lab.stands_still(process, name, 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert lab.start(name, *settings).wait(LONGEST_S) == 0
    return lab.run(name)


def test_killed_at_a_random_moment_it_ends_with_the_same_bits(calm: Path, lab: QuickLab) -> None:
    run = killed(lab, "killed-beside", (*BESIDE, "trainer.save_every=1"), random.Random(3))
    assert differences(calm, run) == []


def test_two_engines_and_two_ranks_end_with_the_same_bits_though_a_rank_is_killed(
    lab: QuickLab,
) -> None:
    shared = *BESIDE, "trainer/strategy=fsdp2", "rollout.engine.processes=2", "trainer.save_every=1"
    assert lab.start("calm-shared", *shared).wait(240) == 0
    run = lab.run("killed-shared")
    process = lab.start(run.name, *shared, "trainer.max_restarts=1", pauses={2: 0.05})
    driver = lab.stands_still(process, run.name, 2)
    os.kill(workers_of(run)["learner[1]"], signal.SIGKILL)
    go_on(driver)
    assert code_of(process, LONGEST_S) == 0
    check_same(lab.run("calm-shared"), run)
    assert "learner[1] was killed by SIGKILL" in (run / "log.txt").read_text()


RUNNING_ON = (
    *("trainer/mode=async", "run.deterministic=false", "sampling.max_staleness=2"),
    *("sampling.lookahead=1", "trainer.save_every=1"),
)


def check_nothing_is_lost_or_repeated(run: Path) -> None:
    """By the ledger's file, and what the last checkpoint holds: each group has one course."""
    rows = read_ledger(RunFolder(run)).to_pylist()
    trained = [row for row in rows if row["fate"] == "trained"]
    ids = [row["group"] for row in trained]
    assert ids == sorted(set(ids))
    assert [row["learnt_step"] for row in trained] == sorted([*range(1, STEPS + 1)] * 8)
    assert all(row["staleness"] <= 2 for row in rows)
    assert {row["fate"] for row in rows}.isdisjoint({"stale", "surplus"})
    ledger = load_state(checkpoints_in(run / "checkpoints")[-1])["sampler"]["ledger"]
    groups = ledger["groups"]
    settled = [each.group.id for each in ledger["accounting"].settled]
    alive = [*groups.open, *groups.qualified, *groups.failing, *settled]
    assert sorted([row["group"] for row in rows] + alive) == list(range(ledger["next_id"]))


def test_async_killed_at_a_random_moment_loses_no_group_and_learns_none_twice(
    lab: QuickLab,
) -> None:
    run = killed(lab, "killed-async", RUNNING_ON, random.Random(4))
    check_nothing_is_lost_or_repeated(run)


def test_async_goes_on_without_an_engine_that_is_killed_and_loses_no_answer(
    lab: QuickLab,
) -> None:
    run = lab.run("engine-killed-async")
    process = lab.start(run.name, *RUNNING_ON, "rollout.engine.processes=2", pauses={2: 0.05})
    driver = lab.stands_still(process, run.name, 2)
    os.kill(workers_of(run)["engine 1[0]"], signal.SIGKILL)
    go_on(driver)
    assert process.wait(LONGEST_S) == 0
    assert "engine 1 died, 1 of 2 engines remain" in (run / "log.txt").read_text()
    check_nothing_is_lost_or_repeated(run)
    # Each answer of every group that is told of was finished: none failed with its engine.
    rows = read_ledger(RunFolder(run)).to_pylist()
    assert all(row["fate"] != "failed" and row["answers"] == 4 for row in rows)
