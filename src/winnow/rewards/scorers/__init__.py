"""The built-in scorers by name.

A scorer is a pure function of (data source, answer's text, ground truth, other columns). It
may raise: `winnow.rewards.service` decides what a failed scoring means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from winnow.rewards.scorers import (
    answer_format,
    code,
    countdown,
    dapo_math,
    geometry3k,
    gsm8k,
    math_boxed,
    math_symbolic,
    multiple_choice,
    procedural,
    search_qa,
    sort_digits,
)
from winnow.types import Score

ScoreFunction = Callable[[str, str, Any, Mapping[str, Any]], Score]


@dataclass(frozen=True)
class Scorer:
    """A score function and what must be known of it before it runs."""

    name: str
    score: ScoreFunction
    wrong_reward: float
    """What a wrong answer gets, and one whose scoring fails."""
    metrics: frozenset[str] = frozenset()
    """Numbers in `Score.extra` that a filter may ask for."""
    apart: bool = False
    """It is slow, may hang, or needs a main thread of its own: a worker of the pool runs it."""
    sandboxed: bool = False
    """It runs code in the sandbox, and waits for it: a thread calls it."""
    package: str = ""
    """What it imports beyond Winnow's own needs, where that is an extra."""


SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        Scorer("sort_digits", sort_digits.score, -1.0),
        Scorer("gsm8k", gsm8k.score_strict, 0.0),
        Scorer("gsm8k_flexible", gsm8k.score_flexible, 0.0),
        Scorer("dapo_math", dapo_math.score, -1.0),
        Scorer("dapo_math_boxed", dapo_math.score_boxed, -1.0),
        Scorer("dapo_math_lenient", math_symbolic.score_dapo, -1.0, apart=True),
        Scorer("math", math_boxed.score, 0.0),
        Scorer("math_verify", math_symbolic.score, 0.0, apart=True),
        Scorer("geometry3k", geometry3k.score, 0.0, frozenset({"format"}), apart=True),
        Scorer("search_qa_em", search_qa.score_exact, 0.0),
        Scorer("search_qa_f1", search_qa.score_f1, 0.0, frozenset({"f1"})),
        Scorer("multiple_choice", multiple_choice.score, 0.0),
        Scorer("think_answer", answer_format.score_think_answer, 0.0),
        Scorer("think_boxed", answer_format.score_think_boxed, 0.0),
        Scorer("countdown", countdown.score, 0.0, frozenset({"format"})),
        Scorer("code", code.score, code.WRONG_REWARD, code.METRICS, sandboxed=True),
        Scorer(
            "reasoning_gym",
            procedural.score,
            0.0,
            frozenset({"unreadable"}),
            apart=True,
            package=procedural.PACKAGE,
        ),
    )
}
