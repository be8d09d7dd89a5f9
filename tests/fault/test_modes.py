"""Modes that sample beside learning: killed, stopped, with failing scorers, in real processes."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from benchmarks.kill import STEPS, Lab, code_of, differences, kill_at, leftovers, wait_for
from tests.fault.test_signals import lines

from winnow.observe.jsonl import read_metrics
from winnow.runs.checkpoint import checkpoints_in, load_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BESIDE = ("trainer/mode=one_step_off", "sampling.max_staleness=2", "evaluation.every=3")


@pytest.fixture(scope="module")
def calm(lab: Lab) -> Path:
    """An undisturbed run of one_step_off."""
    assert lab.start("calm-beside", *BESIDE, "trainer.save_every=1").wait(240) == 0
    return lab.run("calm-beside")


def test_the_same_bits_come_again_and_every_group_but_the_first_is_one_step_off(
    calm: Path, lab: Lab
) -> None:
    assert lab.start("again-beside", *BESIDE, "trainer.save_every=2").wait(240) == 0
    assert differences(calm, lab.run("again-beside")) == []
    records = read_metrics(calm / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["sampling/staleness/max"] == 0
    assert all(1 <= record["sampling/staleness/max"] <= 2 for record in records[1:])


def test_a_boundary_holds_the_step_that_is_cut_and_not_learnt(calm: Path) -> None:
    for checkpoint in checkpoints_in(calm / "checkpoints"):
        state = load_state(checkpoint)
        steps = [step.version + 1 for step in state["pending"]["steps"]]
        assert steps == ([checkpoint.step + 1] if checkpoint.step < STEPS else [])
        assert state["sampler"]["ledger"]["version"] == checkpoint.step


def test_killed_at_random_moments_it_ends_with_the_same_bits(calm: Path, lab: Lab) -> None:
    rng = random.Random(3)
    killed = 0
    for number in range(2):
        name = f"killed-beside-{number}"
        for _ in range(3):
            process = lab.start(name, *BESIDE, "trainer.save_every=1")
            killed += kill_at(lab, process, name, rng) is not None
        assert lab.start(name, *BESIDE, "trainer.save_every=1").wait(240) == 0
        assert differences(calm, lab.run(name)) == []
    assert killed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_request_to_stop_waits_for_the_barrier_and_the_run_goes_on_exactly(
    number: int, code: int, calm: Path, lab: Lab
) -> None:
    run = lab.run(f"stopped-beside-{number}")
    process = lab.start(run.name, *BESIDE, "trainer.save_every=100")
    assert wait_for(process, lambda: lines(run) >= 3)
    process.send_signal(number)
    assert code_of(process, 120) == code
    assert list(leftovers(run)) == []
    (saved,) = checkpoints_in(run / "checkpoints")
    assert 2 <= saved.step < STEPS
    assert lab.start(run.name, *BESIDE, "trainer.save_every=1").wait(240) == 0
    assert differences(calm, run) == []
