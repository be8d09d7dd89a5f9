"""A worker's stream to the driver: its log, what it prints, and its progress.

All of it goes into one stream, so that the order is kept: the process's standard output and error
are the stream, and records of the log and of progress lie between what is printed, each begun by a
byte that text does not hold. What was written before a process died is read after it.

    worker   LogSender ─► standard output, or a connection ─► LogReceiver   driver
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import json
import logging
import os
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

RECORD = b"\x1e"
_RECORD_CHARACTERS = 300
"""As JSON at most 3,600 bytes, which the system writes at once even where others write too."""
_RECORD_BYTES = 1 << 12
"""More than a record has."""
_RECORDS = ({"more"}, {"progress"}, {"level", "logger", "text"})
_PRINTED = logging.getLogger("winnow.workers.worker")


class LogSender(logging.Handler):
    """The stream of this process, as a handler of its log.

    Args:
        descriptor: the stream; blocking.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._descriptor = descriptor

    def redirect_output(self) -> None:
        """Have the process print to the stream, C code and its children included."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            if self._descriptor != number:
                os.dup2(self._descriptor, number)
        sys.stdout, sys.stderr = _open_unbuffered(1), _open_unbuffered(2)
        faulthandler.enable(file=2)

    def redirect_logging(self, level: int) -> None:
        """Send the log and Python's warnings from now on.

        Args:
            level: the least that `winnow`'s loggers let through; others send warnings and worse.
        """
        logging.basicConfig(level=logging.WARNING, handlers=[self], force=True)
        logging.getLogger("winnow").setLevel(level)
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record of the log, its traceback in its text."""
        try:
            text = self.format(record).rstrip()
            ends = range(0, max(1, len(text)), _RECORD_CHARACTERS)
            *chunks, last = [text[end : end + _RECORD_CHARACTERS] for end in ends]
            for chunk in chunks:
                self._write_record({"more": chunk})
            self._write_record({"level": record.levelno, "logger": record.name, "text": last})
        except Exception:
            self.handleError(record)

    def send_progress(self, progress: int) -> None:
        """Send the worker's progress, which has changed.

        Raises:
            OSError: nobody reads the stream any more.
        """
        self.acquire()
        try:
            self._write_record({"progress": progress})
        finally:
            self.release()

    def _write_record(self, record: dict[str, Any]) -> None:
        data = RECORD + json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


def _open_unbuffered(number: int) -> TextIO:
    """Open standard output or error so that nothing is lost when the process is killed."""
    raw = cast(Any, io.FileIO(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


@dataclass
class LogReceiver:
    """Logs what one worker sends, as `policy[1]: text`, and keeps its progress."""

    role: str
    rank: int
    progress: int | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The stream is closed: nothing of the process is left, or it closed its output."""
    _printed: bytes = b""
    """The beginning of a line within which a record was written."""
    _logged: str = ""
    """The beginning of a text that takes several records."""

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Read until the stream ends."""
        try:
            while line := await _read_line(reader):
                self._handle_line(line)
        except ConnectionError:  # of a process on another machine, when it is killed
            pass
        finally:
            self._handle_line(b"")
            self.has_ended.set()

    def _handle_line(self, line: bytes) -> None:
        printed, is_record, data = line.rpartition(RECORD)
        record = _parse_record(data) if is_record else None
        if record is None:  # the byte may have been in something printed
            text = (self._printed + line).decode("utf-8", "backslashreplace")
            self._printed = b""
            # A progress bar writes over itself; what it shows last is kept.
            self._log(logging.INFO, "", text.rstrip().rpartition("\r")[2])
            return
        self._printed += printed
        if "progress" in record:
            self.progress = record["progress"]
        elif "more" in record:
            self._logged += record["more"]
        else:
            text, self._logged = self._logged + record["text"], ""
            self._log(record["level"], record["logger"], text)

    def _log(self, level: int, name: str, text: str) -> None:
        """Log a text, by the worker's own logger where the driver's log has that."""
        is_ours = name.split(".")[0] == "winnow" or name == "py.warnings"
        logger = logging.getLogger(name) if is_ours else _PRINTED
        if text or name:
            logger.log(level, "%s[%d]: %s", self.role, self.rank, text)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read a line, or as much as the reader may hold of a longer one; at the end the rest."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        line = await reader.readexactly(error.consumed)
        # A record that has begun in it is not cut.
        return line + await _read_line(reader) if RECORD in line[-_RECORD_BYTES:] else line


def _parse_record(data: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(data)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() in _RECORDS else None
