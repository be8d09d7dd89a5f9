"""The table of built-in scorers.

A scorer is a pure function of (data source, answer's text, ground truth, other columns). It may
raise: `winnow.rewards.pipeline` decides what a failed scoring means. Its module is imported when
it first scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

from winnow.types import Score

ScoreFunction = Callable[[str, str, Any, Mapping[str, Any]], Score]


@dataclass(frozen=True)
class Scorer:
    """A score function and the facts that a run needs before it calls it."""

    name: str
    import_path: str
    """`module:function`, the module below `winnow.rewards.scorers`."""
    wrong_reward: float
    """Reward of a wrong answer, and of one whose scoring fails."""
    reads: str = ""
    """The part of an answer that counts; empty where the score explains itself."""
    metrics: frozenset[str] = frozenset()
    """Numbers in `Score.extra` that a filter may ask for."""
    offloaded: bool = False
    """True if it is slow, may hang, or needs a main thread: a worker runs it."""
    sandboxed: bool = False
    """True if it runs code in the sandbox and waits for it: a thread calls it."""
    package: str = ""
    """Package that it imports beyond Winnow's own needs, where that is an extra."""

    @cached_property
    def score(self) -> ScoreFunction:
        """The function itself."""
        score: ScoreFunction = resolve_name(f"{__name__}.{self.import_path}")
        return score

    def explain_wrong(self, score: Score, ground_truth: Any) -> str:
        """Explain to people why an answer is not right; empty where it is."""
        pred = score.extra.get("pred")
        if score.accuracy >= 1 or score.error or not self.reads:
            return ""
        if not pred:
            return f"no answer was found: {self.name} reads {self.reads}"
        unreadable = ", which the task cannot read" if score.extra.get("unreadable") else ""
        gold = str(ground_truth).rpartition("####")[2].strip()
        return f"read {pred}{unreadable}, expected {gold}"


_CODE_METRICS = frozenset({"cases", "passed", "passed_share"})
_FORMAT, _UNREADABLE = frozenset({"format"}), frozenset({"unreadable"})
_GYM = "reasoning_gym"
_LINE, _BOX = "the last line 'Answer: …'", r"the last \boxed{}"
_EITHER = f"{_BOX} or {_LINE}"
_TAGS, _THOUGHTS = "the last <answer>…</answer>", "<think>…</think> and "
_TAIL, _SHORT_TAIL = " in the last 300 characters", " in the last 100 characters"

SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        Scorer("sort_digits", "markers:score_sort_digits", -1.0, "the text behind the last '#'"),
        Scorer("gsm8k", "markers:score_gsm8k", 0.0, "the one number behind the last '####'"),
        Scorer("gsm8k_flexible", "markers:score_gsm8k_flexible", 0.0, "the last number"),
        Scorer("dapo_math", "dapo_math:score", -1.0, _LINE + _TAIL),
        Scorer("dapo_math_boxed", "dapo_math:score_boxed", -1.0, _BOX + _SHORT_TAIL),
        Scorer("dapo_math_lenient", "maths:score_dapo_by_value", -1.0, _EITHER, offloaded=True),
        Scorer("math", "maths:score_as_text", 0.0, _EITHER),
        Scorer("math_verify", "maths:score_by_value", 0.0, _EITHER, offloaded=True),
        Scorer("geometry3k", "maths:score_geometry3k", 0.0, _BOX, _FORMAT, offloaded=True),
        Scorer("search_qa_em", "questions:score_exact", 0.0, _TAGS),
        Scorer("search_qa_f1", "questions:score_f1", 0.0, _TAGS, frozenset({"f1"})),
        Scorer("multiple_choice", "questions:score_choice", 0.0, "the letter that is chosen"),
        Scorer("think_answer", "markers:score_think_answer", 0.0, _THOUGHTS + _TAGS),
        Scorer("think_boxed", "markers:score_think_boxed", 0.0, _THOUGHTS + _BOX),
        Scorer("calc", "markers:score_calc", -1.0, "the text behind the last '='"),
        Scorer("countdown", "countdown:score", 0.0, _TAGS, _FORMAT),
        Scorer("code", "code:score", 0.0, metrics=_CODE_METRICS, sandboxed=True),
        Scorer(_GYM, "reasoning_gym:score", 0.0, _TAGS, _UNREADABLE, offloaded=True, package=_GYM),
    )
}
