"""What several scorers share: answers in tags, truths that are more than a text, the verdict.

Everything here takes time in proportion to the text, whatever a policy writes.
"""

from __future__ import annotations

import json
from typing import Any

from winnow.types import Score


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last `<tag>` and the `</tag>` after it; None without both."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def structure(value: Any) -> Any:
    """A truth as it was meant: files that hold texts only have lists and objects as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def verdict(right: bool, pred: str, wrong_reward: float = 0.0) -> Score:
    """1 for a right answer, else `wrong_reward`; `pred` is what was read."""
    reward = 1.0 if right else wrong_reward
    return Score(reward, float(right), {"task": reward}, {"pred": pred})
