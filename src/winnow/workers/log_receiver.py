"""The driver's end of what a worker says unasked (`telling`): taken apart, and logged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from winnow.workers.log_sender import RECORD
from winnow.workers.protocol import OnLog, WorkerLine

LONGEST_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_OWN = logging.getLogger("winnow.workers.worker")


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
        """What is complete with these bytes."""
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
        """What the stream ended with, without a line's end."""
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
    """What one worker says; logs it and keeps its progress.

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
        """Until the stream ends."""
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
