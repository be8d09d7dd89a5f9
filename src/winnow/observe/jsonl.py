"""The file metrics.jsonl, one line a step, complete or absent, and sums over its records.

JSON has no NaN: such a figure is `null`, and the line's `non_finite` says what it was, so that
nothing is lost and every JSON reader can read the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from winnow.errors import CheckpointError, WinnowError
from winnow.observe import metrics
from winnow.observe.files import AppendFile
from winnow.observe.metrics import Number, Record, to_number
from winnow.observe.sinks import Sink
from winnow.types import FATES

METRICS_FILE = "metrics.jsonl"
"""Its name in a run's folder."""
_NON_FINITE = "non_finite"


class MetricsLog(AppendFile, Sink):
    """The sink that appends to metrics.jsonl; resuming cuts it back to a checkpoint's offset."""

    def log(self, step: int, record: Record) -> None:
        numbers = {name: to_number(value) for name, value in record.items()}
        odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
        line: dict[str, object] = {"step": step, **numbers, **dict.fromkeys(odd)}
        if odd:
            line[_NON_FINITE] = odd
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
        self.append(text.encode() + b"\n")

    def truncate(self, offset: int) -> None:
        """Cut off every line after `offset`.

        Raises:
            CheckpointError: the file is shorter, or no line ends there.
        """
        if offset and self.path.read_bytes()[offset - 1 : offset] != b"\n":
            raise CheckpointError(
                f"{self.path} has {self.size} bytes and no line ending at byte {offset}, the "
                "offset in the checkpoint: it was modified; restore it, or start a new run"
            )
        super().truncate(offset)


def read_metrics(path: Path) -> list[dict[str, Number]]:
    """Read the records of a run, in order; an incomplete last line is skipped.

    Raises:
        WinnowError: no such file, or a line that is none of ours.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise WinnowError(f"cannot read {path}: {reason}; give the folder of a run") from error
    records: list[dict[str, Number]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            records.append(parse_record(line))
        except ValueError as error:
            raise WinnowError(
                f"{path} line {number} is not a metrics record ({error}); delete that line"
            ) from error
    return records


def parse_record(line: bytes) -> dict[str, Number]:
    """Read a line of metrics.jsonl, its step among the figures.

    Raises:
        ValueError: it is none.
    """
    record = from_json(line, cache_strings="keys")
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("no step")
    odd = record.pop(_NON_FINITE, {})
    if not isinstance(odd, dict) or "step" in odd:
        raise ValueError(f"{_NON_FINITE} is not an object of figures")
    record.update((name, float(str(text))) for name, text in odd.items())
    for name, value in record.items():
        # Most are floats, and a run has a million.
        if type(value) is not float and (not isinstance(value, int) or abs(value) > 1e300):
            raise ValueError(f"{name} is not a number")
    return record


@dataclass(frozen=True)
class Evaluation:
    """The results of a policy on the held-out prompts of one data source."""

    accuracy: float
    """pass@1, or avg@N of a scorer that gives part marks only."""
    greedy: float | None = None
    best_pass: tuple[int, float] | None = None
    """The largest k > 1 and its pass@k."""
    best_maj: tuple[int, float] | None = None
    """The largest k > 1 and its maj@k."""
    length: float | None = None
    """Mean tokens of an answer."""
    truncated: float | None = None
    """Share of the answers cut off at the limit."""
    avg_ended: float | None = None
    """Accuracy of the answers that were not cut off."""
    unread: float | None = None
    """Share of the answers in which the scorer found nothing to compare."""
    prompts: float | None = None

    @classmethod
    def from_figures(cls, figures: Record) -> Evaluation | None:
        """Read the `eval/SOURCE/…` figures of a record; None where accuracy is not among them."""
        accuracy = figures.get("pass@1", (_at_largest_k(figures, "avg@", 1) or (0, None))[1])
        if accuracy is None:
            return None
        best_pass, best_maj = (_at_largest_k(figures, f"{kind}@", 2) for kind in ("pass", "maj"))
        names = ("greedy", "length", "truncated", "avg_ended", "unread", "prompts")
        rest = {name: figures.get(name) for name in names}
        return cls(accuracy=accuracy, best_pass=best_pass, best_maj=best_maj, **rest)


def evaluations(record: Record) -> dict[str, Evaluation]:
    """Read the evaluations in a record, by data source."""
    parsed = {
        source: Evaluation.from_figures(f) for source, f in metrics.eval_by_source(record).items()
    }
    return {source: evaluation for source, evaluation in parsed.items() if evaluation}


def tokens_by_use(records: Iterable[Record]) -> dict[str, int]:
    """Sum the tokens of a run by their use; `in_progress` as it stands at the end.

    Example: `{"trained": 700, …, "failed": 0, "in_progress": 31}`.
    """
    account = dict.fromkeys([*FATES, "in_progress"], 0)
    for record in records:
        for fate in FATES:
            account[fate] += int(record.get(metrics.TOKENS + fate, 0))
        account["in_progress"] = int(record.get(metrics.IN_PROGRESS_TOKENS, account["in_progress"]))
    return account


def seconds_by_phase(records: Iterable[Record]) -> dict[str, float]:
    """Sum the seconds of a run by phase: starts of its process and the warm-up, then the longest
    first, `other` included."""
    total: dict[str, float] = {}
    before: dict[str, float] = {}
    for record in records:
        for name, phase in ((metrics.START_S, "start-up"), (metrics.SFT_S, "warm-up")):
            if name in record:
                before[phase] = before.get(phase, 0.0) + record[name]
        for name, value in record.items():
            phase = name.removeprefix("time/").removesuffix("_s")
            if name == f"time/{phase}_s" and name != metrics.STEP_S:
                total[phase] = total.get(phase, 0.0) + value
    return {**before, **dict(sorted(total.items(), key=lambda item: -item[1]))}


def series(records: Sequence[Record], *candidates: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a figure, under the first of the names that any record has."""
    for name in candidates:
        points = [(int(r["step"]), float(r[name])) for r in records if name in r]
        if points:
            return [step for step, _ in points], [value for _, value in points]
    return [], []


def running_total(
    records: Sequence[Record], *candidates: str
) -> tuple[list[int], NDArray[np.float64]]:
    """Return steps from 0 on, and the sum of a figure up to the end of each; names as `series`."""
    steps, values = series(records, *candidates)
    return [0, *steps], np.cumsum([0.0, *values])


def _at_largest_k(figures: Record, prefix: str, least: int) -> tuple[int, float] | None:
    candidates = []
    for name, value in figures.items():
        k = name.removeprefix(prefix)
        if name.startswith(prefix) and k.isdecimal() and int(k) >= least and math.isfinite(value):
            candidates.append((int(k), value))
    return max(candidates, default=None)
