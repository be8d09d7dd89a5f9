r"""Mathematical answers by their value: `math-verify` where the normalised texts differ.

`0.25`, `1/4` and `\frac{1}{4}` are one answer here. Computer algebra can take any time: each
step has `_STEP_S` seconds, by an alarm, which Python allows in a process's main thread only (a
worker of the pool has it); elsewhere nothing but the caller's own limit ends it. An answer too
long to be one is compared as text alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.math_text import gold_answer, normalize, read_answer
from winnow.rewards.scorers.reading import verdict
from winnow.types import Score

LONGEST_EXPRESSION = 400
"""Characters; the longest gold answer of MATH-500 has 55."""
_STEP_S = 2


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 if the stated answer equals the gold one, else 0."""
    pred = read_answer(text)
    return verdict(equal(pred, gold_answer(ground_truth)), pred)


def score_dapo(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """The same with DAPO's rewards, +1 and -1."""
    pred = read_answer(text)
    return verdict(equal(pred, gold_answer(ground_truth)), pred, wrong_reward=-1.0)


def equal(pred: str, gold: str) -> bool:
    """Whether an answer is the gold one, by its text or by its value."""
    plain, wanted = normalize(pred), normalize(gold)
    if plain == "" or wanted == "" or plain == wanted:
        return plain != "" and plain == wanted
    if max(len(pred), len(gold)) > LONGEST_EXPRESSION:
        return False
    # Slow to import, and not needed where the texts agree.
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each time-out
    in_main = threading.current_thread() is threading.main_thread()
    limit = _STEP_S if in_main else None
    parsed = [parse(f"${answer}$", parsing_timeout=limit) for answer in (gold, pred)]
    return all(parsed) and bool(verify(*parsed, timeout_seconds=limit))
