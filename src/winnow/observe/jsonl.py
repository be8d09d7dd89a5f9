"""metrics.jsonl: one line a step, complete or absent.

JSON has no NaN: such a figure is `null`, and the line's `non_finite` says what it was, so that
nothing is lost and every JSON reader can read the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from winnow.errors import CheckpointError, WinnowError
from winnow.observe.files import disk_error, write_fully
from winnow.observe.metrics import plain
from winnow.observe.names import Number, Record
from winnow.observe.sinks import RunInfo

METRICS_FILE = "metrics.jsonl"
"""Its name in a run's folder."""
_NON_FINITE = "non_finite"


class MetricsLog:
    """The sink that appends to metrics.jsonl; resuming cuts it back to a checkpoint's offset."""

    def __init__(self, path: Path) -> None:
        """Open for appending; made if absent.

        Raises:
            WinnowError: the file cannot be written.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            self._size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disk_error(path, error) from error

    def start(self, info: RunInfo) -> None:
        """Nothing to say: the file holds steps alone."""

    def log(self, step: int, record: Record) -> None:
        """Append the line of a step and hand it to the system at once.

        Raises:
            WinnowError: it could not be written whole; then none of it is left.
        """
        line = encode_line(step, record)
        try:
            write_fully(self._descriptor, line)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise disk_error(self._path, error) from error
        self._size += len(line)

    def offset(self) -> int:
        """Bytes up to here, safely on disk: what a checkpoint's manifest notes.

        Raises:
            WinnowError: the disk refuses.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_error(self._path, error) from error
        return self._size

    def truncate(self, offset: int) -> None:
        """Forget every line after `offset`.

        Raises:
            CheckpointError: the file is shorter, or no line ends there.
        """
        if offset > self._size or (offset and os.pread(self._descriptor, 1, offset - 1) != b"\n"):
            raise CheckpointError(
                f"{self._path} has {self._size} bytes and no line that ends at {offset}, where the "
                "checkpoint continues: it was changed since; put it back, or start a new run"
            )
        try:
            os.ftruncate(self._descriptor, offset)
        except OSError as error:
            raise disk_error(self._path, error) from error
        self._size = offset

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def encode_line(step: int, record: Record) -> bytes:
    """The line of a step, its newline included."""
    numbers = {name: plain(value) for name, value in record.items()}
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    line: dict[str, object] = {"step": step, **numbers, **dict.fromkeys(odd)}
    if odd:
        line[_NON_FINITE] = odd
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes | str) -> dict[str, Number]:
    """The record that `encode_line` wrote, its `step` among the figures.

    Raises:
        ValueError: not such a line.
    """
    record = json.loads(line)
    if not isinstance(record, Mapping) or "step" not in record:
        raise ValueError("no step")
    found = dict(record)
    odd = found.pop(_NON_FINITE, {})
    return found | {name: float(text) for name, text in odd.items()}


def read_metrics(path: Path) -> list[dict[str, Number]]:
    """The records of a run, in order. A last line without its end is still being written: left out.

    Raises:
        WinnowError: no such file, or a line that is none of ours.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise WinnowError(f"cannot read {path}: {reason}; name the folder of a run") from error
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(decode_line(line))
        except ValueError as error:
            raise WinnowError(
                f"{path} line {number} is not a line of metrics ({error}); delete that line"
            ) from error
    return records
