"""What a worker says unasked, at its end: its log, what it prints, and that it gets on.

All of it goes into one stream, so that the order is kept: the process's standard output and error
are the stream, and records of the log and of progress lie between what is printed, each begun by a
byte that text does not hold. What was written before a process died is read after it.
`listening` is the other end.
"""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

from winnow.workers.host import Host

RECORD = b"\x1e"
BEAT_S = 0.1
_RECORD_CHARACTERS = 300
"""As JSON at most 3,600 bytes, which the system writes at once even where others write too."""
_DUMP_AFTER = 0.9
"""Of the time limit, so that the log says where a worker hangs before it is killed."""


class LogSender:
    """The stream of this process.

    Args:
        descriptor: the stream; blocking.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def become_output(self) -> None:
        """Make the stream what the process prints to, C code and its children included."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            if self._descriptor != number:
                os.dup2(self._descriptor, number)
        sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
        faulthandler.enable(file=2)

    def log(self, level: int, logger: str, text: str) -> None:
        """Tell of something logged."""
        ends = range(0, max(1, len(text)), _RECORD_CHARACTERS)
        parts = [text[end : end + _RECORD_CHARACTERS] for end in ends]
        with self._lock:
            for part in parts[:-1]:
                self._write({"more": part})
            self._write({"level": level, "logger": logger, "text": parts[-1]})

    def beat(self, progress: int) -> None:
        """Tell that the worker's progress has changed."""
        with self._lock:
            self._write({"progress": progress})

    def _write(self, record: dict[str, Any]) -> None:
        data = RECORD + json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


class Handler(logging.Handler):
    """Sends the process's log to the driver."""

    def __init__(self, teller: LogSender) -> None:
        super().__init__()
        self._teller = teller
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, its traceback in its text."""
        try:
            self._teller.log(record.levelno, record.name, self.format(record).rstrip())
        except Exception:
            self.handleError(record)


def start_telling(
    teller: LogSender, host: Host, stall_timeout_s: float, level: int, is_orphan: Callable[[], bool]
) -> None:
    """Send the log and Python's warnings from now on, and follow the worker's progress.

    Args:
        level: what `winnow`'s loggers let through; others tell of warnings and worse.
        is_orphan: asked at each beat; where it says so, the process ends.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[Handler(teller)], force=True)
    logging.getLogger("winnow").setLevel(level)
    logging.captureWarnings(True)
    beats = _Beats(teller, host, stall_timeout_s, is_orphan)
    host.at_call = beats.arm  # by itself: a call that hangs in C may let no other thread run again
    threading.Thread(target=beats.run, name="winnow-beats", daemon=True).start()


class _Beats:
    """Tells of progress while a method computes, and dumps all stacks where there is none."""

    def __init__(
        self, teller: LogSender, host: Host, stall_timeout_s: float, is_orphan: Callable[[], bool]
    ) -> None:
        self._teller, self._host, self._is_orphan = teller, host, is_orphan
        self._dump_after_s = _DUMP_AFTER * stall_timeout_s
        self._pause = threading.Event()

    def run(self) -> None:
        progress: int | None = None
        seen: tuple[Any, ...] = ()
        while not self._pause.wait(BEAT_S):
            if self._is_orphan():
                os._exit(1)
            try:
                now = self._host.progress
                if now is not None and now != progress:
                    progress = now
                    self._teller.beat(now)
            except OSError:  # nobody listens any more
                os._exit(1)
            state = (now, self._host.calls_ended, self._host.calls_under_way > 0)
            if state != seen:
                seen = state
                self.arm()

    def arm(self) -> None:
        """Have the stacks dumped unless this is called again in time; no Python need run then."""
        if self._host.calls_under_way == 0:
            faulthandler.cancel_dump_traceback_later()
        elif self._dump_after_s < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(self._dump_after_s, file=2)


def _unbuffered(number: int) -> TextIO:
    """Standard output or error of which nothing is lost when the process is killed."""
    raw = cast(Any, io.FileIO(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
