"""The file metrics.jsonl: one line a step, complete or absent.

JSON has no NaN: such a figure is `null`, and the line's `non_finite` says what it was, so that
nothing is lost and every JSON reader can read the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from winnow.errors import CheckpointError, WinnowError
from winnow.observe.files import AppendFile
from winnow.observe.metrics import Number, Record, plain
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
        self._path, self._file = path, AppendFile(path)
        self.close = self._file.close

    def start(self, info: RunInfo) -> None:
        pass  # the file holds steps alone

    def log(self, step: int, record: Record) -> None:
        self._file.append(encode_line(step, record))

    def offset(self) -> int:
        """Return the bytes up to here, safely on disk: a checkpoint's manifest notes them.

        Raises:
            WinnowError: the disk refuses.
        """
        self._file.sync()
        return self._file.size

    def truncate(self, offset: int) -> None:
        """Forget every line after `offset`.

        Raises:
            CheckpointError: the file is shorter, or no line ends there.
        """
        if not self._file.ends_line(offset):
            raise CheckpointError(
                f"{self._path} has {self._file.size} bytes and no line that ends at {offset}, "
                "where the checkpoint continues: it was changed since; put it back, or start a "
                "new run"
            )
        self._file.truncate(offset)


def encode_line(step: int, record: Record) -> bytes:
    """Write the line of a step, its newline included."""
    numbers = {name: plain(value) for name, value in record.items()}
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    line: dict[str, object] = {"step": step, **numbers, **dict.fromkeys(odd)}
    if odd:
        line[_NON_FINITE] = odd
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode_line(line: bytes | str) -> dict[str, Number]:
    """Read the record that `encode_line` wrote, its `step` among the figures.

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
    """Read the records of a run, in order; a last line without its end is still being written.

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
