"""Sums over the records of a run: evaluations, the token account, time by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from winnow.observe import metrics
from winnow.observe.metrics import Record


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
    prompts: int | None = None

    @classmethod
    def of(cls, figures: Record) -> Evaluation | None:
        """Read the `eval/SOURCE/…` figures of a record; None where accuracy is not among them."""
        accuracy = figures.get("pass@1", (_largest(figures, "avg@", 1) or (0, None))[1])
        if accuracy is None:
            return None
        prompts = figures.get("prompts")
        return cls(
            accuracy=accuracy,
            greedy=figures.get("greedy"),
            best_pass=_largest(figures, "pass@", 2),
            best_maj=_largest(figures, "maj@", 2),
            length=figures.get("length"),
            truncated=figures.get("truncated"),
            prompts=None if prompts is None else int(prompts),
        )


def evaluations(record: Record) -> dict[str, Evaluation]:
    """Read the evaluations in a record, by data source."""
    found = {source: Evaluation.of(f) for source, f in metrics.by_source(record).items()}
    return {source: evaluation for source, evaluation in found.items() if evaluation}


def token_account(records: Iterable[Record]) -> dict[str, int]:
    """Sum the tokens of a run by their use; `in_progress` as it stands at the end.

    Example: `{"trained": 700, …, "failed": 0, "in_progress": 31}`.
    """
    account: dict[str, int] = dict.fromkeys(metrics.OUTCOMES, 0)
    in_progress = 0
    for record in records:
        for outcome in metrics.OUTCOMES:
            account[outcome] += int(record.get(metrics.TOKENS + outcome, 0))
        in_progress = int(record.get(metrics.IN_PROGRESS_TOKENS, in_progress))
    return {**account, "in_progress": in_progress}


def phase_seconds(records: Iterable[Record]) -> dict[str, float]:
    """Sum the seconds of a run by phase: the warm-up, then the longest first, `other` included."""
    total: dict[str, float] = {}
    warm_up: dict[str, float] = {}
    for record in records:
        if metrics.SFT_S in record:
            warm_up["warm-up"] = float(record[metrics.SFT_S])
        for name, value in record.items():
            phase = name.removeprefix("time/").removesuffix("_s")
            if name == f"time/{phase}_s" and name != metrics.STEP_S:
                total[phase] = total.get(phase, 0.0) + value
    return {**warm_up, **dict(sorted(total.items(), key=lambda item: -item[1]))}


def series(records: Sequence[Record], *candidates: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a figure, under the first of the names that any record has."""
    for name in candidates:
        points = [(int(r["step"]), float(r[name])) for r in records if name in r]
        if points:
            return [step for step, _ in points], [value for _, value in points]
    return [], []


def tokens_by_step(records: Sequence[Record]) -> tuple[list[int], list[float]]:
    """Return the steps, and the tokens generated up to the end of each."""
    steps, tokens = series(records, metrics.GENERATED_TOKENS)
    return steps, list(accumulate(tokens))


def _largest(figures: Mapping[str, float], prefix: str, least: int) -> tuple[int, float] | None:
    found = []
    for name, value in figures.items():
        k = name.removeprefix(prefix)
        if name.startswith(prefix) and k.isdecimal() and int(k) >= least and math.isfinite(value):
            found.append((int(k), value))
    return max(found, default=None)
