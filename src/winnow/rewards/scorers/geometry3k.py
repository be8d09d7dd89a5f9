r"""Geometry3K: nine tenths for the boxed answer, one for the form `<think>…</think> … \boxed{}`.

The rule that the set is usually trained with (`hiyouga/geometry3k`); answers are compared by
value, see `math_symbolic`. Its questions come with pictures, which only rows without `images`
do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.answer_format import is_think_boxed
from winnow.rewards.scorers.math_symbolic import equal
from winnow.rewards.scorers.math_text import gold_answer, last_boxed
from winnow.types import Score

FORMAT_SHARE = 0.1


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """From 0 to 1; `format` says whether the form was right."""
    pred = last_boxed(text) or ""
    right = float(equal(pred, gold_answer(ground_truth)))
    form = float(is_think_boxed(text))
    reward = (1 - FORMAT_SHARE) * right + FORMAT_SHARE * form
    return Score(reward, right, {"task": reward}, {"pred": pred, "format": form})
