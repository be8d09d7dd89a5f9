"""The worker's end of a connection: creates the worker, runs its methods, and returns the results.

A worker is an object of any class, named by an import path (`winnow.ranks.workers:LearnerWorker`)
and created in its process as `LearnerWorker(rank=RankInfo(…), **kwargs)`, with keyword arguments
that can be pickled. Its methods are plain or asynchronous. It may have

- `progress`, an int property that changes with the worker's progress; it is read from another
  thread, also while a plain method computes;
- `close()`, plain or asynchronous, called before its process ends.

A worker has one asyncio loop in its process. All methods start in that loop's thread, in the order
of the driver's calls: a plain one blocks it until it returns, an asynchronous one runs concurrently
with others. Arrays among arguments and results are read-only. A method may return a
`winnow.workers.array_refs.SplitResult`, whose arrays stay where they are: the caller gets a handle
for the receivers of the arrays.

The host is the same in all kinds of processes. `child` and `ray.actors` transport calls and
results, `logs` transports logs and progress.
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
    "TOKENIZERS_PARALLELISM": "false",  # its threads are not safe with forks
    "NCCL_DEBUG": "WARN",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the same order of string sets on all ranks
    "PYTHONUNBUFFERED": "1",  # output is complete even if the process is killed
}
_PORTS = range(20000, 32000)
"""Ports below the ephemeral ones."""
_BEAT_S = 0.1
_DUMP_AFTER = 0.9
"""Part of the stall timeout after which a worker dumps its stacks, before it is killed."""


@dataclass(frozen=True)
class RankInfo:
    """A worker's place in its group. Example: `RankInfo(1, 2, "127.0.0.1", 23456, None)`."""

    rank: int
    size: int
    master_address: str
    """Rank 0's address, reachable by all ranks."""
    master_port: int
    """A free port of rank 0's node."""
    device_index: int | None
    """The worker's device among the visible ones; None is the CPU."""
    store: Store | None = None
    """Store for arrays that other workers fetch."""


@dataclass(frozen=True)
class WorkerSpec:
    """The worker to create in a process; sent to each rank before all calls."""

    path: str
    kwargs: Mapping[str, Any]
    info: RankInfo
    stall_timeout_s: float
    log_level: int
    """Level of the `winnow` loggers."""
    python_path: tuple[str, ...]
    """The driver's `sys.path`."""
    folder: str = field(default_factory=os.getcwd)
    """The driver's working directory, which the worker enters if its machine has it."""


@dataclass(frozen=True)
class Call:
    """A method call. Example: `Call("step", (3,), {"lr": 1e-6})`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallFailure:
    """An exception in a form that can be unpickled without its class."""

    line: str
    """`KeyError: 'x'`"""
    traceback: str
    error: WinnowError | None = None
    """The exception itself, if it is a WinnowError."""


CLOSE = Call("close")


class Host:
    """One worker and its calls.

    Args:
        sender: sends the process's log and the worker's progress.
        is_orphan: returns True if the driver has exited; the process then exits, too.
    """

    def __init__(self, sender: LogSender, is_orphan: Callable[[], bool]) -> None:
        self._sender, self._is_orphan = sender, is_orphan
        self._worker: Any = None
        self._calls_under_way = self._calls_ended = 0
        self._dump_after_s = threading.TIMEOUT_MAX

    async def handle(self, request: WorkerSpec | Call) -> Any:
        """Create the worker or run one of its methods; return the result or a `CallFailure`."""
        self._calls_under_way += 1
        # Before the call: one that hangs in C may never release the GIL again.
        self._reset_stall_dump()
        try:
            if isinstance(request, WorkerSpec):
                return self._create_worker(request)
            if request == CLOSE and not hasattr(self._worker, "close"):
                return None
            result = getattr(self._worker, request.method)(*request.args, **request.kwargs)
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:  # SystemExit, too: only the driver ends a worker
            return describe_failure(error)
        finally:
            self._calls_under_way -= 1
            self._calls_ended += 1

    def _create_worker(self, job: WorkerSpec) -> None:
        sys.path[:] = dict.fromkeys([*job.python_path, *sys.path])
        if os.path.isdir(job.folder):  # else paths must be absolute
            os.chdir(job.folder)
        self._sender.redirect_logging(job.log_level)
        self._dump_after_s = _DUMP_AFTER * job.stall_timeout_s
        self._reset_stall_dump()
        # Each report costs the driver time: one a second, or a hundred a timeout, are enough.
        every_s = min(job.stall_timeout_s / 100, 1.0)
        reporter = threading.Thread(target=self._report_progress, args=[every_s], daemon=True)
        reporter.name = "winnow-beats"
        reporter.start()
        with gc_tuning.disabled():
            worker_class = pkgutil.resolve_name(job.path)
        self._worker = worker_class(rank=job.info, **job.kwargs)
        # For `py-spy` and `kill`.
        log.info("ready: process %d on %s", os.getpid(), platform.node())

    def _report_progress(self, every_s: float) -> None:
        """Send progress while a method computes, and reset the stack dump with each change."""
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
            except OSError:  # the driver has closed the stream
                os._exit(1)
            seen = now

    def _reset_stall_dump(self) -> None:
        """Schedule a dump of all stacks, unless this is called again in time; it needs no GIL."""
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
    """Return an error after pickling; None if it cannot be pickled, as one of a local class."""
    try:
        copied: WinnowError = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copied


def worker_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of workers: the user's, else this process's, else the defaults."""
    inherited = {name: os.environ[name] for name in DEFAULT_VARIABLES if name in os.environ}
    return {**DEFAULT_VARIABLES, **inherited, **user}


def free_port(address: str = "") -> int:
    """Return a port of this machine that is free now.

    Another program may bind it before it is used; to make that rare, it is no ephemeral port.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port
    raise WinnowError(f"no free port among 100 of {address or 'this machine'}; end other runs")
