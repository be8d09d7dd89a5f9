"""Whatever a policy writes gets a score."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.scorers import CASES, check

PIECES = st.sampled_from(
    ["\\boxed{", "\\frac{", "}", "{", "$", "Answer:", "<answer>", "</answer>", "<think>",
     "</think>", "####", "\n", " ", "1", "44", "/", "+", "(", ")", "^", "\\", "x", "=", "\\text{",
     "\\sqrt", "B", ",", ".", "1,000", "\\left(", "\x00", "é", "\ud800"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join)


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
