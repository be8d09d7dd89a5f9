"""Sinks for the records of a run: `Sink` is the protocol, also for a sink of your own.

`observe.sinks=[{path: mine.py:Table, options: {file: x}}]` names a class, which is called with its
options once, before the first step. A record maps names (`winnow.observe.metrics`) to numbers. All
calls come from one thread that the sink has for itself: the run does not wait for it. One that
raises or hangs is dropped with a warning, and the run goes on. A method `mark_complete`, where
there is one, is called before `close` when the run came to its last step. Example:

    class Table:
        def __init__(self, file: str) -> None:
            self.file = open(file, "a")

        def start(self, info) -> None:
            print(info.name, info.steps, file=self.file)

        def log(self, step: int, record) -> None:
            print(step, record.get("score/reward/mean"), file=self.file)

        def close(self) -> None:
            self.file.close()
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from winnow.config.root import CustomSink, TrackingConfig
from winnow.errors import ConfigError
from winnow.observe.files import one_line
from winnow.observe.metrics import Record

Warn = Callable[[str], None]
Kind = Literal["train", "warm_up", "sft"]
MOST_WAITING = 1000
"""Records that a sink in the background may be behind the run."""
BEGIN_S = 20.0
"""Seconds that a run waits at its start for sinks in the background to be ready."""
_POLL_S = 0.2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """The description of a run that a sink receives before the first record."""

    name: str
    steps: int
    """The last step's number."""
    first_step: int = 1
    """Higher when a run is resumed."""
    kind: Kind = "train"


class Sink(Protocol):
    """The protocol of a sink, which receives one record a step; subclasses of it may leave out
    `start` and `close`."""

    def start(self, info: RunInfo) -> None:
        """Begin a run, or its warm-up."""
        return

    def log(self, step: int, record: Record) -> None:
        """Take the figures of a step; step 0 holds the evaluation before training."""

    def close(self) -> None:
        """End: no more records come. Also called after an error."""
        return


