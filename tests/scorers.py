"""A problem for each scorer of answers, and what holds of its score whatever was written."""

from __future__ import annotations

import json
import math
from typing import Any

from winnow.rewards.scorers import SCORERS
from winnow.types import Score

ENTRY = {"question": "2 + 3 =", "answer": "5", "metadata": {"x": 1}}
GYM = {"extra_info": {"config": "{}", "entry": json.dumps(ENTRY)}}
COUNTDOWN = {"target": 98, "numbers": [44, 19, 35]}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sort_digits": ("sort_digits", "1359", {}),
    "gsm8k": ("gsm8k", "42", {}),
    "gsm8k_flexible": ("gsm8k", "42", {}),
    "dapo_math": ("math_dapo", "42", {}),
    "dapo_math_boxed": ("math_dapo", "42", {}),
    "dapo_math_lenient": ("math_dapo", r"\frac{1}{2}", {}),
    "math": ("MATH", r"\frac{1}{2}", {}),
    "math_verify": ("MATH", r"\frac{1}{2}", {}),
    "geometry3k": ("geometry3k", r"3\sqrt{2}", {}),
    "search_qa_em": ("nq", {"target": ["a", "b"]}, {}),
    "search_qa_f1": ("nq", {"target": ["a", "b"]}, {}),
    "multiple_choice": ("mmlu", "B", {}),
    "think_answer": ("any", "", {}),
    "think_boxed": ("any", "", {}),
    "countdown": ("countdown", COUNTDOWN, {}),
    "reasoning_gym": ("reasoning_gym/chain_sum", "5", GYM),
}


def score(name: str, text: str, truth: object) -> Score:
    """What a scorer says of an answer to any problem."""
    return SCORERS[name].score("any", text, truth, {})


def accuracy(name: str, text: str, truth: object) -> float:
    """Its accuracy alone."""
    return score(name, text, truth).accuracy


def check(name: str, text: str) -> None:
    """What holds of a score, whatever was written."""
    source, truth, extra = CASES[name]
    scorer = SCORERS[name]
    found = scorer.score(source, text, truth, extra)
    assert math.isfinite(found.reward)
    assert scorer.wrong_reward <= found.reward <= 1
    assert 0 <= found.accuracy <= 1
    assert found.parts == {"task": found.reward}
    assert scorer.metrics <= found.extra.keys()
