"""metrics.jsonl as columns, one number or None a step, read from where the last reading ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import accumulate
from threading import RLock
from typing import Any

from winnow.dashboard.runs import RunFiles
from winnow.observe.jsonl import METRICS_FILE, parse_record
from winnow.observe.metrics import EVAL, GENERATED_TOKENS, STEP_S

Column = list[float | None]
_MOST_POINTS = 4000
"""Points of a curve that a page gets; of more, every second, third, … one."""
_TAIL_BYTES = 1 << 16
_PROOF_BYTES = 256
"""Bytes before the end of the last reading, by which a file that was cut back is noticed."""


class MetricsColumns:
    """The figures of a run by name, as of the last `refresh`."""

    def __init__(self, files: RunFiles) -> None:
        self._files, self._lock = files, RLock()
        self.beginnings = 0
        """Times that the file was read from its beginning."""
        self._forget()

    def _forget(self) -> None:
        self.beginnings += 1
        self._offset, self._proof, self._line = 0, b"", 0
        self._steps: list[int] = []
        self._columns: dict[str, Column] = {}
        self._problems: list[str] = []

    def refresh(self, size: int) -> None:
        """Read the lines that were added; all of them where a resumed run has cut the file back.

        Args:
            size: bytes of the file now.

        Raises:
            UnreadableError: the file cannot be read.
        """
        with self._lock:
            before = max(self._offset - _PROOF_BYTES, 0)
            if size == self._offset == 0:
                return
            content = self._files.read(METRICS_FILE, before, size) if size > before else b""
            known = self._offset - before
            if size < self._offset or content[:known] != self._proof:
                self._forget()
                content, known = self._files.read(METRICS_FILE, 0, size), 0
            lines, newline, _ = content[known:].rpartition(b"\n")
            if newline:
                self._add(lines.split(b"\n"))
                self._offset += len(lines) + 1
                self._proof = content[: known + len(lines) + 1][-_PROOF_BYTES:]

    def _add(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._line += 1
            try:
                record = parse_record(line)
            except ValueError as error:
                self._problems.append(
                    f"{METRICS_FILE} line {self._line} is left out: not a line of metrics ({error})"
                )
                continue
            row = len(self._steps)
            self._steps.append(int(record.pop("step")))
            for name, value in record.items():
                column = self._columns.setdefault(name, [])
                column += [None] * (row - len(column))
                column.append(float(value) if math.isfinite(value) else None)

    @property
    def problems(self) -> list[str]:
        """Lines that could not be read, and why."""
        return list(self._problems)

    @property
    def steps(self) -> list[int]:
        """Steps of the rows."""
        return list(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the figures."""
        with self._lock:
            return sorted(self._columns)

    def column(self, name: str) -> Column:
        """Return a figure by row; None where a step has none."""
        with self._lock:
            column = self._columns.get(name, [])
            return column + [None] * (len(self._steps) - len(column))

    def records(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """Return the rows from `start` on: step and figures, without those that are no number."""
        with self._lock:
            rows = range(start, len(self._steps))
            return [
                (self._steps[row], {
                    name: value for name, column in self._columns.items()
                    if row < len(column) and (value := column[row]) is not None})
                for row in rows
            ]  # fmt: skip

    def curves(self, patterns: Iterable[str]) -> dict[str, Any]:
        """Return steps, tokens and seconds up to each, and the figures that match a pattern.

        Example: `{"step": [1, 2], "tokens": [9, 20], "time_s": [1, 2], "values": {…}}`.
        """
        with self._lock:  # no row comes in between
            return self._curves(list(patterns))

    def _curves(self, wanted: list[str]) -> dict[str, Any]:
        names = [n for n in self.names if any(fnmatchcase(n, each) for each in wanted)]
        steps = self.steps
        every = -(-len(steps) // _MOST_POINTS) or 1
        last = len(steps) - 1

        def thin(values: Iterable[Any]) -> list[Any]:
            kept = enumerate(values)
            return [v for i, v in kept if i % every == 0 or i == last]

        def total(name: str) -> list[float]:
            return list(accumulate(value or 0.0 for value in self.column(name)))

        return {
            "step": thin(steps),
            "tokens": thin(total(GENERATED_TOKENS)),
            "time_s": [short(each) for each in thin(total(STEP_S))],
            "every": every,
            "values": {name: [short(v) for v in thin(self.column(name))] for name in names},
        }


def short(value: float | None) -> float | None:
    """Round to six digits, as a page shows no more; None where it is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def last_record(files: RunFiles, size: int) -> Mapping[str, float]:
    """Read the last whole line of metrics.jsonl; empty where there is none.

    The figures of the last evaluation are among them, if a line shortly before has them.

    Raises:
        UnreadableError: the file cannot be read.
    """
    if not size:
        return {}
    lines = files.read(METRICS_FILE, max(size - _TAIL_BYTES, 0), size).split(b"\n")[:-1]
    last: dict[str, float] = {}
    for line in reversed(lines):
        with suppress(ValueError):
            record = parse_record(line)
            held_out = {name: v for name, v in record.items() if name.startswith(EVAL)}
            last = last | held_out if last else record
            if held_out:
                break
    return last
