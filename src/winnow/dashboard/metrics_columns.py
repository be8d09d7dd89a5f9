"""metrics.jsonl as columns, one number or None a step, read from where the last reading ended."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import accumulate
from threading import RLock
from typing import Any

import numpy as np

from winnow.dashboard.runs import GrowingFile, RunFiles
from winnow.observe.jsonl import METRICS_FILE, parse_record
from winnow.observe.metrics import EVAL, GENERATED_TOKENS, STEP_S

Column = list[float | None]
_MOST_POINTS = 4000
"""Points of a curve that a page gets; of more rows, neighbours are put together."""
_REDUCTIONS = (
    *((pattern, "max") for pattern in ("*/max", "*/max_*", "memory/*", "ranks/peak_gib")),
    ("*/min", "min"),
    ("scoring/mean_s", "scoring/answers"),
    *((f"sampling/{name}", "mean") for name in ("tokens/in_progress", "groups/carried_*")),
    *((f"sampling/{name}/*", "sum") for name in ("tokens", "answers", "groups")),
    *((pattern, "sum") for pattern in ("time/*_s", "*/time_s", "overlap/*", "judge/*")),
    *((f"scoring/{name}", "sum") for name in ("answers", "failed", "busy_s")),
    *((pattern, "sum") for pattern in ("sft/tokens", "*/updates", "*/skipped_updates")),
    *((f"sampling/{name}", "sampling/groups/looked_at") for name in ("accuracy", "keep_rate")),
    *((f"{part}/*", "sampling/groups/trained") for part in ("score", "length")),
    *((f"{part}/*", f"{part}/updates") for part in ("actor", "critic")),
    *((f"{part}/*", "sampling/tokens/trained") for part in ("mismatch", "correction")),
    ("throughput/*", STEP_S),
)
"""Patterns of figures, the first that fits counts, and how neighbours are put together: by their
sum, maximum, minimum or mean, or by the mean that another figure of the record weighs. All others
by their mean."""
_TAIL_BYTES = 1 << 16


class MetricsColumns:
    """The figures of a run by name, as of the last `refresh`."""

    def __init__(self, files: RunFiles) -> None:
        self._file, self._lock = GrowingFile(files, METRICS_FILE), RLock()
        self.rereads = 0
        """Times that the file was read from its beginning."""
        self._reset()

    def _reset(self) -> None:
        self.rereads += 1
        self._line = 0
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
            lines, is_new = self._file.read_lines(size)
            if is_new:
                self._reset()
            self._add_lines(lines.split(b"\n")[:-1])

    def _add_lines(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._line += 1
            try:
                record = parse_record(line)
            except ValueError as error:
                self._problems.append(
                    f"{METRICS_FILE} line {self._line} was skipped: not a metrics record ({error})"
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

    def curves(self, patterns: Collection[str]) -> dict[str, Any]:
        """Return the figures that match a pattern, and the steps, tokens and seconds up to each.

        Of more than `_MOST_POINTS` rows, `every` neighbours make a point, whose `step` is the last
        of them. `totals` are sums over all rows, of those figures that can be summed.

        Example: `{"step": [2, 4, 5], "rows": [2, 2, 1], "steps": 5,
        "tokens": [9, 20, 31], "time_s": [1, 2, 3], "every": 2, "values": {…}, "totals": {…}}`.
        """
        with self._lock:  # no row comes in between
            names = [n for n in self.names if any(fnmatchcase(n, each) for each in patterns)]
            steps = self.steps
            every = -(-len(steps) // _MOST_POINTS) or 1
            starts = list(range(0, len(steps), every))
            lasts = [min(start + every, len(steps)) - 1 for start in starts]

            def up_to(name: str) -> list[float | None]:
                sums = list(accumulate(value or 0.0 for value in self.column(name)))
                return [round_to(sums[row], 15) for row in lasts]

            return {
                "step": [steps[row] for row in lasts],
                "rows": [last - start + 1 for start, last in zip(starts, lasts, strict=True)],
                "steps": sum(step > 0 for step in steps),
                "tokens": up_to(GENERATED_TOKENS),
                "time_s": up_to(STEP_S),
                "every": every,
                "values": {
                    name: [round_to(v) for v in self._reduce_bins(name, starts)] for name in names
                },
                "totals": {
                    name: round_to(sum(value or 0.0 for value in self.column(name)), 15)
                    for name in names
                    if _reduction_of(name) == "sum"
                },
            }

    def _reduce_bins(self, name: str, starts: list[int]) -> Iterable[float | None]:
        """Put the rows from each start to the next together."""
        if len(starts) == len(self._steps):
            return self.column(name)
        how, values = _reduction_of(name), np.array(self.column(name), float)
        if how in ("max", "min"):
            extreme = np.fmax if how == "max" else np.fmin
            return map(float, extreme.reduceat(values, starts))
        is_valid = ~np.isnan(values)
        weights = np.array(self.column(how), float)
        weights = np.where(is_valid, np.where(weights > 0, weights, 1.0), 0.0)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            totals = np.add.reduceat(np.where(is_valid, values * weights, 0.0), starts)
            # A point without any value divides by 0, and is none.
            divisor = (np.logical_or if how == "sum" else np.add).reduceat(weights, starts)
            return map(float, totals / divisor)


def _reduction_of(name: str) -> str:
    return next((how for pattern, how in _REDUCTIONS if fnmatchcase(name, pattern)), "mean")


def round_to(value: float | None, digits: int = 6) -> float | None:
    """Round to some digits, of which a page shows six at most; None where it is no number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def read_tail(files: RunFiles, size: int) -> tuple[Mapping[str, float], float | None]:
    """Read the last whole lines of metrics.jsonl.

    Returns:
        The last record, with the figures of the last evaluation if one of these lines has them,
        and the mean seconds of a step over these lines. Empty and None where there is no record.

    Raises:
        UnreadableError: the file cannot be read.
    """
    if not size:
        return {}, None
    last: dict[str, float] = {}
    seconds = []
    for line in files.read(METRICS_FILE, max(size - _TAIL_BYTES, 0), size).split(b"\n")[:-1]:
        with suppress(ValueError):
            record = parse_record(line)
            held_out = {name: v for name, v in record.items() if name.startswith(EVAL)}
            last = record | (held_out or {n: v for n, v in last.items() if n.startswith(EVAL)})
            if record["step"] > 0 and math.isfinite(record.get(STEP_S, math.nan)):
                seconds.append(record[STEP_S])
    return last, sum(seconds) / len(seconds) if seconds else None
