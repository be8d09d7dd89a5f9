"""Ends what a private Ray left behind: `python -m winnow.workers.ray.guardian FOLDER`.

Of a driver that is killed, Linux ends the processes of Ray that it started itself, and those end
the workers; some of Ray's helpers notice it only after a minute. This process waits for its
standard input to close, which the driver does at the end of its session, or the system when the
driver dies. It then kills every process that belongs to FOLDER, and removes that.
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
"""The variable by which the processes of a private Ray are known."""
SHUT_DOWN = b"shut down"
"""The driver's message when it has ended Ray itself."""
_ATTEMPTS_S = 10.0


def main() -> None:
    """Wait, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folder = sys.argv[1]
    has_shut_down = sys.stdin.buffer.read() == SHUT_DOWN
    give_up = time.monotonic() + _ATTEMPTS_S
    # A driver that lives on still has Ray's log of itself open.
    find = marked_processes if has_shut_down else processes_of
    while (pids := find(folder)) and time.monotonic() < give_up:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def marked_processes(folder: str) -> list[int]:
    """List the processes that were started with the folder's mark."""
    entry = f"{MARK}={folder}".encode()
    return _find_processes(lambda p: entry in (p / "environ").read_bytes().split(b"\0"))


def processes_of(folder: str) -> list[int]:
    """List those, and processes that have files open in the folder.

    Ray's helpers write their titles over their variables, but have their logs there.
    """
    inside = _find_processes(
        lambda p: any(path.startswith(f"{folder}/") for path in _open_files(p))
    )
    return [*marked_processes(folder), *inside]


def _find_processes(belongs: Callable[[Path], bool]) -> list[int]:
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
