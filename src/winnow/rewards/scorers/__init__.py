"""The table of built-in scorers.

A scorer is a pure function of (data source, answer's text, ground truth, other columns). It may
raise: `winnow.rewards.pipeline` decides what a failed scoring means. Its module is imported when
it first scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

from winnow.types import Score

ScoreFunction = Callable[[str, str, Any, Mapping[str, Any]], Score]


@dataclass(frozen=True)
class Scorer:
    """A score function and the facts that a run needs before it calls it."""

    name: str
    place: str
    """`module:function`, the module below `winnow.rewards.scorers`."""
    wrong_reward: float
    """Reward of a wrong answer, and of one whose scoring fails."""
    metrics: frozenset[str] = frozenset()
    """Numbers in `Score.extra` that a filter may ask for."""
    apart: bool = False
    """True if it is slow, may hang, or needs a main thread of its own: a worker runs it."""
    sandboxed: bool = False
    """True if it runs code in the sandbox and waits for it: a thread calls it."""
    package: str = ""
    """Package that it imports beyond Winnow's own needs, where that is an extra."""

    @cached_property
    def score(self) -> ScoreFunction:
        """The function itself."""
        module, _, function = self.place.partition(":")
        found: ScoreFunction = getattr(import_module(f"{__name__}.{module}"), function)
        return found


_CODE_METRICS = frozenset({"cases", "passed", "passed_share"})

SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        Scorer("sort_digits", "marks:score_sort_digits", -1.0),
        Scorer("gsm8k", "marks:score_gsm8k", 0.0),
        Scorer("gsm8k_flexible", "marks:score_gsm8k_flexible", 0.0),
        Scorer("dapo_math", "dapo_math:score", -1.0),
        Scorer("dapo_math_boxed", "dapo_math:score_boxed", -1.0),
        Scorer("dapo_math_lenient", "maths:score_dapo_by_value", -1.0, apart=True),
        Scorer("math", "maths:score_as_text", 0.0),
        Scorer("math_verify", "maths:score_by_value", 0.0, apart=True),
        Scorer("geometry3k", "maths:score_geometry3k", 0.0, frozenset({"format"}), apart=True),
        Scorer("search_qa_em", "questions:score_exact", 0.0),
        Scorer("search_qa_f1", "questions:score_f1", 0.0, frozenset({"f1"})),
        Scorer("multiple_choice", "questions:score_choice", 0.0),
        Scorer("think_answer", "marks:score_think_answer", 0.0),
        Scorer("think_boxed", "marks:score_think_boxed", 0.0),
        Scorer("countdown", "countdown:score", 0.0, frozenset({"format"})),
        Scorer("code", "code:score", 0.0, _CODE_METRICS, sandboxed=True),
        Scorer(
            "reasoning_gym",
            "procedural:score",
            0.0,
            frozenset({"unreadable"}),
            apart=True,
            package="reasoning_gym",
        ),
    )
}
