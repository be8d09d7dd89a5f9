"""Runs that stand still where a test disturbs them, however late it looks.

A test that waits for a line of metrics and then sends a signal is too late where the system lets
it wait for seconds: a small run is over by then. So the run stops itself, as SIGSTOP stops a
process, until it gets SIGCONT; what is sent meanwhile waits. `tests.forked` has a process with the
variable `PLACE` do so. Moments are named in that folder, each for one pause.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.processes import is_stopped, is_waiting

PLACE = "WINNOW_TESTS_PAUSES"
LONGEST_S = 240.0


def ask(folder: Path, moments: Mapping[int | str, float]) -> dict[str, str]:
    """Have a run stand still; returns the variables of its process.

    Args:
        moments: the seconds that pass until then, since a step's line of metrics, by its number,
            or since just before the first file or folder of this name was opened or made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for moment, seconds in moments.items():
        (folder / str(moment)).write_text(str(seconds))
    return {PLACE: str(folder)}


def wait_for_pause(folder: Path, moment: int | str, poll: Callable[[], int | None]) -> int:
    """Wait until the run stands still; the process that does.

    Args:
        poll: the exit code of the process that was started, None while it runs.
    """
    told = folder / f"{moment}.pid"
    give_up = time.monotonic() + LONGEST_S
    while not (told.exists() and is_stopped(int(told.read_text()))):
        assert poll() is None, f"the run ended before {moment}"
        assert time.monotonic() < give_up, f"the run did not come to {moment}"
        time.sleep(0.002)
    return int(told.read_text())


def go_on(pid: int, number: int | None = None) -> None:
    """Let it go on, once this signal waits for it, which it may get from another process."""
    give_up = time.monotonic() + LONGEST_S
    while number is not None and not is_waiting(pid, number):
        assert time.monotonic() < give_up, f"nobody sent signal {number}"
        time.sleep(0.002)
    os.kill(pid, signal.SIGCONT)


def install() -> None:
    """Stand still from now on where it is asked for."""
    from winnow.observe.jsonl import MetricsLog

    folder, usual = Path(os.environ[PLACE]), MetricsLog.log

    def log(self: MetricsLog, step: int, record: Any) -> None:
        usual(self, step, record)
        _pause_if_asked(folder, str(step))

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir") and isinstance(arguments[0], str | os.PathLike):
            place = Path(arguments[0])
            if place.parent != folder:
                _pause_if_asked(folder, place.name)

    MetricsLog.log = log  # type: ignore[method-assign]
    sys.addaudithook(audit)


def _pause_if_asked(folder: Path, moment: str) -> None:
    asked = folder / moment
    if not os.path.exists(asked):
        return
    seconds = float(asked.read_text())
    asked.unlink()
    if seconds:
        threading.Timer(seconds, _pause, (folder, moment)).start()
    else:
        _pause(folder, moment)


def _pause(folder: Path, moment: str) -> None:
    draft = folder / f"{moment}.draft"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"{moment}.pid")
    os.kill(os.getpid(), signal.SIGSTOP)
