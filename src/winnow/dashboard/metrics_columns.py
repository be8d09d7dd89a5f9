"""metrics.jsonl as columns, one number or None a step, read from where the last reading ended."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import count
from threading import Lock, RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.dashboard.runs import ABSENT, GrowingFile, RunFiles
from winnow.observe.jsonl import METRICS_FILE, parse_record
from winnow.observe.metrics import EVAL, GENERATED_TOKENS, STEP_S

Column = NDArray[np.float64]
"""A number a row, NaN where a row has none."""
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
_MOST_LINES = 1000
"""Lines whose records are held at once."""
_MOST_TEXTS = 8
"""Requests for a run's curves whose answers are kept."""
_READINGS = count()


class MetricsColumns:
    """The figures of a run by name, as of the last `refresh`."""

    def __init__(self, files: RunFiles) -> None:
        self._file, self._lock = GrowingFile(files, METRICS_FILE), RLock()
        self._reset()

    def _reset(self) -> None:
        self.reading = next(_READINGS)
        """A number that is another whenever the file is read from its beginning."""
        self._line = 0
        self._steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self._texts: dict[tuple[tuple[str, ...], int], str] = {}
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
            if lines:
                self._texts.clear()
            parts = lines.split(b"\n")[:-1]
            for start in range(0, len(parts), _MOST_LINES):
                self._add_lines(parts[start : start + _MOST_LINES])

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        records = []
        for line in lines:
            self._line += 1
            try:
                records.append(parse_record(line))
            except ValueError as error:
                self._problems.append(
                    f"{METRICS_FILE} line {self._line} was skipped: not a metrics record ({error})"
                )
        rows_by_names: dict[tuple[str, ...], list[int]] = {}
        for row, record in enumerate(records):
            rows_by_names.setdefault(tuple(record), []).append(row)
        added: dict[str, Column] = {}
        for names, rows in rows_by_names.items():
            block = np.array([list(records[row].values()) for row in rows], float)
            block[~np.isfinite(block)] = math.nan
            for name, values in zip(names, block.T, strict=True):
                if name not in added:
                    added[name] = np.full(len(records), math.nan)
                added[name][rows] = values
        added.pop("step", None)
        for name, values in added.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (len(self._steps) - len(column)))
            column.frombytes(values.tobytes())
        self._steps += [int(each["step"]) for each in records]

    @property
    def n_rows(self) -> int:
        """Rows that were read."""
        return len(self._steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the figures take, and the texts made of them."""
        texts = sum(map(len, list(self._texts.values())))
        return 8 * len(self._steps) * len(self._columns) + texts

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
        """Return a figure by row."""
        with self._lock:
            column = self._columns.get(name, ())
            values = np.full(len(self._steps), math.nan)
            values[: len(column)] = column
            return values

    def records(self, start: int) -> list[tuple[int, dict[str, float]]]:
        """Return the rows from `start` on: step and figures, without those that are no number."""
        with self._lock:
            rows = range(start, len(self._steps))
            return [
                (self._steps[row], {
                    name: value for name, column in self._columns.items()
                    if row < len(column) and not math.isnan(value := column[row])})
                for row in rows
            ]  # fmt: skip

    def curves_json(self, patterns: Collection[str], every: int) -> str:
        """Return `curves` as JSON, made once until a row is added."""
        key = tuple(patterns), every
        with self._lock:
            if key not in self._texts:
                text = json.dumps(self.curves(patterns, every), separators=(",", ":"))
                self._texts[key] = text
                if len(self._texts) > _MOST_TEXTS:
                    del self._texts[next(iter(self._texts))]
            return self._texts[key]

    def curves(self, patterns: Collection[str], every: int) -> dict[str, Any]:
        """Return the figures that match a pattern, and the steps, tokens and seconds up to each.

        `every` neighbouring rows make a point, whose `step` is the last of them; it ends early at a
        row with held-out figures, where these are few, and before the last row. `extremes` are,
        of figures that differ within a point, its least and largest row in the order of the file.
        `totals` are sums over all rows, of those figures that can be summed.

        Example: `{"step": [2, 4, 5], "rows": [2, 2, 1], "steps": 5, "tokens": [9, 20, 31],
        "time_s": [1, 2, 3], "every": 2, "values": {"a": [1.5, 3, 7]},
        "extremes": {"a": [[1, 4, 7], [2, 2, 7]]}, "totals": {…}}`.
        """
        # No row comes in between, and any number may stand in a file.
        with self._lock, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            names = [n for n in self.names if any(fnmatchcase(n, each) for each in patterns)]
            columns = {name: self.column(name) for name in names}
            lasts = self._last_rows(columns, every)
            starts = np.append(0, lasts[:-1] + 1)[: len(lasts)]

            def up_to(name: str) -> list[float | None]:
                return _to_json(np.nancumsum(self.column(name))[lasts], 15)

            extremes = {name: _extremes(values, starts) for name, values in columns.items()}
            return {
                "step": [self._steps[row] for row in lasts],
                "rows": (lasts - starts + 1).tolist(),
                "steps": sum(step > 0 for step in self._steps),
                "tokens": up_to(GENERATED_TOKENS),
                "time_s": up_to(STEP_S),
                "every": every,
                "values": {name: _to_json(self._reduce_bins(name, starts)) for name in names},
                "extremes": {n: [_to_json(a), _to_json(b)] for n, (a, b) in extremes.items()
                             if not np.array_equal(a, b, equal_nan=True)},
                "totals": {
                    name: round_to(float(np.nansum(values)), 15)
                    for name, values in columns.items()
                    if _reduction_of(name) == "sum"
                },
            }  # fmt: skip

    def _last_rows(self, columns: Mapping[str, Column], every: int) -> NDArray[np.int64]:
        rows = np.arange(len(self._steps))
        ends = (rows % every == every - 1) | (rows >= len(rows) - 2)
        held_out = np.zeros(len(rows), bool)
        for name, values in columns.items():
            if name.startswith(EVAL):
                held_out |= ~np.isnan(values)
        ends = ends | held_out if held_out.sum() * every <= len(rows) else ends
        return np.flatnonzero(ends)

    def _reduce_bins(self, name: str, starts: NDArray[np.int64]) -> Column:
        """Put the rows from each start to the next together."""
        values = self.column(name)
        if len(starts) == len(values):
            return values
        how = _reduction_of(name)
        if how in ("max", "min"):
            extreme = np.fmax if how == "max" else np.fmin
            return np.asarray(extreme.reduceat(values, starts))
        is_valid = ~np.isnan(values)
        weights = self.column(how)
        weights = np.where(is_valid, np.where(weights > 0, weights, 1.0), 0.0)
        totals = np.add.reduceat(np.where(is_valid, values * weights, 0.0), starts)
        # A point without any value divides by 0, and is none.
        divisor = (np.logical_or if how == "sum" else np.add).reduceat(weights, starts)
        return np.asarray(totals / divisor)


class FigureStore:
    """The figures of many runs, of which those asked for last stay in memory.

    Args:
        limit: bytes of figures in memory; one run may have more.
    """

    def __init__(self, limit: int = 512 << 20) -> None:
        self._limit, self._lock = limit, Lock()
        self._columns: dict[str, MetricsColumns] = {}

    def read(self, files: RunFiles) -> MetricsColumns:
        """Return the figures of a run as they stand in its file now.

        Raises:
            UnreadableError: the file cannot be read.
        """
        size = files.entries().get(METRICS_FILE, ABSENT).size
        with self._lock:
            columns = self._columns.pop(files.root, None) or MetricsColumns(files)
            self._columns[files.root] = columns
        columns.refresh(size)
        with self._lock:
            left = sum(each.n_bytes for each in self._columns.values()) - self._limit
            for root in list(self._columns)[:-1]:
                if left > 0:
                    left -= self._columns.pop(root).n_bytes
        return columns


def _extremes(values: Column, starts: NDArray[np.int64]) -> tuple[Column, Column]:
    """Return the least and the largest value from each start to the next, the earlier first."""
    if len(starts) == len(values):
        return values, values
    rows = np.arange(len(values))
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    sizes = np.diff(np.append(starts, len(values)))

    def first_row(of: Column) -> NDArray[np.int64]:
        is_there = values == np.repeat(of, sizes)
        return np.asarray(np.minimum.reduceat(np.where(is_there, rows, len(rows)), starts))

    is_rising = first_row(low) < first_row(high)
    return np.where(is_rising, low, high), np.where(is_rising, high, low)


def _to_json(values: Column, digits: int = 6) -> list[float | None]:
    return [round_to(value, digits) for value in values.tolist()]


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
