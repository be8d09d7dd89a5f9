"""Which processes there are, asked of the kernel."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def children() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found: set[int] = set()
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def is_alive(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(processes: set[int]) -> bool:
    """Whether all of them end within ten seconds."""
    for _ in range(500):
        if not any(map(is_alive, processes)):
            return True
        time.sleep(0.02)
    return False
