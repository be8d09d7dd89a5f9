"""The supervisor with children that are a few lines of Python."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import gone

from winnow.run.supervisor import Supervisor

CHILD = """
import os, signal, sys, time
pipe, folder, life, notes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
def tell(line):
    os.write(pipe, (line + "\\n").encode())
with open(notes, "a") as file:
    file.write(f"{folder}\\n")
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


class Lives:
    """A supervisor whose child's n-th life is the n-th script (the last for all later ones)."""

    def __init__(self, folder: Path, *scripts: str, restarts: int = 9, stall_s: float = 30) -> None:
        self.notes = folder / "notes"
        self.said: list[str] = []
        self.scripts = scripts
        self.begun = 0
        self.supervisor = Supervisor(
            self.command, restarts, stall_s, first_pause_s=0.01, report=self.said.append
        )

    def command(self, pipe: int, folder: str | None) -> list[str]:
        script = CHILD + self.scripts[min(self.begun, len(self.scripts) - 1)]
        self.begun += 1
        words = [str(pipe), str(folder), str(self.begun), str(self.notes)]
        return [sys.executable, "-c", script, *words]

    @property
    def folders(self) -> list[str]:
        """What each life was told to continue."""
        return self.notes.read_text().splitlines()


@pytest.mark.parametrize("code", [0, 2, 75])
def test_an_end_that_is_meant_is_passed_on(code: int, tmp_path: Path) -> None:
    lives = Lives(tmp_path, f"sys.exit({code})")
    assert lives.supervisor.run() == code
    assert lives.begun == 1
    assert lives.said == []


@pytest.mark.parametrize(
    ("end", "why"),
    [(DIES, "was killed by SIGKILL"), ("raise ValueError", "ended with exit code 1")],
)
def test_a_death_is_followed_by_a_life_that_continues_the_folder(
    end: str, why: str, tmp_path: Path
) -> None:
    lives = Lives(tmp_path, f"tell('folder /runs/x'); tell('step 3'); {end}", "sys.exit(0)")
    assert lives.supervisor.run() == 0
    assert lives.folders == ["None", "/runs/x"]
    assert lives.said == [f"winnow: the run {why} after step 3; restart 1 of 9 in 0.01 s"]


def test_failures_at_the_same_step_end_it(tmp_path: Path) -> None:
    lives = Lives(tmp_path, f"tell('step 3'); {DIES}")
    assert lives.supervisor.run() == 128 + signal.SIGKILL
    assert lives.begun == 3
    assert "3 times in a row" in lives.said[-1]
    assert "after step 3" in lives.said[-1]


def test_failures_with_progress_between_them_go_on_to_the_limit(tmp_path: Path) -> None:
    lives = Lives(tmp_path, f"tell(f'step {{life}}'); {DIES}", restarts=6)
    assert lives.supervisor.run() == 128 + signal.SIGKILL
    assert lives.begun == 7
    assert "trainer.max_restarts=6 is used up" in lives.said[-1]


def test_a_child_without_progress_is_killed_and_started_again(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "tell('step 1'); time.sleep(3000)", "sys.exit(0)", stall_s=1.0)
    assert lives.supervisor.run() == 0
    assert "made no progress for 1 s after step 1" in lives.said[0]


def test_a_slow_child_with_progress_is_left_alone(tmp_path: Path) -> None:
    script = "for _ in range(16): tell('beat'); time.sleep(0.3)\nsys.exit(0)"
    lives = Lives(tmp_path, script, stall_s=4.0)
    assert lives.supervisor.run() == 0
    assert lives.begun == 1


def after(condition: Callable[[], bool], do: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_signal_reaches_the_child_once_and_its_code_comes_back(tmp_path: Path) -> None:
    script = (
        "got = []\nsignal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
        "open(notes + '.ready', 'w').close()\n"
        "while not got: time.sleep(0.01)\n"
        "time.sleep(0.2); sys.exit(130 if got == [1] else 9)"
    )
    lives = Lives(tmp_path, script)
    after(Path(f"{lives.notes}.ready").exists, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert lives.supervisor.run() == 130
    assert lives.begun == 1


def test_a_stopped_run_is_not_started_again_even_if_it_dies(tmp_path: Path) -> None:
    lives = Lives(tmp_path, "open(notes + '.ready', 'w').close(); time.sleep(60)")
    after(Path(f"{lives.notes}.ready").exists, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert lives.supervisor.run() == 128 + signal.SIGTERM
    assert lives.begun == 1


def test_what_the_child_started_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open(notes, 'w').write(str(other.pid)); {DIES}"
    )
    lives = Lives(tmp_path, script, restarts=0)
    lives.supervisor.run()
    orphan = int(lives.notes.read_text())
    assert gone({orphan})
