"""The generated task: what stands after the last `#` must be the sorted digits, exactly.

The working before it is not looked at. No `#`, nothing behind it, or a character too many,
blanks included, is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.types import Score


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """+1 or -1; `pred` is the text after the last `#`, empty without one."""
    _, mark, answer = text.rpartition("#")
    pred = answer if mark else ""
    right = mark != "" and pred == str(ground_truth)
    reward = 1.0 if right else -1.0
    return Score(reward, float(right), {"task": reward}, {"pred": pred})
