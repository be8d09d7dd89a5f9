"""Output that nothing takes: a reader of a pipe that goes, a full disk, a lost terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from benchmarks.kill import LONGEST_S, STEPS, Lab, differences
from tests.fault.quick_lab import QuickLab
from tests.pauses import go_on

from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WINNOW = str(Path(sys.executable).parent / "winnow")
PLAIN = "observe.console=plain"


def started(lab: Lab, name: str, *settings: str, **streams: Any) -> subprocess.Popen[bytes]:
    """The command in a process of its own, without a server between it and its streams."""
    assert isinstance(lab, QuickLab)
    environment = {**os.environ, "WINNOW_CACHE": str(lab.folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = lab.words(name, PLAIN, *settings)
    return subprocess.Popen([WINNOW, *words], env=environment, **streams)


def figures(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def pipe_of(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


@pytest.mark.parametrize("streams", ["stdout", "both"])
def test_a_run_whose_reader_goes_trains_to_its_end_and_says_so_in_its_log(
    streams: str, lab: Lab
) -> None:
    run = lab.run(f"pipe-{streams}")
    stderr = subprocess.STDOUT if streams == "both" else subprocess.PIPE
    process = started(lab, run.name, stdout=subprocess.PIPE, stderr=stderr)
    pipe_of(process.stdout).readline()
    pipe_of(process.stdout).close()  # as `| head -1`
    said = pipe_of(process.stderr).read() if streams == "stdout" else b""
    assert (process.wait(300), said) == (0, b"")
    told = (run / "log.txt").read_text()
    assert told.count("stdout can no longer be written to (Broken pipe): the run goes on") == 1
    assert "Traceback" not in told
    assert differences(lab.run("undisturbed"), run) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_costs_no_run(lab: Lab) -> None:
    run = lab.run("full-stdout")
    with open("/dev/full", "wb") as full:
        process = started(lab, run.name, stdout=full, stderr=subprocess.PIPE)
        assert (pipe_of(process.stderr).read(), process.wait(300)) == (b"", 0)
    assert "(No space left on device)" in (run / "log.txt").read_text()
    assert figures(run) == STEPS + 1


@pytest.mark.parametrize("more", [(), ("trainer.max_restarts=2",)], ids=["alone", "supervised"])
def test_a_terminal_that_is_gone_saves_the_run_and_ends_it_with_75(
    more: tuple[str, ...], lab: QuickLab
) -> None:
    run = lab.run(f"terminal-{len(more)}")
    ours, theirs = pty.openpty()
    settings = PLAIN, "trainer.save_every=100", *more
    process = lab.start(run.name, *settings, terminal=Path(os.ttyname(theirs)), pauses={1: 0.0})
    driver = lab.stands_still(process, run.name, 1)
    os.close(theirs)
    os.close(ours)
    go_on(driver, signal.SIGHUP if more else None)  # alone, it went on by itself
    assert process.wait(LONGEST_S) == 75
    assert "Traceback" not in (run / "log.txt").read_text()
    (saved,) = checkpoints_in(run / "checkpoints")
    assert 1 <= saved.step < STEPS
    assert lab.start(run.name, "trainer.save_every=1").wait(120) == 0
    assert differences(lab.run("undisturbed"), run) == []
