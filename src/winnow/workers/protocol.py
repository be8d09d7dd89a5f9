"""The seam between the driver and its workers, which it calls by the names of their methods.

A worker is an object of any class, named by an import path
(`winnow.runs.learner_worker:LearnerWorker`), and made in its process as
`LearnerWorker(rank=RankInfo(…), **kwargs)` with keyword arguments that can be pickled. Its methods
are plain or asynchronous. It may have

- `progress`, an int property that changes whenever the worker gets on; it is read from another
  thread, also while a plain method computes;
- `close()`, plain or asynchronous, called before its process ends.

In a process of its own a worker has one asyncio loop. All its methods begin in that loop's thread,
in the order of the driver's calls: a plain one has the thread to itself until it returns, an
asynchronous one lets others in where it waits. Arrays that come to it, or from it, are read-only.
A method that returns a `winnow.workers.array_refs.SplitResult` tells the caller a part of its
result and leaves the rest where it is: the caller gets a handle, gives it to whoever needs what
it stands for, and need not hold that itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """A worker's place in its group. Example: `RankInfo(1, 2, "127.0.0.1", 23456, None)`."""

    rank: int
    size: int
    master_address: str
    """Rank 0's address, which all ranks can reach."""
    master_port: int
    """A port that was free there, for rank 0 to listen at."""
    device_index: int | None
    """The worker's among the devices that its process sees; None: the CPU."""


@dataclass(frozen=True)
class WorkerLine:
    """Something that a worker logged or printed."""

    role: str
    rank: int
    level: int
    """As in `logging`; what was printed has INFO."""
    logger: str
    """The logger's name; "" for what was printed."""
    text: str
    """May have several lines, as a traceback does."""

    def __str__(self) -> str:
        """Say `policy[1]: text`; a text of several lines has them as they are."""
        return f"{self.role}[{self.rank}]: {self.text}"


OnLog = Callable[[WorkerLine], None]
