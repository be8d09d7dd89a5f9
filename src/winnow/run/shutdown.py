"""A run's process: requests to stop it, output that nothing takes, and a parent that restarts it.

While a run trains, the first request (Ctrl-C, SIGTERM, a closed terminal) is noted: an update under
way is finished, sampling and evaluation are broken off, and the run saves and ends. Before and
after, when there is nothing to lose, it ends the process at once. Ctrl-C while it is stopping ends
it at once, too.

| request | exit code |
|---|---|
| Ctrl-C (SIGINT) | 130 |
| SIGTERM, SIGHUP | 75, "try again" in sysexits.h: what a batch system may start again |

The announced end of the machine (`MachineDeadline`) acts as a SIGTERM that comes as late as leaves
time to finish and save, or before a step that would not fit any more.

A reader of stdout or stderr that goes (`| head`, a `tee` that dies), a full disk behind `> FILE`
and a terminal that is gone are no requests: the run goes on without them, and log.txt says so.

With `trainer.max_restarts` a parent without torch starts the run, and starts it again when it dies
or hangs. The child is the same command with a pipe on which it tells of progress (`Heartbeat`), a
line when something has moved since the last one: tokens, updates, steps. A run that hangs writes
nothing, however busy it looks. The lines are `folder PATH`, `step N`, `beat`. It has a process
group of its own, so that Ctrl-C reaches it once, through the parent, and that whatever it started
can be ended with it.

| the child | the parent |
|---|---|
| ends with 0, 2, 75 or 130: done, a user's mistake, stopped | ends with the same code |
| is killed by a signal, or ends with another code: crashed | starts it again, after a pause |
| tells of no progress for `trainer.stall_timeout_s` | kills it and starts it again |
| fails three times without a step in between | gives up with its code |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from types import FrameType
from typing import Any, TextIO, TypeVar

from winnow.config.trainer import TrainerConfig, epoch_seconds
from winnow.observe.metrics import Record
from winnow.observe.sinks import RunInfo

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 75
_BEAT_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


def stop_signals() -> list[signal.Signals]:
    """List the signals that ask a process to end, without those that it ignores (nohup)."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


