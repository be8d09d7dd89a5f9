"""Output that nothing takes: a reader of a pipe that goes, a full disk, a lost terminal."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest
from benchmarks.kill import LONGEST_S, STEPS, differences
from tests.fault.quick_lab import QuickLab
from tests.pauses import go_on

from winnow.checkpoints.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLAIN = "observe.console=plain"


@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_a_run_whose_reader_goes_trains_to_its_end_and_says_so_in_its_log(
    streams: str, lab: QuickLab, tmp_path: Path
) -> None:
    run, pipe, errors = lab.run(f"pipe-{streams}"), tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    err = pipe if streams == "both" else errors
    process = lab.start(run.name, PLAIN, "trainer.save_every=1", out=pipe, err=err)
    with pipe.open() as reader:
        reader.readline()  # as `| head -1`
    assert process.wait(300) == 0
    assert not errors.exists() or errors.read_text() == ""
    told = (run / "log.txt").read_text()
    assert told.count("stdout can no longer be written to (Broken pipe): the run goes on") == 1
    assert "Traceback" not in told
    assert differences(lab.run("undisturbed"), run) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_costs_no_run(lab: QuickLab, tmp_path: Path) -> None:
    run, errors = lab.run("full-stdout"), tmp_path / "errors"
    short = "trainer.steps=2", "evaluation.every=2"
    process = lab.start(run.name, PLAIN, *short, out=Path("/dev/full"), err=errors)
    assert (process.wait(300), errors.read_text()) == (0, "")
    assert "(No space left on device)" in (run / "log.txt").read_text()


@pytest.mark.parametrize("more", [(), ("trainer.max_restarts=2",)], ids=["alone", "supervised"])
def test_a_terminal_that_is_gone_saves_the_run_and_ends_it_with_75(
    more: tuple[str, ...], lab: QuickLab
) -> None:
    run = lab.run(f"terminal-{len(more)}")
    ours, theirs = pty.openpty()
    settings = PLAIN, "trainer.save_every=100", *more
    terminal = Path(os.ttyname(theirs))
    process = lab.start(run.name, *settings, terminal=terminal, pauses={1: 0.0})
    driver = lab.stands_still(process, run.name, 1)
    os.close(theirs)
    os.close(ours)
    go_on(driver, signal.SIGHUP if more else None)  # alone, it went on by itself
    assert process.wait(LONGEST_S) == 75
    assert "Traceback" not in (run / "log.txt").read_text()
    (saved,) = checkpoints_in(run / "checkpoints")
    assert 1 <= saved.step < STEPS
