"""The worker's end: makes the object, runs its methods, and reports the outcome of each call.

It is the same in every kind of process. How calls come and outcomes go is left to `child` and
`ray.worker`; what travels beside them, logs and progress, to `logs`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import pickle
import platform
import random
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from winnow import gc_tuning as heap
from winnow.errors import ConfigError, WinnowError
from winnow.workers.protocol import RankInfo

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


@dataclass(frozen=True)
class WorkerJob:
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
    """The driver's, at which relative paths begin."""


@dataclass(frozen=True)
class Call:
    """A method to run. Example: `Call("step", (3,), {"lr": 1e-6})`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CallFailure:
    """An exception, in a form that can be read where its class is unknown."""

    line: str
    """`KeyError: 'x'`"""
    traceback: str
    error: bytes | None = None
    """The exception itself, pickled, where it is a `WinnowError`."""

    def winnow_error(self) -> WinnowError | None:
        """Return the error for the user that was raised, if it was one."""
        if self.error is None:
            return None
        found = pickle.loads(self.error)
        assert isinstance(found, WinnowError)
        return found


@dataclass(frozen=True)
class CallResult:
    """The value that a method returned."""

    value: Any


Outcome = CallResult | CallFailure
CLOSE = Call("close")


class Host:
    """One worker and its calls."""

    def __init__(self) -> None:
        self._worker: Any = None
        self.calls_under_way = 0
        self.calls_ended = 0
        self.at_call: Callable[[], None] = lambda: None
        """Runs before each call, in the thread that runs it."""

    @property
    def progress(self) -> int | None:
        """The worker's own count, where it has one; any thread may ask."""
        value = getattr(self._worker, "progress", None)
        return None if value is None else int(value)

    async def run(self, asked: WorkerJob | Call) -> Any:
        """Make the worker, or run one of its methods. Raises what that raises."""
        self.calls_under_way += 1
        self.at_call()
        try:
            if isinstance(asked, WorkerJob):
                self._worker = worker_class(asked.path)(rank=asked.info, **asked.kwargs)
                # For whoever wants to look at it, or to end it.
                log.info("ready: process %d on %s", os.getpid(), platform.node())
                return None
            function = getattr(self._worker, asked.method, None)
            if function is None and asked == CLOSE:
                return None
            if function is None:
                kind = type(self._worker).__name__
                raise AttributeError(f"{kind} has no method {asked.method!r}")
            result = function(*asked.args, **(asked.kwargs or {}))
            return await result if inspect.isawaitable(result) else result
        finally:
            self.calls_under_way -= 1
            self.calls_ended += 1

    async def outcome(self, asked: WorkerJob | Call) -> Outcome:
        """Make the worker, or run one of its methods; an exception is an outcome, too."""
        try:
            return CallResult(await self.run(asked))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too: a worker ends when the driver says so
            return failure_of(error)


def worker_class(path: str) -> Any:
    """Import the class that `module:Class` names.

    Raises:
        ConfigError: it names none.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"a worker's path must be module:Class, got {path!r}")
    with heap.growing():
        module = importlib.import_module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{module_name} has no class {name!r}, which the worker {path!r} names")
    return found


def failure_of(error: BaseException) -> CallFailure:
    """Describe an exception for another process."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    text = "".join(traceback.format_exception(error)).rstrip()
    return CallFailure(line, text, _pickled(error) if isinstance(error, WinnowError) else None)


def _pickled(error: WinnowError) -> bytes | None:
    """Pickle an error; None for one that cannot be read back, such as one of a local class."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def merged_environment(user: Mapping[str, str]) -> dict[str, str]:
    """Choose variables for workers: the user's, then this process's, then the defaults."""
    return {
        **{name: os.environ.get(name, value) for name, value in DEFAULT_VARIABLES.items()},
        **user,
    }


def free_port(address: str = "") -> int:
    """Choose a port of this machine that nobody listens at now.

    Another program may take it before its user does; ports that systems hand out by themselves
    are left out, so that this is rare.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
