"""Which processes there are, asked of the kernel."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

_READY = re.compile(r"INFO winnow\.workers\.host: (.+\[\d+\]): ready: process (\d+) on ")


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def descendants(pid: int) -> dict[int, str]:
    """Processes that a process has started, and those that they have: names and command lines."""
    found: dict[int, str] = {}
    parents = [pid]
    while parents:
        parent = parents.pop()
        tasks: list[Path] = []
        with suppress(FileNotFoundError, ProcessLookupError):  # it, or one of its, ended meanwhile
            tasks += Path(f"/proc/{parent}/task").glob("*/children")
        for task in tasks:
            with suppress(FileNotFoundError, ProcessLookupError):
                lines = {
                    child: Path(f"/proc/{child}/comm").read_text()
                    + Path(f"/proc/{child}/cmdline").read_text()
                    for child in map(int, task.read_text().split())
                }
                found |= lines
                parents += lines
    return found


def workers_of(run: Path) -> dict[str, int]:
    """The processes of a run beside its own, as its log has them: the newest of each name."""
    told = (run / "log.txt").read_text()
    return {name: int(pid) for name, pid in _READY.findall(told)}


def driver_of(pid: int) -> int:
    """The process id of a supervised run, of its supervisor's."""
    found = descendants(pid).items()
    # A spare that became it (`tests.spares`) is called like the module.
    (driver,) = (child for child, line in found if "--heartbeat" in line or line[:5] == "main\n")
    return driver


def is_alive(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(processes: set[int]) -> bool:
    """Whether all of them end within half a minute."""
    for _ in range(1500):
        if not any(map(is_alive, processes)):
            return True
        time.sleep(0.02)
    return False


def is_stopped(process: int) -> bool:
    """Whether SIGSTOP holds it."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def is_waiting(process: int, number: int) -> bool:
    """Whether a process has been sent a signal that it has not taken yet."""
    status = Path(f"/proc/{process}/status").read_text()
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)
