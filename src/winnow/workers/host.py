"""The worker's end: makes the object, runs its methods, and reports the outcome of each call.

A worker is an object of any class, named by an import path
(`winnow.ranks.workers:LearnerWorker`), and made in its process as
`LearnerWorker(rank=RankInfo(…), **kwargs)` with keyword arguments that can be pickled. Its methods
are plain or asynchronous. It may have

- `progress`, an int property that changes whenever the worker gets on; it is read from another
  thread, also while a plain method computes;
- `close()`, plain or asynchronous, called before its process ends.

In its process a worker has one asyncio loop. All its methods begin in that loop's thread, in the
order of the driver's calls: a plain one has the thread to itself until it returns, an asynchronous
one lets others in where it waits. Arrays that come to it, or from it, are read-only. A method that
returns a `winnow.workers.array_refs.SplitResult` tells the caller a part of its result and leaves
the rest where it is: the caller gets a handle, passes it to the receivers of its value, and
need not hold that itself.

The host is the same in every kind of process. How calls come and outcomes go is left to `child` and
`ray.actors`; other traffic, logs and progress, to `logs`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import logging
import os
import pickle
import pkgutil
import platform
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow import gc_tuning
from winnow.errors import WinnowError
from winnow.workers.array_refs import Store
from winnow.workers.logs import LogSender

log = logging.getLogger(__name__)

DEFAULT_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads and forks do not get on
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # sets of strings are in one order on all ranks
    "PYTHONUNBUFFERED": "1",  # what was printed is read even when the process was killed
}
_PORTS = range(20000, 32000)
"""Ports below those that systems hand out by themselves."""
_BEAT_S = 0.1
_DUMP_AFTER = 0.9
"""The part of the time limit after which the log says where a worker hangs: before it is killed."""


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
    store: Store | None = None
    """Takes arrays that other workers are to fetch."""


@dataclass(frozen=True)
class WorkerSpec:
    """The worker that a process is to hold; it is sent to each rank before all calls."""

    path: str
    kwargs: Mapping[str, Any]
    info: RankInfo
    stall_timeout_s: float
    log_level: int
    """The least that `winnow`'s loggers let through."""
    python_path: tuple[str, ...]
    """The driver's, so that both find the same modules."""
    folder: str = field(default_factory=os.getcwd)
    """The driver's, at which relative paths begin where the worker's machine has it."""


@dataclass(frozen=True)
class Call:
    """A method to run. Example: `Call("step", (3,), {"lr": 1e-6})`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallFailure:
    """An exception, in a form that can be read where its class is unknown."""

    line: str
    """`KeyError: 'x'`"""
    traceback: str
    error: WinnowError | None = None
    """The exception itself, where it is one that the user sees."""


CLOSE = Call("close")


class Host:
    """One worker and its calls.

    Args:
        sender: takes the process's log, and the worker's progress.
        is_orphan: asked ten times a second; the process ends where the driver is gone.
    """

    def __init__(self, sender: LogSender, is_orphan: Callable[[], bool]) -> None:
        self._sender, self._is_orphan = sender, is_orphan
        self._worker: Any = None
        self._calls_under_way = self._calls_ended = 0
        self._dump_after_s = threading.TIMEOUT_MAX

    async def handle(self, request: WorkerSpec | Call) -> Any:
        """Make the worker, or run one of its methods; returns the result or a `CallFailure`."""
        self._calls_under_way += 1
        # From here: a call that hangs in C may let no other thread run again.
        self._reset_stall_dump()
        try:
            if isinstance(request, WorkerSpec):
                return self._create_worker(request)
            if request == CLOSE and not hasattr(self._worker, "close"):
                return None
            result = getattr(self._worker, request.method)(*request.args, **request.kwargs)
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:  # SystemExit too: a worker ends when the driver says so
            return describe_failure(error)
        finally:
            self._calls_under_way -= 1
            self._calls_ended += 1

    def _create_worker(self, job: WorkerSpec) -> None:
        sys.path[:] = dict.fromkeys([*job.python_path, *sys.path])
        if os.path.isdir(job.folder):  # else each path must be whole
            os.chdir(job.folder)
        self._sender.redirect_logging(job.log_level)
        self._dump_after_s = _DUMP_AFTER * job.stall_timeout_s
        self._reset_stall_dump()
        # Each beat costs the driver time: a hundred a limit are enough, and one a second.
        every_s = min(job.stall_timeout_s / 100, 1.0)
        beating = threading.Thread(
            target=self._report_progress, args=[every_s], name="winnow-beats"
        )
        beating.daemon = True
        beating.start()
        with gc_tuning.growing():
            worker_class = pkgutil.resolve_name(job.path)
        self._worker = worker_class(rank=job.info, **job.kwargs)
        # For those that want to look at it, or to end it.
        log.info("ready: process %d on %s", os.getpid(), platform.node())

    def _report_progress(self, every_s: float) -> None:
        """Send progress while a method computes, and put off the dump of stacks with each."""
        seen: tuple[int | None, int, int] = None, 0, 0
        since_s = 0.0
        while True:
            time.sleep(_BEAT_S)
            if self._is_orphan():
                os._exit(1)
            since_s += _BEAT_S
            if since_s < every_s:
                continue
            since_s = 0.0
            progress = getattr(self._worker, "progress", None)
            now = progress, self._calls_ended, self._calls_under_way
            if now == seen:
                continue
            self._reset_stall_dump()
            try:
                if progress is not None and progress != seen[0]:
                    self._sender.send_progress(int(progress))
            except OSError:  # nobody listens any more
                os._exit(1)
            seen = now

    def _reset_stall_dump(self) -> None:
        """Have all stacks dumped unless this is called again in time; no Python need run for it."""
        if self._calls_under_way == 0:
            faulthandler.cancel_dump_traceback_later()
        elif self._dump_after_s < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(self._dump_after_s, file=2)


def describe_failure(error: BaseException) -> CallFailure:
    """Describe an exception for another process."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    text = "".join(traceback.format_exception(error)).rstrip()
    return CallFailure(line, text, _picklable(error) if isinstance(error, WinnowError) else None)


def _picklable(error: WinnowError) -> WinnowError | None:
    """Return an error as it arrives elsewhere; None where it cannot, as one of a local class."""
    try:
        copied: WinnowError = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copied


def worker_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Choose variables for workers: the user's, then this process's, then the defaults."""
    inherited = {name: os.environ[name] for name in DEFAULT_VARIABLES if name in os.environ}
    return {**DEFAULT_VARIABLES, **inherited, **user}


def free_port(address: str = "") -> int:
    """Choose a port of this machine that nobody listens at now.

    Another program may take it before its user does; ports that systems hand out by themselves
    are left out, so that this is rare.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port
    raise WinnowError(f"none of 100 ports of {address or 'this machine'} was free; end other runs")
