"""Filters, which keep the groups that carry signal: pure functions from scores to a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from winnow.config.sampling import BandFilter, Filter, NoFilter, VarianceFilter
from winnow.errors import RewardError
from winnow.types import Score

Verdict = Literal["qualified", "all_right", "all_wrong"]

# Relative to the larger of 1 and the largest value: far above what float32 sums leave behind,
# and where the advantages' own 1e-6 beside the standard deviation would erase the signal.
FLOAT_NOISE = 1e-6


def qualifies(values: Sequence[float], rule: Filter, mean_accuracy: float) -> Verdict:
    """Apply a rule to a group whose answers have these values of the rule's metric.

    A group that does not qualify counts as right or wrong by its mean accuracy.
    """
    match rule:
        case NoFilter():
            passes = True
        case VarianceFilter():
            passes = len(values) == 1 or differ(values)
        case BandFilter():
            mean = math.fsum(values) / len(values) if values else math.nan
            passes = rule.low - FLOAT_NOISE <= mean <= rule.high + FLOAT_NOISE
    if passes:
        return "qualified"
    return "all_right" if mean_accuracy >= 0.5 else "all_wrong"


def differ(values: Sequence[float]) -> bool:
    """Return whether the values differ by more than float noise."""
    if not values:
        return False
    low, high = min(values), max(values)
    return high - low > FLOAT_NOISE * max(1.0, abs(low), abs(high))


def judge(scores: Sequence[Score], rule: Filter) -> Verdict:
    """Judge a group by its answers' scores.

    An answer whose scoring failed and that lacks the metric is left out.

    Raises:
        RewardError: the scorer does not give the rule's metric, or gives no finite number.
    """
    accuracy = math.fsum(score.accuracy for score in scores) / len(scores)
    if isinstance(rule, NoFilter):
        return "qualified"
    assert isinstance(rule, VarianceFilter | BandFilter)
    values = []
    for score in scores:
        value = _value(score, rule.metric)
        if value is not None:
            values.append(value)
    if len(values) < 2 <= len(scores) and isinstance(rule, VarianceFilter):
        # One known value among several answers is no group of one.
        values = []
    return qualifies(values, rule, accuracy)


def _value(score: Score, metric: str) -> float | None:
    try:
        value = score.metric(metric)
    except KeyError:
        if score.error:
            return None
        raise RewardError(
            f"sampling.filter.metric asks for {metric!r}, but the scorer gives "
            f"{', '.join(_names(score))}; choose one of these or let the scorer return it"
        ) from None
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        shown = score.extra.get(metric, value)
        raise RewardError(
            f"sampling.filter.metric {metric!r} must be a finite number, the scorer gave "
            f"{shown!r}; return a number or filter on another metric"
        )
    return value


def _names(score: Score) -> list[str]:
    numbers = [name for name, value in score.extra.items() if isinstance(value, int | float)]
    return list(dict.fromkeys(["accuracy", "reward", "task_reward", *score.parts, *numbers]))
