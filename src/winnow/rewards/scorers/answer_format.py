r"""The form of an answer: thoughts and answer in their tags, whatever they say.

An answer begins with `<think>`; where a chat template has put that tag into the prompt already,
it may be missing. Each tag stands once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.reading import verdict
from winnow.types import Score

_BOX = "\\boxed{"


def score_think_answer(
    data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]
) -> Score:
    """1 for `<think>…</think><answer>…</answer>` and nothing around it, else 0."""
    return verdict(is_think_answer(text), "")


def score_think_boxed(
    data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]
) -> Score:
    r"""1 for `<think>…</think>` and a `\boxed{…}` after it, else 0."""
    return verdict(is_think_boxed(text), "")


def is_think_answer(text: str) -> bool:
    """Whether thoughts and answer stand in their tags, both of them said, nothing else beside."""
    thoughts, rest = _thoughts(text)
    if not thoughts or not rest.startswith("<answer>") or not rest.endswith("</answer>"):
        return False
    inside = rest.removeprefix("<answer>").removesuffix("</answer>")
    return inside.strip() != "" and "answer>" not in inside


def is_think_boxed(text: str) -> bool:
    """Whether thoughts stand in their tags and a box comes after them."""
    thoughts, rest = _thoughts(text)
    start = rest.find(_BOX)
    return bool(thoughts) and start >= 0 and rest.find("}", start + len(_BOX) + 1) >= 0


def _thoughts(text: str) -> tuple[str, str]:
    """What the think tags hold and what follows them; empty where they are not in order."""
    before, closing, after = text.strip().removeprefix("<think>").partition("</think>")
    if not closing or "<think>" in before or "think>" in after:
        return "", ""
    return before.strip(), after.strip()
