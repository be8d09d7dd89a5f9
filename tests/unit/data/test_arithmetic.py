"""The generated task `arithmetic`: what is asked, what is held out, and how it is scored."""

from __future__ import annotations

import re

import pytest

from winnow.config.data import ArithmeticTask
from winnow.data.arithmetic import ArithmeticRows
from winnow.data.sources import Row
from winnow.errors import DataError
from winnow.rewards.routing import Router

ROWS = ArithmeticRows(ArithmeticTask(), seed=1)


def numbers(row: Row) -> tuple[int, int]:
    a, b = re.findall(r"\d+", row.uid)
    return int(a), int(b)


def test_no_two_numbers_of_a_held_out_problem_stand_together_in_training() -> None:
    asked = [next(ROWS.candidates(index)) for index in range(3000)]
    held_out = ROWS.held_out()
    assert len({row.uid for row in held_out}) == 200
    assert not {frozenset(numbers(row)) for row in asked} & {
        frozenset(numbers(row)) for row in held_out
    }
    # These are written down: another version must not change a recipe's data.
    assert [row.uid for row in held_out[:3]] == [
        "arithmetic:22*3",
        "arithmetic:14*9",
        "arithmetic:22+41",
    ]
    assert [row.uid for row in asked[:3]] == [
        "arithmetic:58+42",
        "arithmetic:3+8",
        "arithmetic:15*7",
    ]
    for row in (*asked[:50], *held_out[:50]):
        a, b = numbers(row)
        sign = "+" if "+" in row.uid else "*"
        assert row.messages[0]["content"] == f"What is {a} {sign} {b}?"
        assert int(row.ground_truth) == (a + b if sign == "+" else a * b)
        is_small = max(a, b) <= 9
        assert min(a, b) >= (2 if is_small or sign == "*" else 10)
        assert max(a, b) <= (99 if sign == "+" else 30)


def test_rows_are_found_by_uid_and_only_those_that_are_trained_on() -> None:
    row = next(ROWS.candidates(7))
    again = next(ROWS.candidates_of(row.uid))
    assert (again.uid, again.ground_truth) == (row.uid, row.ground_truth)
    held_out = ROWS.held_out()[0].uid
    wrong = ("1*5", "9*31", "31*9", "5+12", "10*11", "3-2", "3*x", "٣+4", "12+99+1")
    for uid in (held_out, "sort_digits:12", *(f"arithmetic:{each}" for each in wrong)):
        with pytest.raises(KeyError):
            ROWS.candidates_of(uid)
    with pytest.raises(DataError, match=r"eval_problems is 900, but .* give only .*; lower it$"):
        ArithmeticRows(ArithmeticTask(eval_problems=900), 0).held_out()


def test_the_last_number_of_an_answer_counts() -> None:
    score = Router({}).scorer("arithmetic").score
    for text, accuracy in (
        ("7 * 8 = **56**.", 1.0),
        ("56", 1.0),
        ("It is 56, as 7 + 1 is 8", 0.0),
        ("", 0.0),
    ):
        assert score("arithmetic", text, "56", {}).accuracy == accuracy, text
