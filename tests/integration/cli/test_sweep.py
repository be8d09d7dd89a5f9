"""The processes of `winnow train … --multirun`: what signals, a lost reader and other words do.

Short programs stand where trainings would; `tests/fault/test_signals.py` sweeps for real.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from winnow.cli.sweep import Sweep, run_sweep
from winnow.errors import ConfigError

PROGRAM = """
import os, signal, sys, time
name, seconds = sys.argv[1], float(sys.argv[2])
def stop(number, frame):
    os.write(1, b"told %d\\n" % number)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"begun\\n")
time.sleep(seconds)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a sweep replaces
    return tmp_path / "swept"


def lasting(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each run take so long, instead of training."""
    start = [sys.executable, "-S", "-c", PROGRAM]
    monkeypatch.setattr(Sweep, "command", lambda self, name: [*start, name, str(seconds)])


def swept(folder: Path, values: str, recipe: str = "quickstart", jobs: int = 2) -> int:
    words = [f"run.dir={folder.parent}", f"run.name={folder.name}", f"optim.lr={values}"]
    return run_sweep(recipe, words, jobs, Console(width=80))


def said(folder: Path) -> dict[str, str]:
    return {file.stem: file.read_text() for file in folder.glob("*.txt")}


def when_begun(folder: Path, count: int, number: int) -> threading.Thread:
    """Send this process a signal once so many runs have begun."""

    def send() -> None:
        while list(said(folder).values()).count("begun\n") < count:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_request_to_stop_reaches_each_run_and_begins_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lasting(60, monkeypatch)
    before = signal.getsignal(signal.SIGTERM)
    thread = when_begun(folder, 2, signal.SIGTERM)
    assert swept(folder, "1,2,3") == 75
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert said(folder) == dict.fromkeys(("lr=1", "lr=2"), "begun\ntold 15\n")
    assert json.loads((folder / "sweep.json").read_text())["codes"] == {"lr=1": 75, "lr=2": 75}
    assert capsys.readouterr().out.endswith("Stopped; run the same command to continue.\n")
    lasting(0, monkeypatch)
    assert swept(folder, "1,2,3") == 0
    assert said(folder) == {
        **dict.fromkeys(("lr=1", "lr=2"), "begun\ntold 15\nbegun\n"), "lr=3": "begun\n",
    }  # fmt: skip


def test_a_hang_up_that_is_ignored_stops_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(0.5, monkeypatch)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = when_begun(folder, 1, signal.SIGHUP)
        assert swept(folder, "1,2", jobs=1) == 0
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert said(folder) == {"lr=1": "begun\n", "lr=2": "begun\n"}


def test_a_sweep_outlives_the_reader_of_its_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(0.1, monkeypatch)
    reader, writer = os.pipe()
    with suppress(OSError), os.fdopen(writer, "w", buffering=1) as output:
        monkeypatch.setattr(sys, "stdout", output)
        os.close(reader)
        assert swept(folder, "1,2", jobs=1) == 0
    assert said(folder) == {"lr=1": "begun\n", "lr=2": "begun\n"}


def test_other_values_run_alone_and_another_recipe_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(60, monkeypatch)
    thread = when_begun(folder, 1, signal.SIGTERM)
    assert swept(folder, "1,2", jobs=1) == 75
    thread.join()
    lasting(0, monkeypatch)
    assert swept(folder, "3,4") == 0
    saved = json.loads((folder / "sweep.json").read_text())
    assert list(saved["runs"]) == ["lr=1", "lr=2", "lr=3", "lr=4"]
    assert saved["codes"] == {"lr=1": 75, "lr=3": 0, "lr=4": 0}
    with pytest.raises(ConfigError, match=r"is a sweep of quickstart, not of rloo"):
        swept(folder, "3,4", "rloo")
