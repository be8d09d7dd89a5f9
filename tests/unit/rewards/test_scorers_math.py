"""Scorers of mathematics by boxes and by value: tables of answers."""

from __future__ import annotations

import threading

import pytest

from winnow.rewards.scorers import SCORERS
from winnow.rewards.scorers.maths import read_answer
from winnow.types import Score

MATH = ["math", "math_verify", "dapo_math_lenient"]
BY_VALUE = ["math_verify", "dapo_math_lenient"]


def score(name: str, text: str, truth: object) -> Score:
    return SCORERS[name].score("any", text, truth, {})


def accuracy(name: str, text: str, truth: object) -> float:
    return score(name, text, truth).accuracy


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{41}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\fbox{7}", "7"),
        (r"it is $\boxed 5$ then", "5"),
        ("Answer: 42", "42"),
        ("**Answer:** 42.", "42"),
        ("The final answer: $x = 5$, surely.", "x = 5"),
        ("Answer:\n\n  7", "7"),
        ("Answer: $3$ or $4$", "4"),
        (r"\boxed{1} and then Answer: 2", "2"),
        (r"Answer: \boxed{2}", "2"),
        (r"Answer: 2 or rather \boxed{3}", "3"),
        (r"\boxed{42", ""),
        (r"Answer: 2, \boxed{42", "2, \\boxed{42"),
        (r"\boxedness{42}", ""),
        ("42", ""),
        ("Answer:", ""),
        ("", ""),
    ],
)
def test_the_answer_that_is_stated_last_is_read(text: str, read: str) -> None:
    assert read_answer(text) == read


SAME_TEXT = [
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\frac1{72}", r"\frac{1}{72}"),
    (r"\frac{1}2", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    ("-1/2", r"-\frac{1}{2}"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.5"),
    (r"\sqrt3", r"\sqrt{3}"),
    ("x = 5", "5"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    (r"\text{east}", "east"),
    (r"\text{(C)}", "(C)"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"10\%", "10"),
    (r"\$10", "10"),
    ("1,234,567", "1234567"),
    (r"\left( 1, 2 \right)", "(1,2)"),
    (r"1{,}000", r"1{,}000"),
    (r"2\!5", "25"),
    ("42.", "42"),
]


@pytest.mark.parametrize(("text", "truth"), SAME_TEXT)
@pytest.mark.parametrize("name", MATH)
def test_another_way_of_writing_an_answer_is_the_same_answer(
    name: str, text: str, truth: str
) -> None:
    found = score(name, rf"Thus \boxed{{{text}}}", truth)
    assert (found.reward, found.accuracy) == (1.0, 1.0), found.extra
    assert accuracy(name, rf"Thus \boxed{{{truth}}}", text) == 1


SAME_VALUE = [
    ("0.25", r"\frac{1}{4}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("2^3", "8"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\{2, 1\}", r"\{1, 2\}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
]


@pytest.mark.parametrize(("text", "truth"), SAME_VALUE)
def test_only_computer_algebra_sees_that_two_values_are_one(text: str, truth: str) -> None:
    said = rf"\boxed{{{text}}}"
    assert accuracy("math", said, truth) == 0
    assert score("math_verify", said, truth).reward == 1
    assert score("dapo_math_lenient", said, truth).reward == 1


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("41", "42"),
        ("-42", "42"),
        ("0.26", r"\frac{1}{4}"),
        ("(1, 2)", "(2, 1)"),
        ("x + 1", "x + 2"),
        ("east", "west"),
        ("3, 5", "3"),
        ("", "0"),
        ("(", "42"),
        (r"\frac{1}{", r"\frac{1}{2}"),
        ("3.14", r"\pi"),
    ],
)
@pytest.mark.parametrize("name", MATH)
def test_another_value_is_wrong(name: str, text: str, truth: str) -> None:
    found = score(name, rf"\boxed{{{text}}}", truth)
    assert (found.reward, found.accuracy) == (SCORERS[name].wrong_reward, 0.0)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("52", "52_8"),
        ("52_9", "52_8"),
        ("52_8", "52"),
        (r"\neq 5", "5"),
        (r"x \ne 5", "5"),
        ("≠5", "5"),
        ("1=5", "5"),
        ("2 + 2 = 5", "5"),
        ("5:1", "5"),
    ],
)
@pytest.mark.parametrize("name", MATH)
def test_a_sign_that_computer_algebra_passes_over_counts(name: str, text: str, truth: str) -> None:
    assert accuracy(name, rf"\boxed{{{text}}}", truth) == 0


@pytest.mark.parametrize(
    ("text", "truth"), [("52_{8}", "52_8"), ("2 + 3 = 5", "5"), ("a = b = 5", "5"), ("3:1", "3:1")]
)
def test_a_base_and_a_calculation_may_be_written_out(text: str, truth: str) -> None:
    assert accuracy("math_verify", rf"\boxed{{{text}}}", truth) == 1


def test_a_worked_solution_may_be_the_truth() -> None:
    for name in MATH:
        assert accuracy(name, r"\boxed{7}", r"We add: $3 + 4 = \boxed{7}$ and 8 is far.") == 1


def test_a_long_answer_is_compared_as_text_alone() -> None:
    long = "+".join(["1"] * 300)
    assert accuracy("math_verify", rf"\boxed{{{long}}}", "300") == 0
    assert accuracy("math_verify", rf"\boxed{{{long}}}", long) == 1
    assert accuracy("math_verify", r"\boxed{1+1+1}", "3") == 1


def test_values_are_compared_in_any_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.append(accuracy("math_verify", r"\boxed{0.25}", "1/4"))
    )
    thread.start()
    thread.join()
    assert found == [1.0]