class Stopped(BaseException):
    """The run was asked to stop. Not an `Exception`, for the reason KeyboardInterrupt is none:
    nothing that deals with errors, a scorer's for instance, may take it for one."""

    def __init__(self, signal_number: int, reason: str = "") -> None:
        super().__init__(signal_number)
        self.reason = reason or (
            "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        )
        self.exit_code = EXIT_INTERRUPTED if signal_number == signal.SIGINT else EXIT_TERMINATED


_END_VARIABLES = (
    "SLURM_JOB_END_TIME",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Variables in which platforms announce the end of a job or machine, in seconds since 1970."""
_RESERVE_S = 60.0


class MachineDeadline:
    """The announced end of the machine, and the time that a run needs before it.

    It is a sink: records of steps say how long one takes. Sampling and evaluation can be broken off
    within a step, the rest cannot.

    Args:
        save_s: returns how long a checkpoint took so far.
        clock: returns seconds since 1970.
    """

    def __init__(self, config: TrainerConfig, clock: Callable[[], float] = time.time) -> None:
        self._margin_s, self._clock = config.expiry_margin_s, clock
        self.save_s: Callable[[], float] = lambda: 0.0
        self._step_s = self._unbroken_s = 0.0
        self.at_s, self.notes = math.inf, list[str]()
        """The end, and lines for the user."""
        expires_at = config.expires_at
        announced = {name: os.environ[name] for name in _END_VARIABLES if os.environ.get(name)}
        ends = announced if expires_at is None else {"trainer.expires_at": expires_at}
        for source, value in ends.items() if expires_at != "never" else ():
            self._read_end(source, value)

    def _read_end(self, source: str, value: str | float) -> None:
        try:
            at_s = epoch_seconds(value)
            when = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError, OSError):
            self.notes += [f"Warning: {source}={value} is no time, and does not count"]
            return
        if at_s <= self._clock():
            self.notes += [f"Warning: {source}={value} is past ({when}), and does not count"]
        elif at_s < self.at_s:
            self.at_s, self.reason = at_s, f"the machine's end at {when} ({source})"
            self.notes += [f"The run saves and ends before {self.reason}"]

    def is_near(self, a_step: bool = False) -> bool:
        """Return whether it is time to stop; `a_step` where another step would begin."""
        needs_s = self._margin_s
        if needs_s is None:
            needs_s = (self._step_s if a_step else self._unbroken_s) + self.save_s() + _RESERVE_S
        return self.at_s - self._clock() <= needs_s

    def start(self, info: RunInfo) -> None:
        """Do nothing: a step's time is known when it is over."""

    def log(self, step: int, record: Record) -> None:
        """Take in how long a step took."""
        times = {
            name: record.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "rollout")
        }
        step_s = times["step"] - times["evaluate"]
        self._step_s = max(self._step_s, step_s)
        self._unbroken_s = max(self._unbroken_s, step_s - times["rollout"])

    def close(self) -> None:
        """Do nothing."""


class ShutdownSignal:
    """Takes the signals of a process and passes a request on where it does no harm.

    Args:
        announces: say at once, on the error stream, what a request that is only noted waits for.
    """

    def __init__(self, announces: bool = True) -> None:
        self._announces = announces
        self._signal: int | None = None
        self._reason = ""
        self._end: MachineDeadline | None = None
        self._is_deferring = False
        self._task: asyncio.Task[Any] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while the block runs; those that are ignored (nohup) stay so."""
        before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Only note a request while the block runs; `check` and `interruptible` act on it."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    @contextlib.contextmanager
    def stop_before(self, end: MachineDeadline) -> Iterator[None]:
        """Ask for a stop in time before the machine ends; requests must be deferred."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_BEAT_S):
                if end.is_near():
                    self._request_stop(signal.SIGTERM, end.reason)
                    return

        if end.at_s == math.inf:
            yield
            return
        self._end = end
        thread = threading.Thread(target=watch, name="winnow-machine-end", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end = None
            over.set()
            thread.join()

    def check(self) -> None:
        """Stop before a step if that was asked for, or if the machine ends before the step would.

        Raises:
            Stopped: it was.
        """
        if self._signal is None and self._end is not None and self._end.is_near(a_step=True):
            self._request_stop(signal.SIGTERM, self._end.reason)
        self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self._signal is not None:
            raise Stopped(self._signal, self._reason)

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, and break it off when a request comes.

        Raises:
            Stopped: it was broken off; what it works on is in no defined state.
        """
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._task = task
        if self._signal is not None:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            self._raise_if_requested()
            raise
        finally:
            self._task = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`asyncio.run` of `work`, broken off cleanly whenever a request comes, also before the
        loop is there (where `asyncio.run` alone leaves a torn one).

        Raises:
            Stopped: it was broken off.
        """
        with self.deferring():
            result = asyncio.run(self.interruptible(work))
        self._raise_if_requested()
        return result

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        if not self._is_deferring:
            self._signal = number
            raise Stopped(number)
        if self._announces:
            what = "finishing the step under way" if self._task is None else "dropping open answers"
            hint = " (Ctrl-C again ends at once)" if number == signal.SIGINT else ""
            line = f"\nwinnow: {signal.Signals(number).name}: {what}, then saving{hint}\n"
            # Not through the console: a handler may interrupt it halfway through a line.
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        self._request_stop(number)

    def _request_stop(self, number: int, reason: str = "") -> None:
        """Note a request, and break off what may be; from any thread."""
        self._reason, self._signal = reason, number
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)


def ignore_broken_output() -> None:
    """Let this process go on where stdout or stderr can no longer be written to."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LossyStream):
            setattr(sys, name, _LossyStream(stream, name))


class _LossyStream:
    """A stream that leaves out what the system refuses to write, from then on all of it."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, if that is possible."""
        with self._ignoring_refusals():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with self._ignoring_refusals():
            self._stream.flush()

    @contextlib.contextmanager
    def _ignoring_refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            log.warning(
                "%s can no longer be written to (%s): the run goes on without it, and this log and "
                "the run's folder have the rest",
                self._name,
                error.strerror or error,
            )
