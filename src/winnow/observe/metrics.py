"""Figures with a reduction, so that micro-batches, ranks and phases can be merged.

Each reduction gives the same answer however the parts are split: a mean carries its weight. Sinks
take the flat record of a step, and metrics.jsonl is made of them.

The name of a figure is a path, `part/what/which`; the unit stands at the end (`_s`, `_per_s`,
`_gib`), tokens and shares of 1 have none. What a run
does not have is absent. A line of metrics.jsonl is `{"step": 7, NAME: NUMBER, …}`; step 0 is the
evaluation before training. `winnow.observe.metric_names` lists every figure.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

Number = int | float
Record = Mapping[str, Number]
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

# What the viewers (console, curve, summary) look for by name.
ACCURACY = "sampling/accuracy"
TRAINED_ACCURACY = "score/accuracy/mean"
REWARD = "score/reward/mean"
KEEP_RATE = "sampling/keep_rate"
LENGTH = "length/response/mean"
TRUNCATED = "length/truncated"
ENTROPY = "actor/entropy"
TOKENS_PER_S = "throughput/tokens_per_s"
TOKENS = "sampling/tokens/"
GENERATED_TOKENS = TOKENS + "generated"
IN_PROGRESS_TOKENS = TOKENS + "in_progress"
STEP_S = "time/step_s"
SFT_LOSS = "sft/loss"
SFT_TOKENS = "sft/tokens"
HELD_OUT_LOSS = "sft/held_out_loss"
SFT_S = "sft/time_s"
START_S = "start/time_s"
EVAL = "eval/"

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its reduction, by which it merges with others of its name."""

    reduction: Reduction
    total: Number
    """The value; of a mean, its sum."""
    weight: float = 1.0
    """Weight of a mean."""

    @property
    def value(self) -> Number:
        """The number to write down; NaN for a mean over nothing."""
        if self.reduction != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan

    def merge(self, other: Figure) -> Figure:
        """Reduce both to one. NaN wins as an extreme, so that it is seen wherever it came up."""
        if self.reduction == "mean":
            return Figure("mean", self.total + other.total, self.weight + other.weight)
        if self.reduction == "sum":
            return Figure("sum", self.total + other.total)
        if self.reduction == "last" or math.isnan(other.total):
            return other
        sign = 1 if self.reduction == "max" else -1
        return other if sign * other.total > sign * self.total else self


