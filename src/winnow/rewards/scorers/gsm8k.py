"""Grade-school maths: numbers compared as text, without commas and dollar signs.

Strict wants the number right after the last `####`; flexible takes the last number anywhere.
A full stop that ends a sentence is no part of a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from winnow.types import Score

MARK = "####"
_NUMBER = re.compile(r"[-+]?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def score_strict(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 if the number after the last `####` is right, else 0."""
    _, mark, after = text.rpartition(MARK)
    found = _NUMBER.match(after.lstrip()) if mark else None
    return _compare(found.group() if found else "", ground_truth)


def score_flexible(
    data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]
) -> Score:
    """1 if the last number of the answer is right, else 0."""
    found = _NUMBER.findall(text)
    return _compare(found[-1] if found else "", ground_truth)


def _compare(answer: str, ground_truth: Any) -> Score:
    pred = _plain(answer)
    # A ground truth may be the whole worked solution.
    right = pred != "" and pred == _plain(str(ground_truth).rpartition(MARK)[2])
    reward = float(right)
    return Score(reward, reward, {"task": reward}, {"pred": pred})


def _plain(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removeprefix("+")