class Sinks:
    """Several sinks as one: called in order, closed in reverse, even when one of them fails."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._background = [sink for sink in self._sinks if isinstance(sink, BackgroundSink)]
        self._first: Record = {}

    def add_to_first_record(self, figures: Record) -> None:
        """Add figures to the first record, such as what the start took."""
        self._first = figures

    def start(self, info: RunInfo) -> None:
        """Start all; those in the background may take `BEGIN_S` to import what they need, which
        would slow the first step down."""
        for sink in self._sinks:
            sink.start(info)
        deadline = time.monotonic() + BEGIN_S
        for sink in self._background:
            sink.wait_until_ready(deadline)

    def log(self, step: int, record: Record) -> None:
        record, self._first = {**record, **self._first}, {}
        for sink in self._sinks:
            sink.log(step, record)

    def mark_complete(self) -> None:
        """Tell the sinks that the run reached its last step, which may be earlier than planned."""
        for sink in self._background:
            sink.mark_complete()

    def close(self) -> None:
        for sink in self._background:  # so that they wait side by side
            sink.request_close()
        with contextlib.ExitStack() as stack:
            for each in self._sinks:
                stack.callback(each.close)


class BackgroundSink:
    """A sink whose calls go through a bounded queue to its own daemon thread.

    A sink that raises, or takes longer than `tracking.timeout_s` for a call, is dropped with a
    warning. One that is `MOST_WAITING` records behind misses what comes until it has caught up,
    and the end reports the number. `close` waits for at most `tracking.close_s`. Warnings are
    handed over in `log` and `close`, and so in the caller's thread.
    """

    def __init__(
        self, label: str, make: Callable[[], Sink], tracking: TrackingConfig, warn: Warn
    ) -> None:
        """Start nothing yet.

        Args:
            label: the sink, in messages.
            make: makes it, called in its thread.
        """
        self._label, self._make, self._tracking, self._warn = label, make, tracking, warn
        self._calls: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(MOST_WAITING)
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_thread, name=f"sink {label}", daemon=True)
        self._is_ready = threading.Event()  # or failed
        self._is_over = self._is_ending = False
        self._busy_since: float | None = None
        self._missed = 0
        self._deadline = 0.0

    def start(self, info: RunInfo) -> None:
        def begin(sink: Sink) -> None:
            sink.start(info)
            if where := getattr(sink, "where_to_look", ""):
                self._messages.put(f"{self._label}: {where}")
            self._is_ready.set()

        self._calls.put_nowait(begin)
        self._thread.start()

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until the sink has started or failed, and deliver its messages.

        Args:
            deadline: when to stop waiting, by `time.monotonic`.
        """
        self._is_ready.wait(max(deadline - time.monotonic(), 0.0))
        self._deliver_messages()

    def log(self, step: int, record: Record) -> None:
        since = self._busy_since or math.inf
        if not self._is_over and time.monotonic() - since > self._tracking.timeout_s:
            seconds = f"{self._tracking.timeout_s:g} s (observe.tracking.timeout_s)"
            self._drop(f"is disabled: no response within {seconds}")
        record = dict(record)
        try:
            if not self._is_over:
                self._calls.put_nowait(lambda sink: sink.log(step, record))
        except queue.Full:
            self._missed += 1
            if self._missed == 1:
                self._messages.put(
                    f"Warning: {self._label} is {MOST_WAITING} records behind; new records are "
                    "dropped until it catches up, and metrics.jsonl is complete"
                )
        self._deliver_messages()

    def mark_complete(self) -> None:
        """Call `mark_complete` of a sink that has this method."""
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(lambda sink: getattr(sink, "mark_complete", lambda: None)())

    def request_close(self) -> None:
        """Request the end, and start the timeout of `close`."""
        if not self._is_ending:
            self._is_ending, self._deadline = True, time.monotonic() + self._tracking.close_s
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)  # wakes the thread up

    def close(self) -> None:
        self.request_close()
        if not self._is_over and self._thread.is_alive():
            self._thread.join(max(self._deadline - time.monotonic(), 0.0))
            if self._thread.is_alive():
                seconds = f"{self._tracking.close_s:g} s (observe.tracking.close_s)"
                rest = self._calls.qsize()
                self._drop(f"did not close within {seconds}; {rest} records were not sent")
        if self._missed:
            missed, self._missed = self._missed, 0
            self._messages.put(f"Warning: {self._label} was too slow and lost {missed} records")
        self._deliver_messages()

    def _run_thread(self) -> None:
        """Make the sink and call it, until the end or its first failure."""
        sink: Sink | None = None
        try:
            sink = self._call_timed(self._make)
            while not self._is_over and not (self._is_ending and self._calls.empty()):
                if call := self._next_call():
                    self._call_timed(partial(call, sink))
            self._call_timed(sink.close)
        except BaseException as error:  # also SystemExit, by a library without its key
            if not self._is_over:
                self._drop(f"is disabled: {type(error).__name__}: {one_line(error)}")
            if sink is not None:  # so that it releases its resources
                try:
                    sink.close()
                except BaseException as fault:
                    log.info("closing %s failed, too: %s", self._label, one_line(fault))
        finally:
            self._is_ready.set()

    def _next_call(self) -> Callable[[Sink], None] | None:
        with contextlib.suppress(queue.Empty):
            return self._calls.get(timeout=_POLL_S)
        return None

    def _call_timed(self, call: Callable[[], Any]) -> Any:
        self._busy_since = time.monotonic()
        try:
            return call()
        finally:
            self._busy_since = None

    def _drop(self, reason: str) -> None:
        self._is_over = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            _abandoned.append(self._thread)
        self._messages.put(f"Warning: {self._label} {reason} (training continues)")

    def _deliver_messages(self) -> None:
        while not self._messages.empty():
            self._warn(self._messages.get())


_abandoned: list[threading.Thread] = []


def has_hanging_sink() -> bool:
    """Return whether a dropped sink is still running: exit handlers of its library may then hang,
    too."""
    return any(thread.is_alive() for thread in _abandoned)


def load_user_sink(
    section: CustomSink, number: int, warn: Warn, tracking: TrackingConfig
) -> BackgroundSink:
    """Load the class of the section `observe.sinks[number]`; its sink runs in the background.

    Raises:
        ConfigError: the class is not there, or lacks a method.
    """
    from winnow.user_code import load_user_object

    field = f"observe.sinks[{number}].path"
    label = f"{field} {section.path}"
    sink_class = load_user_object(section.path, field, ConfigError)
    missing = [name for name in ("start", "log", "close") if not hasattr(sink_class, name)]
    if missing:
        raise ConfigError(
            f"{label} has no method {missing[0]}; a sink is a class with start, log and close"
        )
    return BackgroundSink(label, partial(sink_class, **section.options), tracking, warn)