class Metrics:
    """Collects figures by name and merges those that share one.

    Example: `m = Metrics(); m.mean("actor/entropy", 1.2, weight=300); m.record()`.
    """

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def add(self, name: str, figure: Figure) -> None:
        """Merge a figure with the one of its name; a name keeps its reduction for good."""
        old = self._figures.get(name)
        if old is not None:
            assert old.reduction == figure.reduction, f"{name} is a {old.reduction}, got {figure}"
            figure = old.merge(figure)
        self._figures[name] = figure

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add a mean over `weight` things; nothing weighs nothing, whatever its value."""
        self.add(name, Figure("mean", value * weight if weight else 0.0, weight))

    def mean_of(self, name: str, total: float, count: float) -> None:
        """Add a mean given as sum and count."""
        self.add(name, Figure("mean", total, count))

    def sum(self, name: str, value: Number) -> None:
        """Add to a count or an amount; of integers, an integer."""
        self.add(name, Figure("sum", value))

    def max(self, name: str, value: Number) -> None:
        """Keep the largest."""
        self.add(name, Figure("max", value))

    def min(self, name: str, value: Number) -> None:
        """Keep the smallest."""
        self.add(name, Figure("min", value))

    def last(self, name: str, value: Number) -> None:
        """Keep the latest, such as a learning rate."""
        self.add(name, Figure("last", value))

    def spread(self, name: str, values: ArrayLike) -> None:
        """Add `name/mean`, `name/max` and `name/min` of many values; of none, nothing."""
        array = np.asarray(values, dtype=np.float64).ravel()
        if array.size == 0:
            return
        self.mean_of(f"{name}/mean", float(array.sum()), float(array.size))
        self.max(f"{name}/max", float(array.max()))
        self.min(f"{name}/min", float(array.min()))

    def merge(self, other: Metrics) -> None:
        """Merge the figures of another rank or phase."""
        for name, figure in other._figures.items():
            self.add(name, figure)

    def update(self, record: Mapping[str, Number]) -> None:
        """Set plain numbers; of each name the latest counts."""
        for name, value in record.items():
            self.last(name, value)

    def record(self) -> dict[str, Number]:
        """Return each name with its number, in the order of first mention."""
        return {name: to_number(figure.value) for name, figure in self._figures.items()}


def to_number(value: Any) -> Number:
    """Return a Python number: numpy's and torch's scalars are unwrapped."""
    number = value if isinstance(value, (int, float)) else value.item()
    return int(number) if isinstance(number, bool) else number


Timeline = Callable[[str, str, float, float], None]
"""Takes an actor (trainer, learner, sampler), what it did, and from when to when by
`time.perf_counter`."""


def no_timeline(actor: str, phase: str, began_s: float, ended_s: float) -> None:
    """Record no timeline."""


class Stopwatch:
    """Seconds by phase, which with `other` add up to the time since the last `lap`.

    A phase opened inside another stops the outer one's clock. Phases nest like calls do: open
    them in one task, not in coroutines that interleave.

    Args:
        actor: whose phases these are.
        tell: called with each phase at its end, those within it before.
    """

    make_range: ClassVar[Callable[[str], Any]] = contextlib.nullcontext
    """Marks a phase in a profile, while one is made of this process (`winnow.observe.profile`)."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        actor: str = "trainer",
        tell: Timeline = no_timeline,
    ) -> None:
        self._actor, self._tell, self._clock = actor, tell, clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._lap_start = self._since = clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of the block under `name`, less the phases within."""
        self._book_elapsed()
        began = self._since
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            with Stopwatch.make_range(name):
                yield
        finally:
            self._book_elapsed()
            self._open.pop()
            self._tell(self._actor, name, began, self._since)

    def lap(self) -> dict[str, Number]:
        """Start another lap; return the `time/PHASE_s`, `other_s` and `step_s` of the last."""
        self._book_elapsed()
        total = self._since - self._lap_start
        record: dict[str, Number] = {f"time/{k}_s": v for k, v in self._seconds.items()}
        record["time/other_s"] = max(total - sum(self._seconds.values()), 0.0)
        record["time/step_s"] = total
        self._seconds = dict.fromkeys(self._open, 0.0)
        self._lap_start = self._since
        return record

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block, which is in no phase, out of the lap."""
        self._book_elapsed()
        yield
        self._lap_start, self._since = self._lap_start + self._clock() - self._since, self._clock()

    def seconds(self) -> dict[str, float]:
        """Return the seconds by phase since the last lap."""
        self._book_elapsed()
        return dict(self._seconds)

    def rebook(self, name: str, seconds: Mapping[str, float]) -> None:
        """Book part of a phase's time under other phases, as another process has measured it."""
        for phase, part in seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + part
        self._seconds[name] = max(self._seconds[name] - sum(seconds.values()), 0.0)

    def _book_elapsed(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


def eval_by_source(record: Mapping[str, Number]) -> dict[str, dict[str, Number]]:
    """Return the evaluation figures of a record: data source → figure → number.

    A source may hold slashes (`openai/gsm8k`), a figure holds none.
    """
    sources: dict[str, dict[str, Number]] = {}
    for name, value in record.items():
        if name.startswith(EVAL):
            source, _, figure = name.removeprefix(EVAL).rpartition("/")
            sources.setdefault(source, {})[figure] = value
    return sources


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group values by key, both in order of appearance.

    Example: `grouped([("a", 1), ("b", 2), ("a", 3)])` is `{"a": [1, 3], "b": [2]}`.
    """
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
