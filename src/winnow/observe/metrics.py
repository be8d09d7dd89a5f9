"""Figures that know how to reduce, so that micro-batches, ranks and phases can be merged.

Each reduction gives the same answer however the parts are split: a mean carries its weight. The
names of figures are listed in `winnow.observe.names`; sinks take the flat record.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from winnow.observe.names import Number


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, held as its sum and weight; NaN while nothing has weight."""

    total: float
    weight: float

    def merge(self, other: Mean) -> Mean:
        """The mean over both."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum; of integers, an integer."""

    value: Number

    def merge(self, other: Sum) -> Sum:
        """Both together."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest; NaN wins, so that it is seen wherever it came up."""

    value: Number

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return other if math.isnan(other.value) or other.value > self.value else self


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest; NaN wins, so that it is seen wherever it came up."""

    value: Number

    def merge(self, other: Min) -> Min:
        """The smaller of both."""
        return other if math.isnan(other.value) or other.value < self.value else self


@dataclass(frozen=True, slots=True)
class Last:
    """What was said last, such as a learning rate."""

    value: Number

    def merge(self, other: Last) -> Last:
        """The later of both."""
        return other


Metric = Mean | Sum | Max | Min | Last


class Metrics:
    """Collects figures by name and merges those that share one.

    Example: `m = Metrics(); m.mean("actor/entropy", 1.2, weight=300); m.record()`.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, name: str, metric: Metric) -> None:
        """Take a figure; a name keeps its reduction for good."""
        held = self._metrics.get(name)
        if held is None:
            self._metrics[name] = metric
            return
        assert type(held) is type(metric), f"{name} is a {type(held).__name__}, got {metric}"
        # Each class merges with its own kind only, which the line above makes sure of.
        self._metrics[name] = held.merge(metric)  # type: ignore[arg-type]

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """A mean over `weight` things; nothing weighs nothing, whatever its value."""
        self.add(name, Mean(value * weight if weight else 0.0, weight))

    def mean_of(self, name: str, total: float, count: float) -> None:
        """A mean given as sum and count."""
        self.add(name, Mean(total, count))

    def sum(self, name: str, value: Number) -> None:
        """A count or an amount."""
        self.add(name, Sum(value))

    def max(self, name: str, value: Number) -> None:
        """A peak."""
        self.add(name, Max(value))

    def min(self, name: str, value: Number) -> None:
        """A trough."""
        self.add(name, Min(value))

    def last(self, name: str, value: Number) -> None:
        """A state of which the latest counts."""
        self.add(name, Last(value))

    def spread(self, name: str, values: ArrayLike) -> None:
        """`name/mean`, `name/max` and `name/min` of many values; of none, nothing."""
        array = np.asarray(values, dtype=np.float64).ravel()
        if array.size == 0:
            return
        self.mean_of(f"{name}/mean", float(array.sum()), float(array.size))
        self.max(f"{name}/max", float(array.max()))
        self.min(f"{name}/min", float(array.min()))

    def merge(self, other: Metrics) -> None:
        """Take in what another rank or phase collected."""
        for name, metric in other._metrics.items():
            self.add(name, metric)

    def update(self, record: Mapping[str, Number]) -> None:
        """Take plain numbers, the latest of each name."""
        for name, value in record.items():
            self.last(name, value)

    def record(self) -> dict[str, Number]:
        """Each name with its number, in the order of first mention."""
        return {name: plain(metric.value) for name, metric in self._metrics.items()}


def plain(value: Any) -> Number:
    """A Python number: numpy's and torch's scalars are unwrapped."""
    number = value if isinstance(value, (int, float)) else value.item()
    return int(number) if isinstance(number, bool) else number


class Stopwatch:
    """Seconds by phase, which with `other` add up to the time since the last `lap`.

    A phase opened inside another stops the outer one's clock. Phases nest like calls do: open
    them in one task, not in coroutines that interleave.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._lap_start = self._since = clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`, less the phases within."""
        self._book()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def lap(self) -> dict[str, Number]:
        """`time/PHASE_s`, `time/other_s` and `time/step_s` since the last lap; starts a new one."""
        self._book()
        total = self._since - self._lap_start
        record: dict[str, Number] = {f"time/{k}_s": v for k, v in self._seconds.items()}
        record["time/other_s"] = max(total - sum(self._seconds.values()), 0.0)
        record["time/step_s"] = total
        self._seconds = dict.fromkeys(self._open, 0.0)
        self._lap_start = self._since
        return record

    def seconds(self) -> dict[str, float]:
        """By phase, since the last lap."""
        self._book()
        return dict(self._seconds)

    def rebook(self, name: str, seconds: Mapping[str, float]) -> None:
        """Book part of a phase's time under other phases, as somebody else has measured it."""
        for phase, part in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + part
        self._seconds[name] = max(self._seconds[name] - sum(seconds.values()), 0.0)

    def _book(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
