r"""MATH and its family: the stated answer must be the gold one, as normalised text.

Which form of an answer counts as another's is decided in `winnow.rewards.scorers.math_text`;
values are not compared: `0.25` is not `\frac{1}{4}`. That is `math_symbolic`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.math_text import gold_answer, normalize, read_answer
from winnow.rewards.scorers.reading import verdict
from winnow.types import Score


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 if the stated answer is the gold one, else 0."""
    pred = read_answer(text)
    plain = normalize(pred)
    return verdict(plain != "" and plain == normalize(gold_answer(ground_truth)), pred)
