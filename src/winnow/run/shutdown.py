"""Shutdown of a run: requests to stop it, broken output, and a parent that restarts it.

While a run trains, the first request (Ctrl-C, SIGTERM, a closed terminal) is deferred: an update
in progress is finished, sampling and evaluation are cancelled, and the run saves and ends. Before
and after, with nothing to save, it ends the process at once. So does Ctrl-C during the shutdown.

| request | exit code |
|---|---|
| Ctrl-C (SIGINT) | 130 |
| SIGTERM, SIGHUP | 75, "try again" in sysexits.h: a batch system may start it again |

The announced end of the machine (`MachineDeadline`) acts as a SIGTERM that comes as late as leaves
time to finish and save, or before a step that would no longer fit.

A closed reader of stdout or stderr (`| head`, a `tee` that dies), a full disk behind `> FILE` and a
closed terminal do not end the run: it goes on without them, and log.txt says so.

With `trainer.max_restarts` a parent without torch starts the run, and restarts it after a crash or
a hang. The child is the same command with a pipe on which it reports progress (`Heartbeat`): a line
if something has moved since the last one, tokens, updates or steps. A run that hangs writes
nothing, however busy it looks. The lines are `folder PATH`, `step N`, `beat`. The child has a
separate process group, so that Ctrl-C reaches it once, through the parent, and that all that it
started can be killed with it.

| the child | the parent |
|---|---|
| ends with 0, 2, 75 or 130: done, a user's mistake, stopped | ends with the same code |
| is killed by a signal, or ends with another code: crashed | restarts it after a pause |
| reports no progress for `trainer.stall_timeout_s` | kills and restarts it |
| fails three times without a step in between | ends with its code |
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

from winnow.config.trainer import TrainerConfig, to_epoch_seconds
from winnow.observe.metrics import Record
from winnow.observe.sinks import Sink

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 75
_HEARTBEAT_S = 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, without those that the process ignores (nohup)."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


class Stopped(BaseException):
    """A request stopped the run. Like KeyboardInterrupt it is not an `Exception`, so that handlers
    of errors, such as a scorer's, do not catch it."""

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
"""Variables in which platforms announce the end of a job or machine, in Unix seconds."""
_RESERVE_S = 60.0


class MachineDeadline(Sink):
    """The announced end of the machine, and the time that a run needs to save before it.

    It is a sink, and takes the duration of a step from its record. Sampling and evaluation can be
    cancelled within a step, the rest cannot.

    Args:
        clock: returns Unix seconds.
    """

    def __init__(self, config: TrainerConfig, clock: Callable[[], float] = time.time) -> None:
        self._margin_s, self._clock = config.expiry_margin_s, clock
        self.save_s: Callable[[], float] = lambda: 0.0
        """Returns the longest time that a checkpoint took so far."""
        self._step_s = self._unbroken_s = 0.0
        self.at_s, self.notes = math.inf, list[str]()
        """The end in Unix seconds, and lines for the user."""
        expires_at = config.expires_at
        announced = {name: os.environ[name] for name in _END_VARIABLES if os.environ.get(name)}
        ends = announced if expires_at is None else {"trainer.expires_at": expires_at}
        for source, value in ends.items() if expires_at != "never" else ():
            self._add_announcement(source, value)

    def _add_announcement(self, source: str, value: str | float) -> None:
        try:
            at_s = to_epoch_seconds(value)
            when = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        except (ValueError, OverflowError, OSError):
            self.notes += [f"Warning: {source}={value} is not a time and is ignored"]
            return
        if at_s <= self._clock():
            self.notes += [f"Warning: {source}={value} is past ({when}) and is ignored"]
        elif at_s < self.at_s:
            self.at_s, self.reason = at_s, f"the machine's end at {when} ({source})"
            self.notes += [f"The run saves and ends before {self.reason}"]

    def is_near(self, before_step: bool = False) -> bool:
        """Return whether it is time to stop, before another step or within one."""
        step_s = self._step_s if before_step else self._unbroken_s
        needs_s = step_s + self.save_s() + _RESERVE_S if self._margin_s is None else self._margin_s
        return self.at_s - self._clock() <= needs_s

    def log(self, step: int, record: Record) -> None:
        """Take the duration of a step from its record."""
        times = {
            name: record.get(f"time/{name}_s", 0.0) for name in ("step", "evaluate", "rollout")
        }
        step_s = times["step"] - times["evaluate"]
        self._step_s = max(self._step_s, step_s)
        self._unbroken_s = max(self._unbroken_s, step_s - times["rollout"])


class ShutdownSignal:
    """Handles the stop signals of a process, and defers a request until it is safe to stop.

    Args:
        announces: print at once, on stderr, what a deferred request waits for.
    """

    def __init__(self, announces: bool = True) -> None:
        self._announces = announces
        self.updates_left: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the updates that the step has still to do, and all of it, where it is known."""
        self._signal: int | None = None
        self._reason = ""
        self._end: MachineDeadline | None = None
        self._is_deferring = False
        self._task: asyncio.Task[Any] | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within the block; ignored ones (nohup) stay ignored, and only the
        main thread of a process gets any."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = stop_signals() if is_main else []
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer requests within the block to the next `check` or `interruptible`."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False

    @contextlib.contextmanager
    def stop_before(self, end: MachineDeadline) -> Iterator[None]:
        """Request a stop in time before the machine's end; use within `deferring`."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_HEARTBEAT_S):
                if end.is_near():
                    self.request_stop(signal.SIGTERM, end.reason)
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
        """Stop before a step on request, or if the machine would end before the step.

        Raises:
            Stopped: on a request, or before the machine's end.
        """
        if self._signal is None and self._end is not None and self._end.is_near(before_step=True):
            self.request_stop(signal.SIGTERM, self._end.reason)
        self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self._signal is not None:
            raise Stopped(self._signal, self._reason)

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, and cancel it on a request.

        Raises:
            Stopped: it was cancelled; the state of its objects is undefined.
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
        """Run `work` by `asyncio.run`, and cancel it cleanly on a request, even before its loop
        runs (which `asyncio.run` itself does not handle).

        Raises:
            Stopped: it was cancelled.
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
            what = "finishing the step" if self._task is None else "dropping open answers"
            left, updates = self.updates_left()
            if left:
                what = f"stopping: {left} of {updates} updates of this step left"
            hint = " (Ctrl-C again ends at once)" if number == signal.SIGINT else ""
            line = f"\nwinnow: {signal.Signals(number).name}: {what}, then saving{hint}\n"
            # Not through the console: a handler may interrupt it halfway through a line.
            with contextlib.suppress(OSError):
                os.write(2, line.encode())
        self.request_stop(number)

    def request_stop(self, number: int, reason: str = "") -> None:
        """Record a request, and cancel what is interruptible; thread-safe."""
        self._reason, self._signal = reason, number
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)


def ignore_broken_output() -> None:
    """Let this process go on when stdout or stderr can no longer be written to."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LossyStream):
            setattr(sys, name, _LossyStream(stream, name))


class _LossyStream:
    """A stream that drops all output after a write error."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, unless there was an error."""
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flush, unless there was an error."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            log.warning(
                "%s can no longer be written to (%s): the run goes on; see this log and its folder",
                self._name,
                error.strerror or error,
            )
