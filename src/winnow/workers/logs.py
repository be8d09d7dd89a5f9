"""A worker's stream to the driver: its log, what it prints, and its progress.

All of it goes into one stream, so that the order is kept: the process's standard output and error
are the stream, and records of the log and of progress lie between what is printed, each begun by a
byte that text does not hold. What was written before a process died is read after it.

    worker   LogSender ─► standard output, or a connection ─► Parser, LogReceiver   driver
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from winnow.workers.host import Host
from winnow.workers.protocol import OnLog, WorkerLine

RECORD = b"\x1e"
BEAT_S = 0.1
LONGEST_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_RECORD_CHARACTERS = 300
"""As JSON at most 3,600 bytes, which the system writes at once even where others write too."""
_DUMP_AFTER = 0.9
"""The part of the time limit after which the log says where a worker hangs: before it is killed."""
_OWN = logging.getLogger("winnow.workers.worker")


class LogSender:
    """The stream of this process.

    Args:
        descriptor: the stream; blocking.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def become_output(self) -> None:
        """Have the process print to the stream, C code and its children included."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            if self._descriptor != number:
                os.dup2(self._descriptor, number)
        sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
        faulthandler.enable(file=2)

    def log(self, level: int, logger: str, text: str) -> None:
        """Send something logged."""
        ends = range(0, max(1, len(text)), _RECORD_CHARACTERS)
        parts = [text[end : end + _RECORD_CHARACTERS] for end in ends]
        with self._lock:
            for part in parts[:-1]:
                self._write({"more": part})
            self._write({"level": level, "logger": logger, "text": parts[-1]})

    def beat(self, progress: int) -> None:
        """Send the worker's progress, which has changed."""
        with self._lock:
            self._write({"progress": progress})

    def _write(self, record: dict[str, Any]) -> None:
        data = RECORD + json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


class _Handler(logging.Handler):
    """Sends the process's log to the driver."""

    def __init__(self, sender: LogSender) -> None:
        super().__init__()
        self._sender = sender
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, its traceback in its text."""
        try:
            self._sender.log(record.levelno, record.name, self.format(record).rstrip())
        except Exception:
            self.handleError(record)


def start_sending(
    sender: LogSender, host: Host, stall_timeout_s: float, level: int, is_orphan: Callable[[], bool]
) -> None:
    """Send the log and Python's warnings from now on, and follow the worker's progress.

    Args:
        level: the least that `winnow`'s loggers let through; others send warnings and worse.
        is_orphan: asked at each beat; the process ends where the driver is gone.
    """
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler(sender)], force=True)
    logging.getLogger("winnow").setLevel(level)
    logging.captureWarnings(True)
    beats = _Beats(sender, host, stall_timeout_s, is_orphan)
    host.at_call = beats.arm  # by itself: a call that hangs in C may let no other thread run again
    threading.Thread(target=beats.run, name="winnow-beats", daemon=True).start()


class _Beats:
    """Sends progress while a method computes, and dumps all stacks where there is none."""

    def __init__(
        self, sender: LogSender, host: Host, stall_timeout_s: float, is_orphan: Callable[[], bool]
    ) -> None:
        self._sender, self._host, self._is_orphan = sender, host, is_orphan
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
                    self._sender.beat(now)
            except OSError:  # nobody listens any more
                os._exit(1)
            state = (now, self._host.calls_ended, self._host.calls_under_way > 0)
            if state != seen:
                seen = state
                self.arm()

    def arm(self) -> None:
        """Have all stacks dumped unless this is called again in time; no Python need run for it."""
        if self._host.calls_under_way == 0:
            faulthandler.cancel_dump_traceback_later()
        elif self._dump_after_s < threading.TIMEOUT_MAX:
            faulthandler.dump_traceback_later(self._dump_after_s, file=2)


def _unbuffered(number: int) -> TextIO:
    """Open standard output or error so that nothing is lost when the process is killed."""
    raw = cast(Any, io.FileIO(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


@dataclass(frozen=True)
class Said:
    """A line of the log, or one that was printed."""

    level: int
    logger: str
    text: str


@dataclass(frozen=True)
class Beat:
    """The worker's progress."""

    progress: int


@dataclass
class Parser:
    """Takes the stream apart, in whatever pieces it comes."""

    _bytes: bytes = b""
    _printed: bytes = b""
    """The beginning of a line within which a record was written."""
    _logged: str = ""
    """The beginning of a text that takes several records."""

    def feed(self, data: bytes) -> Iterator[Said | Beat]:
        """Yield what is complete with these bytes."""
        self._bytes += data
        while True:
            record, end = self._bytes.find(RECORD), self._bytes.find(b"\n")
            if record >= 0 and (end < 0 or record < end):
                self._printed += self._bytes[:record]
                self._bytes = self._bytes[record:]
                end -= record
                if end < 0:
                    return
                yield from self._record(self._taken(end)[1:])
            elif end >= 0:
                yield from self._line(self._taken(end))
            else:
                if len(self._bytes) >= LONGEST_LINE_BYTES:
                    yield from self._line(self._taken(len(self._bytes)))
                return

    def rest(self) -> Iterator[Said | Beat]:
        """Yield what the stream ended with, without a line's end."""
        yield from self._line(self._taken(len(self._bytes)))

    def _taken(self, end: int) -> bytes:
        line, self._bytes = self._bytes[:end], self._bytes[end + 1 :]
        return line

    def _line(self, line: bytes) -> Iterator[Said]:
        whole, self._printed = self._printed + line, b""
        # A progress bar writes over itself; what it shows last is kept.
        text = whole.decode("utf-8", "backslashreplace").rstrip().rpartition("\r")[2]
        if text:
            yield Said(logging.INFO, "", text)

    def _record(self, data: bytes) -> Iterator[Said | Beat]:
        try:
            found = json.loads(data)
            if "more" in found:
                self._logged += found["more"]
            elif "progress" in found:
                yield Beat(found["progress"])
            else:
                text, self._logged = self._logged + found["text"], ""
                yield Said(found["level"], found["logger"], text)
        except (ValueError, KeyError, TypeError):  # the byte was in something printed
            yield from self._line(RECORD + data)


@dataclass
class LogReceiver:
    """Logs what one worker sends, and keeps its progress.

    Args:
        on_log: gets each line; None sends it to the driver's logging.
    """

    role: str
    rank: int
    on_log: OnLog | None
    progress: int | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The stream is closed: nothing of the process is left, or it closed its output."""

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Read until the stream ends."""
        parser = Parser()
        try:
            while data := await reader.read(_READ_BYTES):
                self._take(parser.feed(data))
        except ConnectionError:  # of a process on another machine, when it is killed
            pass
        finally:
            self._take(parser.rest())
            self.has_ended.set()

    def _take(self, said: Iterator[Said | Beat]) -> None:
        for each in said:
            if isinstance(each, Beat):
                self.progress = each.progress
            else:
                line = WorkerLine(self.role, self.rank, each.level, each.logger, each.text)
                (self.on_log or log_line)(line)


def log_line(line: WorkerLine) -> None:
    """Send a line to the driver's logging, to its own logger where the driver's log has that."""
    is_ours = line.logger.split(".")[0] == "winnow" or line.logger == "py.warnings"
    logger = logging.getLogger(line.logger) if is_ours else _OWN
    logger.log(line.level, "%s", line)
