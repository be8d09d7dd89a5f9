"""Whatever a policy writes gets a score, in a time that grows with its length and no faster."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from winnow.rewards.scorers import SCORERS

ENTRY = {"question": "2 + 3 =", "answer": "5", "metadata": {"x": 1}}
GYM = {"extra_info": {"config": "{}", "entry": json.dumps(ENTRY)}}
COUNTDOWN = {"target": 98, "numbers": [44, 19, 35]}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
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
PIECES = st.sampled_from(
    ["\\boxed{", "\\frac{", "}", "{", "$", "Answer:", "<answer>", "</answer>", "<think>",
     "</think>", "####", "\n", " ", "1", "44", "/", "+", "(", ")", "^", "\\", "x", "=", "\\text{",
     "\\sqrt", "B", ",", ".", "1,000", "\\left(", "\x00", "é", "\ud800"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join)


def check(name: str, text: str) -> None:
    source, truth, extra = CASES[name]
    scorer = SCORERS[name]
    found = scorer.score(source, text, truth, extra)
    assert math.isfinite(found.reward)
    assert scorer.wrong_reward <= found.reward <= 1
    assert 0 <= found.accuracy <= 1
    assert found.parts == {"task": found.reward}
    assert scorer.metrics <= found.extra.keys()


@pytest.mark.parametrize("name", CASES)
@examples(25, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_any_text_gets_a_score(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.parametrize("name", CASES)
@examples(15, suppress_health_check=list(HealthCheck))
@given(inside=TEXTS)
def test_any_stated_answer_gets_a_score(name: str, inside: str) -> None:
    """Where the answer is looked for: behind the tags and boxes that lead deeper."""
    check(name, f"<think>hm</think><answer>{inside}</answer> \\boxed{{{inside}}}")


LONG = [
    "(", "{", "}", "$", "\\boxed{", "<answer>", "</answer>", "<think>", "</think>", "Answer:",
    "answer ", "answer is ", "\n", " ", "\\", "1", "1,000,", "\\frac", "=", "####", "A ", "\\box 5",
]  # fmt: skip
AROUND = [("", ""), ("\\boxed{", "}"), ("<answer>", "</answer>"), ("Answer:", "")]


@pytest.mark.parametrize("name", CASES)
def test_a_long_text_of_anything_ends(name: str) -> None:
    """A rule that takes the square of the length would not end within the limit of a test."""
    for piece in LONG:
        for before, after in AROUND:
            check(name, before + piece * (300_000 // len(piece)) + after)
