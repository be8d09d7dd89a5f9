"""Scoring takes a time that grows with the length of an answer, and no faster."""

from __future__ import annotations

import pytest
from tests.scorers import CASES, check

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
