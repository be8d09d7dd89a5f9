"""Kills remaining processes of a private Ray: `python -m winnow.workers.ray.guardian FOLDER`.

When a driver is killed, Linux kills the processes of Ray that it started, and those end the
workers, but some of Ray's helpers notice it only after a minute. This process waits for its
standard input to close, at the end of the driver's session or of the driver. It then kills every
process that belongs to FOLDER, and removes the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "WINNOW_RAY_FOLDER"
"""Environment variable of a private Ray's processes."""
SHUT_DOWN = b"shut down"
"""The driver's message after it has shut Ray down."""
_ATTEMPTS_S = 10.0


def main() -> None:
    """Wait for the driver, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    has_shut_down = sys.stdin.buffer.read() == SHUT_DOWN
    give_up = time.monotonic() + _ATTEMPTS_S
    # A driver that continues has its own Ray log open.
    find = marked_processes if has_shut_down else processes_of
    while (pids := find(folder)) and time.monotonic() < give_up:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def marked_processes(folder: str) -> list[int]:
    """Return the pids of processes whose environment has the folder."""
    entry = f"{MARK}={folder}".encode()
    return _pids(lambda p: entry in (p / "environ").read_bytes().split(b"\0"))


def processes_of(folder: str) -> list[int]:
    """Return those pids, and those of processes with open files in the folder.

    Ray's helpers overwrite their environment with their titles, but have their logs there.
    """
    inside = _pids(lambda p: any(path.startswith(f"{folder}/") for path in _open_files(p)))
    return [*marked_processes(folder), *inside]


def _pids(belongs: Callable[[Path], bool]) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if belongs(process):
                pids.append(int(process.name))
    return pids


def _open_files(process: Path) -> Iterator[str]:
    for link in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(link)


if __name__ == "__main__":
    main()
