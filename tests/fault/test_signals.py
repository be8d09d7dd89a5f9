"""Signals, hangs and crashes of real processes: what they leave, and how the run goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from benchmarks.kill import (
    LONGEST_S,
    STEPS,
    Lab,
    code_of,
    differences,
    leftovers,
    wait_for,
)
from tests.fault.quick_lab import QuickLab
from tests.forked import Forked
from tests.pauses import go_on
from tests.processes import descendants, driver_of, gone

from winnow.checkpoints.checkpoint import checkpoints_in, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCORER = """
import os, signal, time

calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None, order=""):
    global calls
    calls += 1
    if calls == 200 and os.path.exists(order):
        what = open(order).read()
        os.remove(order)
        if what == "hang":
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0 if solution_str.rpartition("#")[2] == ground_truth else -1.0
"""


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def last_step(run: Path) -> int:
    written = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    return int(json.loads(written.rpartition("\n")[2])["step"]) if written else 0


def ended_by(lab: QuickLab, name: str, number: int, *settings: str) -> int:
    """Start a run, send it a signal a little after its second step; its exit code."""
    process = lab.start(name, *settings, pauses={2: 0.05})
    pid = lab.stands_still(process, name, 2)
    process.send_signal(number)
    go_on(pid, number)
    return code_of(process, LONGEST_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_request_to_stop_saves_what_was_reached_and_the_run_goes_on_exactly(
    number: int, code: int, lab: QuickLab
) -> None:
    name = f"signal-{number}"
    run = lab.run(name)
    # No checkpoint is due before the end: only the stop saves one.
    assert ended_by(lab, name, number, "trainer.save_every=100") == code
    assert list(leftovers(run)) == []
    (saved,) = checkpoints_in(run / "checkpoints")
    assert 2 <= saved.step < STEPS
    verify(saved)
    assert lab.start(name, "trainer.save_every=1").wait(120) == 0
    assert differences(lab.run("undisturbed"), run) == []


def test_the_machines_end_saves_what_was_reached_and_the_run_goes_on(lab: QuickLab) -> None:
    run, end_s = lab.run("expires"), time.time() + 10.0
    end = datetime.fromtimestamp(end_s, UTC).isoformat()
    soon = f"trainer.expires_at={end}", "trainer.expiry_margin_s=2"
    # It has no other end, nor checkpoint; where the machine is slow it stops at its first step.
    process = lab.start(run.name, *soon, "trainer.steps=100000", "trainer.save_every=null")
    assert code_of(process, LONGEST_S) == 75
    assert list(leftovers(run)) == []
    (saved,) = checkpoints_in(run / "checkpoints")
    verify(saved)
    told = (run / "log.txt").read_text()
    assert re.search(
        r"Stopped by the machine's end at \S+ \S+ UTC \(trainer\.expires_at\) after", told
    )
    time.sleep(max(0.0, end_s - time.time()))
    more = f"trainer.steps={saved.step + 1}"
    # An end that is past does not count.
    assert lab.start(run.name, *soon, more).wait(120) == 0
    assert "is past" in (run / "log.txt").read_text()
    assert lines(run) == saved.step + 2


def test_ctrl_c_twice_ends_at_once_and_leaves_no_draft(lab: QuickLab) -> None:
    run, draft = lab.run("twice"), ".step-2.partial"
    process = lab.start(run.name, "trainer.save_every=1", pauses={draft: 0.0})
    pid = lab.stands_still(process, run.name, draft)
    process.send_signal(signal.SIGINT)
    go_on(pid)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert code_of(process, LONGEST_S) == 130
    assert list(leftovers(run)) == []
    assert lab.start(run.name, "trainer.save_every=1").wait(120) == 0
    assert differences(lab.run("undisturbed"), run) == []


def test_a_stop_before_the_first_step_leaves_a_run_that_can_begin_again(lab: QuickLab) -> None:
    run = lab.run("early")
    process = lab.start(run.name, pauses={"log.txt": 0.0})
    pid = lab.stands_still(process, run.name, "log.txt")
    process.send_signal(signal.SIGTERM)
    go_on(pid)
    assert code_of(process, LONGEST_S) == 75
    assert list(leftovers(run)) == []
    assert lab.start(run.name, "trainer.save_every=1").wait(120) == 0
    assert differences(lab.run("undisturbed"), run) == []


def test_supervised_runs_survive_and_end_with_the_same_bits(lab: Lab, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(SCORER)

    def start(what: str, *more: str) -> Forked:
        return lab.start(
            f"scored-{what}",
            *(f"reward.function.path={scorer}", f"+reward.function.kwargs.order={tmp_path / what}"),
            "reward.workers=0",  # in the run's own process, which is to die or to hang
            "trainer.save_every=1",
            *more,
        )

    for what in ("hang", "kill"):
        (tmp_path / what).write_text(what)
    # On a busy machine to start alone takes seconds without progress; the others run while this one
    # hangs for as long.
    hung = start("hang", "trainer.max_restarts=3", "trainer.stall_timeout_s=15")
    assert wait_for(hung, lambda: not (tmp_path / "hang").exists())
    killed = start("kill", "trainer.max_restarts=3", "trainer.stall_timeout_s=300")
    assert start("calmly").wait(240) == 0
    assert killed.wait(240) == 0
    assert hung.wait(240) == 0
    for what in ("hang", "kill"):
        assert not (tmp_path / what).exists(), "it was not disturbed"
        assert differences(lab.run("scored-calmly"), lab.run(f"scored-{what}")) == []


def test_a_supervised_run_stops_when_its_parent_is_asked_or_gone(lab: QuickLab) -> None:
    run = lab.run("parent")
    assert ended_by(lab, run.name, signal.SIGTERM, "trainer.max_restarts=2") == 75
    assert checkpoints_in(run / "checkpoints")
    again = "trainer.max_restarts=2", "trainer.save_every=1"
    process = lab.start(run.name, *again, pauses={"log.txt": 0.0})
    child = lab.stands_still(process, run.name, "log.txt")
    assert child == driver_of(process.pid)
    process.kill()
    process.wait()
    go_on(child)
    if not gone({child}):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlived its parent")
    assert lines(run) < STEPS
    assert lab.start(run.name, "trainer.save_every=1").wait(120) == 0
    assert differences(lab.run("undisturbed"), run) == []


LONG = "trainer.steps=1000", "trainer.save_every=1000"
SWEPT = "--multirun", "--jobs", "2", "optim.lr=2e-4,4e-4", *LONG


def test_runs_of_a_sweep_or_of_python_save_and_end_when_it_is_killed(lab: QuickLab) -> None:
    runs = [lab.run(name) for name in ("swept/lr=0.0002", "swept/lr=0.0004", "called")]
    starting = [lab.start("swept", *SWEPT), lab.start_in_python("called", *LONG)]
    for process, run in zip((*starting[:1], *starting), runs, strict=True):
        assert wait_for(process, lambda run=run: lines(run) >= 2)  # type: ignore[misc]
    children = {child for process in starting for child in descendants(process.pid)}
    assert len(children) >= len(runs)
    for process in starting:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert gone(children)
    # No checkpoint is due before the end: only a stop saves one.
    saved = [checkpoints_in(run / "checkpoints")[-1].step for run in runs]
    assert all(1 <= step < 1000 for step in saved)
    # The same command goes on, and Ctrl-C reaches its runs.
    sweep = lab.start("swept", *SWEPT)
    # The line of the step that a stop came in may be written after the run has gone on.
    assert wait_for(
        sweep, lambda: all(last_step(r) >= n + 2 for r, n in zip(runs, saved[:2], strict=False))
    )
    sweep.send_signal(signal.SIGINT)
    assert code_of(sweep, 60) == 130
    for run, step in zip(runs[:2], saved, strict=False):
        assert checkpoints_in(run / "checkpoints")[-1].step > step
