"""A worker's stream to the driver: its log, its output and its progress.

All of it is in one stream, in order: the process's standard output and error, and between them the
records of log and progress, each after a byte that text does not contain. The rest of the stream is
read after the process has died.

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
"""At most 3,600 bytes of JSON, which the system writes atomically among other writers."""
_RECORD_BYTES = 1 << 12
"""Upper bound of a record's size."""
_RECORDS = ({"more"}, {"progress"}, {"level", "logger", "text"})
_PRINTED = logging.getLogger("winnow.workers.worker")


class LogSender(logging.Handler):
    """The sending end of the stream, a handler of this process's log.

    Args:
        descriptor: of the stream, blocking.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))
        self._descriptor = descriptor

    def redirect_output(self) -> None:
        """Redirect output to the stream, that of C code and children included."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            if self._descriptor != number:
                os.dup2(self._descriptor, number)
        sys.stdout, sys.stderr = _open_unbuffered(1), _open_unbuffered(2)
        faulthandler.enable(file=2)

    def redirect_logging(self, level: int) -> None:
        """Redirect the log and Python's warnings to the stream.

        Args:
            level: of `winnow`'s loggers; others have the level WARNING.
        """
        logging.basicConfig(level=logging.WARNING, handlers=[self], force=True)
        logging.getLogger("winnow").setLevel(level)
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        """Send a log record, with its traceback."""
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
        """Send the worker's progress.

        Raises:
            OSError: the driver has closed the stream.
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
    """Open standard output or error without a buffer, which would be lost with a killed process."""
    raw = cast(Any, io.FileIO(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


@dataclass
class LogReceiver:
    """Logs what one worker sends, as `policy[1]: text`, and stores its progress."""

    role: str
    rank: int
    progress: int | None = None
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream is closed: the process has exited, or closed its output."""
    _printed: bytes = b""
    """Start of an output line in which a record was written."""
    _logged: str = ""
    """Start of a text of several records."""

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Read until the stream ends."""
        try:
            while line := await _read_line(reader):
                self._handle_line(line)
        except ConnectionError:  # a process on another machine was killed
            pass
        finally:
            self._handle_line(b"")
            self.has_ended.set()

    def _handle_line(self, line: bytes) -> None:
        printed, is_record, data = line.rpartition(RECORD)
        record = _parse_record(data) if is_record else None
        if record is None:  # the byte may be in the output
            text = (self._printed + line).decode("utf-8", "backslashreplace")
            self._printed = b""
            # A progress bar overwrites itself; only its last state is logged.
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
        """Log a text, with the worker's logger if it is one of `winnow`'s."""
        is_ours = name.split(".")[0] == "winnow" or name == "py.warnings"
        logger = logging.getLogger(name) if is_ours else _PRINTED
        if text or name:
            logger.log(level, "%s[%d]: %s", self.role, self.rank, text)


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Read a line, or the part of a longer one that fits the reader's limit."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        line = await reader.readexactly(error.consumed)
        # A record at its end is not cut.
        return line + await _read_line(reader) if RECORD in line[-_RECORD_BYTES:] else line


def _parse_record(data: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(data)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() in _RECORDS else None
