"""Filters, which keep the groups that carry signal: pure functions from scores to a verdict.

A filter of your own is a function that a recipe names:

    # mine.py;  sampling/filter=custom sampling.filter.path=mine.py:spread
    def spread(scores, least=0.1):
        rewards = [score.reward for score in scores]
        return max(rewards) - min(rewards) >= least

It gets the `winnow.types.Score`s of a group's sampled answers (`reward`, `accuracy`, `parts`,
`extra`, `error`), in their order, and `sampling.filter.options` as keyword arguments. It returns
True to train on the group, False to leave it out. It runs in the run's own process, once a group,
and must say the same of the same scores, or a resumed run goes another way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from winnow.config.rollout import BandFilter, CustomFilter, Filter, NoFilter, VarianceFilter
from winnow.errors import ConfigError, RewardError
from winnow.types import Score

Verdict = Literal["qualified", "all_right", "all_wrong"]

# Relative to the larger of 1 and the largest value: far above what float32 sums leave behind,
# and where the advantages' own 1e-6 beside the standard deviation would erase the signal.
FLOAT_NOISE = 1e-6

GroupFilter = Callable[[Sequence[Score]], Verdict]
"""The verdict on a group by its sampled answers' scores."""


def make_filter(rule: Filter) -> GroupFilter:
    """Return the function of `sampling.filter`.

    Raises:
        ConfigError: a custom filter cannot be imported.
    """
    if not isinstance(rule, CustomFilter):
        return partial(apply_filter, rule=rule)
    from winnow.user_code import load_user_object

    keep = load_user_object(rule.path, "sampling.filter.path", ConfigError)
    return partial(_apply_user_filter, keep=partial(keep, **rule.options), where=rule.path)


def _apply_user_filter(scores: Sequence[Score], keep: Callable[..., object], where: str) -> Verdict:
    """Apply a custom filter.

    Raises:
        RewardError: it fails, or returns something else than True or False.
    """
    try:
        qualifies = keep(scores)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise RewardError(
            f"sampling.filter.path {where} fails with {type(error).__name__}: {reason}; "
            "fix the function, and resume"
        ) from error
    if not isinstance(qualifies, bool | np.bool_):
        raise RewardError(
            f"sampling.filter.path {where} must return True or False, returned {qualifies!r:.80}; "
            "fix the function, and resume"
        )
    return "qualified" if qualifies else _unqualified_verdict(scores)


def _unqualified_verdict(scores: Sequence[Score]) -> Verdict:
    accuracy = math.fsum(score.accuracy for score in scores) / len(scores)
    return "all_right" if accuracy >= 0.5 else "all_wrong"


def differ(values: Sequence[float]) -> bool:
    """Return whether the values differ by more than float noise."""
    if not values:
        return False
    low, high = min(values), max(values)
    return high - low > FLOAT_NOISE * max(1.0, abs(low), abs(high))


def apply_filter(scores: Sequence[Score], rule: NoFilter | VarianceFilter | BandFilter) -> Verdict:
    """Return the verdict of a built-in filter on a group's scores.

    An answer whose scoring failed and that lacks the metric is left out. Where a scorer gives no
    accuracy, answers that should differ in it are to differ in the task's reward. A group that does
    not qualify counts as right or wrong by its mean accuracy.

    Raises:
        RewardError: the scorer does not give the rule's metric, or gives no finite number.
    """
    if isinstance(rule, NoFilter):
        return "qualified"
    metric = rule.metric
    has_accuracy = all(score.has_accuracy or score.error for score in scores)
    if isinstance(rule, VarianceFilter) and metric == "accuracy" and not has_accuracy:
        metric = "task_reward"
    metric_values = (_metric_value(score, metric) for score in scores)
    values = [value for value in metric_values if value is not None]
    if isinstance(rule, VarianceFilter):
        passes = len(values) == len(scores) == 1 or differ(values)
    else:
        mean = math.fsum(values) / len(values) if values else math.nan
        passes = rule.low - FLOAT_NOISE <= mean <= rule.high + FLOAT_NOISE
    return "qualified" if passes else _unqualified_verdict(scores)


def _metric_value(score: Score, metric: str) -> float | None:
    try:
        value = score.metric(metric)
    except KeyError:
        if score.error:
            return None
        raise RewardError(
            f"sampling.filter.metric={metric} is not in the score, which has "
            f"{', '.join(_metric_names(score))}; choose one of these or let the scorer return it"
        ) from None
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        shown = score.extra.get(metric, value)
        raise RewardError(
            f"sampling.filter.metric={metric} must be a finite number, got {shown!r}; return a "
            "number or filter on another metric"
        )
    return value


def _metric_names(score: Score) -> list[str]:
    numbers = [name for name, value in score.extra.items() if isinstance(value, int | float)]
    return list(dict.fromkeys(["accuracy", "reward", "task_reward", *score.parts, *numbers]))
