"""A run on a disk of 1 MB that fills at a chosen moment, and may go on once there is space again.

A server of processes (`tests.forked`) in a mount namespace of its own calls `main` with a stage
and the JSON of a `Job`, in the folder that the commands are typed in: `begin`, then the command,
`mend`, maybe the command again, `end`. The disk is a tmpfs that only the server and its children
see. What lay on it after each command is copied out, for a test to look at.

This file is the run's scorer, too: from inside it fills the disk between two writes, as another
program would. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DISK = Path("disk")
"""Where the small disk is mounted, below the folder that the commands are typed in."""
RUN = DISK / "full"
_PLAN, _BALLAST = Path("plan.json"), DISK / "ballast"
_SIZE_KB = 1024


@dataclass(frozen=True)
class Job:
    """What is done to a run."""

    fill_after: str | None = None
    """A file of the run: once it is there the next answer to be scored fills the disk; the
    empty name fills it before the run begins."""
    free: int = 0
    """Pages that are left."""
    empty_after: str | None = None
    """A file of the run: once it is there the next answer to be scored frees the disk."""
    start_from: str | None = None
    """A run that is copied to the disk first."""
    read_only: str | None = None
    """A folder of the disk that is mounted read-only during the first command."""
    goes_on: bool = False
    """Whether the command comes a second time, once the disk is as it should be."""


def namespace() -> list[str]:
    """The words before a command that may mount what nobody else sees."""
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own, "--mount"]


@functools.cache
def why_not() -> str | None:
    """What keeps this system from making a small disk, found out by making one."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return "needs unshare (util-linux)"
    script = "mount -t tmpfs -o size=1m tmpfs /mnt && mount --bind /mnt /mnt"
    done = subprocess.run(
        [*namespace(), "sh", "-c", script], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"no mount namespace here: {done.stderr.strip()}"


def page_count(size: int) -> int:
    """Pages that a file of so many bytes takes on a tmpfs."""
    return -(-size // os.sysconf("SC_PAGE_SIZE"))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """A reward that needs no skill, so that each step has something to learn from."""
    if _PLAN.exists():
        _follow(Job(**json.loads(_PLAN.read_text())))
    return float(len(solution_str) % 2)


def _follow(job: Job) -> None:
    while any(thread.name == "checkpoint" for thread in threading.enumerate()):
        time.sleep(0.001)  # what was being saved before is on disk, or was refused
    if job.empty_after is not None and (RUN / job.empty_after).exists():
        _BALLAST.unlink(missing_ok=True)
    elif job.fill_after and (RUN / job.fill_after).exists() and not _BALLAST.exists():
        _fill(job.free)


def _fill(free: int) -> None:
    """Leave so many pages."""
    left = os.statvfs(DISK)
    with _BALLAST.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (left.f_bavail - free) * left.f_frsize)
    assert os.statvfs(DISK).f_bavail == free


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _begin(job: Job) -> None:
    _mount("-t", "tmpfs", "-o", f"size={_SIZE_KB}k", "tmpfs", str(DISK))
    if job.start_from is not None:
        shutil.copytree(job.start_from, RUN)
    if job.fill_after == "":
        _fill(job.free)
    _PLAN.write_text(json.dumps(asdict(job)))
    if job.read_only is not None:
        locked = str(DISK / job.read_only)
        _mount("--bind", locked, locked)
        _mount("-o", "remount,bind,ro", locked)


def _mend(job: Job) -> None:
    if job.read_only is not None:
        subprocess.run(["umount", str(DISK / job.read_only)], check=True)
    _BALLAST.unlink(missing_ok=True)
    _PLAN.unlink()
    shutil.copytree(DISK, "failed")


def _end(job: Job) -> None:
    if job.goes_on:
        shutil.copytree(DISK, "resumed")
    subprocess.run(["umount", str(DISK)], check=True)


def main() -> None:
    """One stage of a job in the working directory; leaves `failed/` and maybe `resumed/`.

    Or a disk alone: `mount FOLDER KILOBYTES`, `unmount FOLDER COPY`.
    """
    stages = {"begin": _begin, "mend": _mend, "end": _end}
    if sys.argv[1] == "mount":
        _mount("-t", "tmpfs", "-o", f"size={sys.argv[3]}k", "tmpfs", sys.argv[2])
    elif sys.argv[1] == "unmount":
        shutil.copytree(sys.argv[2], sys.argv[3])
        subprocess.run(["umount", sys.argv[2]], check=True)
    else:
        stages[sys.argv[1]](Job(**json.loads(sys.argv[2])))
    os._exit(0)  # forked from a process that holds far more than is worth tidying up
