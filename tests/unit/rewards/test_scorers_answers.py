"""Scorers of questions, choices, forms and puzzles, by tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from winnow.rewards.scorers import SCORERS
from winnow.types import Score


def score(name: str, text: str, truth: object) -> Score:
    return SCORERS[name].score("any", text, truth, {})


NILE = {"target": ["The Nile", "Nile River"]}
EXACT = [
    # answer, truth, exact, f1
    ("<answer>the nile</answer>", NILE, 1, 1.0),
    ("<answer> Nile river! </answer>", NILE, 1, 1.0),
    ("<answer>the long Nile</answer>", NILE, 0, 2 / 3),
    ("<answer>Amazon</answer>", NILE, 0, 0.0),
    ("<answer>Amazon</answer>, no: <answer>Nile</answer>", NILE, 1, 1.0),
    ("<answer>Nile</answer>, no: <answer>Amazon</answer>", NILE, 0, 0.0),
    ("<answer>Nile", NILE, 0, 0.0),
    ("Nile", NILE, 0, 0.0),
    ("<answer>the</answer>", "the", 0, 0.0),
    ("<answer>1968</answer>", 1968, 1, 1.0),
    ("<answer>Nile</answer>", json.dumps(NILE), 1, 1.0),
    ("<answer>Nile</answer>", ["Amazon", "Nile"], 1, 1.0),
    ("<answer>Nile</answer>", {"target": np.array(["Nile"], dtype=object)}, 1, 1.0),
    ("<answer>Nile</answer>", '["Amazon", "nile"]', 1, 1.0),
    ("<answer>[sic] nile</answer>", "[sic] Nile", 1, 1.0),
    ("<answer>a b c d</answer>", "b c x", 0, 2 * 2 / (3 + 3)),
]


@pytest.mark.parametrize(("text", "truth", "exact", "f1"), EXACT)
def test_search_qa_takes_the_last_tagged_answer(
    text: str, truth: object, exact: int, f1: float
) -> None:
    found = score("search_qa_em", text, truth)
    assert (found.reward, found.accuracy) == (exact, exact)
    shared = score("search_qa_f1", text, truth)
    assert (shared.reward, shared.accuracy) == (pytest.approx(f1), exact)
    assert shared.extra["f1"] == shared.reward == shared.parts["task"]


CHOICES = [
    (r"so \boxed{B}", "B"),
    (r"so \boxed{\text{(B)}}", "B"),
    (r"so \boxed{B. Paris}", "B"),
    ("<answer>B</answer>", "B"),
    ("<answer> (B) Paris </answer>", "B"),
    ("Answer: B", "B"),
    ("**Answer:** B", "B"),
    ("**Answer: (B)**", "B"),
    ("The answer is B.", "B"),
    ("the correct answer is (B) because", "B"),
    ("Answer: A\nNo.\nAnswer: B", "B"),
    ("Of these I choose option B", "B"),
    ("Let me see.\nB", "B"),
    ("Let me see.\n(B).", "B"),
    ("**B**", "B"),
    (r"The answer is A. \boxed{B}", "B"),
    ("A or B, hard to say", ""),
    ("The answer is a matter of taste", ""),
    ("The answer: A cat", ""),
    ("Answer: Berlin", ""),
    ("Answer: b", ""),
    ("I don't know", ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "pred"), CHOICES)
def test_a_choice_is_read_where_it_is_stated(text: str, pred: str) -> None:
    assert score("multiple_choice", text, "B").extra == {"pred": pred}
    for truth in ("B", "(B)", "b", "B. Paris", 1, "1"):
        found = score("multiple_choice", text, truth)
        assert (found.reward, found.accuracy) == (float(pred == "B"),) * 2
    assert score("multiple_choice", text, "C").accuracy == 0
    assert score("multiple_choice", text, "").accuracy == 0


FORMS = [
    # text, think and answer, think and box
    ("<think>hm</think><answer>7</answer>", 1, 0),
    ("<think>hm</think>\n\n<answer>7</answer>\n", 1, 0),
    ("hm</think><answer>7</answer>", 1, 0),
    (r"<think>hm</think><answer>\boxed{7}</answer>", 1, 1),
    (r"<think>hm</think> So \boxed{7} it is.", 0, 1),
    (r"<think>\boxed{7}</think> It is 7.", 0, 0),
    (r"<think>hm</think> So \boxed{}.", 0, 0),
    (r"<think>hm</think> So \boxed{7", 0, 0),
    ("<think>hm</think><answer>7</answer> I hope.", 0, 0),
    ("Well: <think>hm</think><answer>7</answer>", 0, 0),
    ("<think>hm</think> then <answer>7</answer>", 0, 0),
    ("<think></think><answer>7</answer>", 0, 0),
    ("<think>hm</think><answer> </answer>", 0, 0),
    ("<think>hm</think><answer>7</answer><answer>8</answer>", 0, 0),
    ("<think>hm</think><think>hm</think><answer>7</answer>", 0, 0),
    ("<think>a<think>b</think><answer>7</answer>", 0, 0),
    ("<answer>7</answer><think>hm</think>", 0, 0),
    (r"\boxed{7}", 0, 0),
    ("", 0, 0),
]


@pytest.mark.parametrize(("text", "answer", "box"), FORMS)
def test_a_form_is_right_or_not_whatever_it_says(text: str, answer: int, box: int) -> None:
    for name, right in (("think_answer", answer), ("think_boxed", box)):
        found = score(name, text, "anything")
        assert (found.reward, found.accuracy) == (right, right)


@pytest.mark.parametrize(
    ("text", "reward", "accuracy", "form"),
    [
        (r"<think>hm</think> \boxed{3\sqrt{2}}", 1.0, 1, 1),
        (r"<think>hm</think> \boxed{\sqrt{18}}", 1.0, 1, 1),
        (r"\boxed{3\sqrt{2}}", 0.9, 1, 0),
        (r"<think>hm</think> \boxed{4}", 0.1, 0, 1),
        (r"Answer: 3\sqrt{2}", 0.0, 0, 0),
        ("", 0.0, 0, 0),
    ],
)
def test_geometry_is_scored_by_answer_and_form(
    text: str, reward: float, accuracy: int, form: int
) -> None:
    found = score("geometry3k", text, r"3\sqrt{2}")
    assert (found.reward, found.accuracy) == (pytest.approx(reward), accuracy)
    assert found.extra["format"] == form


COUNTDOWN = {"target": 98, "numbers": [44, 19, 35]}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("44 + 19 + 35", True),
        ("(35 + 19) + 44", True),
        ("44 + 19 + 35 = 98", True),
        ("44+19+36", False),
        ("44 + 54", False),
        ("98", False),
        ("44 + 19 + 35 + 0", False),
        ("44 + 19 + 35 - 44 + 44", False),
        ("44 + 19", False),
        ("44 19 35", False),
        ("44 + 19 + 35 (by adding)", False),
        ("44 + 19 + 35.0", False),
        ("44 + 19 + -(-35)", False),
        ("44 + 19 + 35 / 0", False),
        ("44 ** 19 ** 35", False),
        ("__import__('os').getpid()", False),
        ("(" * 200 + "44 + 19 + 35" + ")" * 200, False),
        ("", False),
    ],
)
def test_countdown_wants_each_number_once(answer: str, right: bool) -> None:
    for truth in (COUNTDOWN, json.dumps(COUNTDOWN)):
        found = score("countdown", f"<think>hm</think><answer>{answer}</answer>", truth)
        form = 0.1 if answer else 0.0
        assert (found.reward, found.accuracy) == (1.0 if right else form, float(right))
    assert score("countdown", answer, COUNTDOWN).reward == 0


def test_countdown_counts_in_fractions() -> None:
    truth = {"target": 24, "numbers": [8, 8, 3, 3]}
    found = score("countdown", "<answer>8 ÷ (3 − 8 / 3)</answer>", truth)  # noqa: RUF001
    assert found.accuracy == 1
    truth = {"target": 8, "numbers": [2, 2, 2]}
    assert score("countdown", "<answer>2 × 2 x 2</answer>", truth).accuracy == 1  # noqa: RUF001
