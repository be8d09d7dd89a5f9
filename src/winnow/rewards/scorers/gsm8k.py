"""Grade-school maths: numbers compared as text, without commas and dollar signs.

The strict rule wants the number right after the last `####`; the flexible one takes the last number
anywhere. A full stop that ends a sentence is no part of a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.tags import verdict
from winnow.types import Score

MARK = "####"
_NUMBER = re.compile(r"[-+]?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
# A second number offered beside the first: `5 or 6`.
_ANOTHER = re.compile(r"\s*(?:or|and|to|/|;|,)\s*[-+]?\$?-?\.?\d")


def score_strict(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Give 1 if the number after the last `####` is right and the only one offered, else 0."""
    _, mark, after = text.rpartition(MARK)
    after = after.lstrip()
    found = _NUMBER.match(after) if mark else None
    number = found.group().rstrip(",") if found else ""
    return _compare("" if _ANOTHER.match(after, len(number)) else number, ground_truth)


def score_flexible(
    data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]
) -> Score:
    """Give 1 if the last number of the answer is right, else 0."""
    found = _NUMBER.findall(text)
    return _compare(found[-1] if found else "", ground_truth)


def _compare(answer: str, ground_truth: Any) -> Score:
    pred = _plain(answer)
    # A ground truth may be the whole worked solution.
    return verdict(pred != "" and pred == _plain(str(ground_truth).rpartition(MARK)[2]), pred)


def _plain(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removeprefix("+")
