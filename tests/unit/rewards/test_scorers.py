"""The built-in scorers, by tables, on real gold answers and on any text."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.scorers import CASES, accuracy, check, score

from winnow.rewards.scorers import SCORERS
from winnow.rewards.scorers.maths import read_answer

# What they compare with is one text.
PLAIN = [
    "sort_digits",
    "gsm8k",
    "gsm8k_flexible",
    "dapo_math",
    "dapo_math_boxed",
    "dapo_math_lenient",
    "math",
    "math_verify",
    "search_qa_em",
    "multiple_choice",
]


@pytest.mark.parametrize("name", PLAIN)
def test_an_empty_answer_is_wrong_and_gets_the_wrong_reward(name: str) -> None:
    empty = score(name, "", "42")
    assert (empty.reward, empty.accuracy, empty.error) == (SCORERS[name].wrong_reward, 0.0, "")
    assert empty.parts == {"task": empty.reward}
    assert empty.extra == {"pred": ""}


def test_without_a_mark_there_is_no_answer_whatever_the_truth() -> None:
    assert score("sort_digits", "", "").accuracy == 0


@pytest.mark.parametrize(
    ("text", "right", "pred"),
    [
        ("1|539;3|59;5|9;9|#1359", True, "1359"),
        ("#1359", True, "1359"),
        ("#9999?#1359", True, "1359"),
        ("nonsense#1359", True, "1359"),
        ("1359", False, ""),
        ("#", False, ""),
        ("#1359#", False, ""),
        ("#13590", False, "13590"),
        ("#1395", False, "1395"),
        ("#1359 ", False, "1359 "),
        ("# 1359", False, " 1359"),
        ("#1359?1|53", False, "1359?1|53"),
    ],
)
def test_sort_digits_wants_the_sorted_digits_after_the_last_mark(
    text: str, right: bool, pred: str
) -> None:
    found = score("sort_digits", text, "1359")
    assert (found.reward, found.accuracy) == ((1.0, 1.0) if right else (-1.0, 0.0))
    assert found.extra == {"pred": pred}


GSM8K = [
    # text, strict, flexible
    ("She earns 72.\n#### 72", True, True),
    ("#### 1\n#### 72", True, True),
    ("####72", True, True),
    ("#### $72", True, True),
    ("#### 72 clips", True, True),
    ("#### 72.", True, True),
    ("The answer is 72.", False, True),
    ("72 clips", False, True),
    ("#### 72\nCheck: 8 * 9", True, False),
    ("#### the answer is 72", False, True),
    ("#### 71", False, False),
    ("#### 72\n####", False, True),
    ("#### 72.0", False, False),
    ("#### 72 or 73", False, False),
    ("#### 72, 73", False, False),
    ("#### 71 or 72", False, True),
    ("#### 72, as 8 * 9", True, False),
    ("#### -72", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), GSM8K)
def test_gsm8k_takes_the_number_after_the_mark_or_the_last_one(
    text: str, strict: bool, flexible: bool
) -> None:
    assert accuracy("gsm8k", text, "72") == strict
    assert accuracy("gsm8k_flexible", text, "72") == flexible


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_flexible"])
def test_gsm8k_drops_commas_and_dollars_on_both_sides(name: str) -> None:
    assert accuracy(name, "#### $1,234,567.50", "1234567.50") == 1
    assert accuracy(name, "#### -$5", "-5") == 1
    assert accuracy(name, "#### 1234", "$1,234") == 1
    assert accuracy(name, "#### 72", "8 * 9 = 72\n#### 72") == 1
    assert score(name, "#### $1,234", "1").extra == {"pred": "1234"}


DAPO_RIGHT = [
    (r"Answer: $506\text{ cm}^2$", "506"),
    (r"Answer: $506\text{ m}$", "506"),
    (r"Answer: $506 \text{ square cm}$", "506"),
    (r"Answer: $506\,\mathrm{cm}^{2}$", "506"),
    (r"Answer: $\boxed{506\text{ cm}^2}$", "506"),
    (r"Answer: $\frac{5\text{ cm}^2}{2}$", r"\frac{5}{2}"),
    (r"Answer: $\frac{2}{5\text{ cm}^{2}}$", r"\frac{2}{5}"),
    (r"Answer: $\text{3\sqrt{13}}$", r"3\sqrt{13}"),
    (r"Answer: $\text{{east}}$", r"\text{east}"),
    (r"Answer: $\text{{east}}$", "{east}"),
    (r"Answer: $\textbf{\frac{1}{2}}$", r"\frac{1}{2}"),
    ("answer : $42$", "42"),
    ("Answer: 1,000", "1000"),
    ("Answer: 1000", "1,000"),
    ("Answer: x=5", "5"),
    ("Answer: 42 degrees", "42"),
    ("Answer:\n42", "42"),
    (r"Answer: \frac12", r"\frac{1}{2}"),
    (r"Answer: \frac1{72}", r"\frac{1}{72}"),
    (r"Answer: \sqrt2", r"\sqrt{2}"),
    (r"Answer: $\boxed{42}$", "42"),
    (r"Answer: \boxed{1,000}", "1000"),
    (r"Answer: \text{east}", "east"),
    (r"Answer: \mbox{east}", "east"),
    (r"Answer: \textbf{42}", "42"),
    (r"Answer: \overline{42}", "42"),
    ("Answer: an even number", "even number"),
    ("Answer: the $42$", "42"),
    (r"Answer: 42^\circ", "42"),
    (r"Answer: 42\text{ cm}", "42"),
    ("Answer: 42 cm", "42"),
    ("Answer: $42.$", "42"),
    ("Answer: It is $42$, surely.", "42"),
    ("Answer: $$42$$", "42"),
    (r"Answer: \$42", "42"),
    ("Answer: (1, 2)", "(1,2)"),
    ("Answer: 41\nANSWER:42", "42"),
    ("Answer: 42\nThat is all.", "42"),
    ("Answer: " + "x = " * 60 + "42", "42"),
    ("Answer: a + b", "a+b"),
]
DAPO_WRONG = [
    (r"Answer: $506\text{ cm}^4$", "506"),
    (r"Answer: $506\text{ em}$", "506"),
    (r"Answer: $\boxed{506\text{ cm}^4}$", "506"),
    (r"Answer: $\{1,2\}$", "{1,2}"),
    ("Answer: 1,2", "{1,2}"),
    (r"Answer: $x^2$", "x"),
    (r"Answer: $\text{3\sqrt{13}$", r"3\sqrt{13}"),
    ("Answer: 42.", "42"),
    ("**Answer:** 42", "42"),
    ("Answer: 0.50", "0.5"),
    ("Answer: 042", "42"),
    ("Answer: 42\nAnswer: 41", "42"),
    ("The answer is 42", "42"),
    (r"\boxed{42}", "42"),
    ("Answer: 42" + " " * 300, "42"),
    ("Answer:", "42"),
    ("Answer: ", ""),
    ("Answer: 3,5,7", "357"),
    ("Answer: 2 inches and more", "2"),
]


@pytest.mark.parametrize(("text", "truth"), DAPO_RIGHT)
def test_dapo_math_finds_it_right(text: str, truth: str) -> None:
    found = score("dapo_math", "Some thoughts.\n" + text, truth)
    assert (found.reward, found.accuracy) == (1.0, 1.0), found.extra


@pytest.mark.parametrize(("text", "truth"), DAPO_WRONG)
def test_dapo_math_finds_it_wrong(text: str, truth: str) -> None:
    found = score("dapo_math", text, truth)
    assert (found.reward, found.accuracy) == (-1.0, 0.0), found.extra


def test_dapo_math_looks_at_the_last_300_characters_only() -> None:
    line = "Answer: 42"
    assert accuracy("dapo_math", line + "\n" + "." * (299 - len(line)), "42") == 1
    assert accuracy("dapo_math", line + "\n" + "." * (300 - len(line)), "42") == 0


@given(st.integers(-(10**9), 10**9))
def test_dapo_math_finds_any_whole_number_right_with_or_without_commas(number: int) -> None:
    assert accuracy("dapo_math", f"Answer: {number}", str(number)) == 1
    assert accuracy("dapo_math", f"Answer: ${number:,}$", str(number)) == 1
    assert accuracy("dapo_math", f"Answer: {number}", str(number + 1)) == 0


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    [
        (r"so \boxed{42}", "42", True),
        (r"\boxed{41}, no, \boxed{42}.", "42", True),
        (r"\boxed{\frac{1}{2}} it is", r"\frac{1}{2}", True),
        (r"\boxed{1,000}", "1000", False),
        (r"\boxed{ 42 }", "42", False),
        (r"\boxed{42} and \boxed{41}", "42", False),
        (r"\boxed{42", "42", False),
        ("Answer: 42", "42", False),
        (r"\boxed{42}" + "." * 90, "42", True),
        (r"\boxed{42}" + "." * 91, "42", False),
    ],
)
def test_the_boxed_mode_compares_the_last_box_as_it_stands(
    text: str, truth: str, right: bool
) -> None:
    assert accuracy("dapo_math_boxed", text, truth) == right


def test_real_gold_answers_of_dapo_math_are_right_and_the_next_ones_wrong(
    shared_data: Path,
) -> None:
    table = pq.read_table(shared_data / "math" / "dapo_math_17k.parquet")
    gold_answers = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
    assert all(accuracy("dapo_math", f"Answer: {gold}", gold) == 1 for gold in gold_answers)
    pairs = [(a, b) for a, b in pairwise(gold_answers) if a != b]
    assert not any(accuracy("dapo_math", f"Answer: {a}", b) for a, b in pairs)


@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl"])
def test_real_worked_answers_of_gsm8k_are_right(file: str, shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / file).read_text(encoding="utf-8").splitlines()
    for answer in (json.loads(line)["answer"] for line in lines):
        gold = answer.rpartition("####")[2].strip().replace(",", "")
        assert accuracy("gsm8k", answer, gold) == 1, answer
        assert accuracy("gsm8k_flexible", answer, gold) == 1, answer


# Mathematics by boxes and by value.

MATH = ["math", "math_verify", "dapo_math_lenient"]


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


# Questions, choices, forms and puzzles.

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


PIECES = st.sampled_from(
    ["\\boxed{", "\\frac{", "}", "{", "$", "Answer:", "<answer>", "</answer>", "<think>",
     "</think>", "####", "\n", " ", "1", "44", "/", "+", "(", ")", "^", "\\", "x", "=", "\\text{",
     "\\sqrt", "B", ",", ".", "1,000", "\\left(", "\x00", "é", "\ud800"]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join)


@pytest.mark.parametrize("name", CASES)
@examples(15, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_any_text_and_any_stated_answer_get_a_score(name: str, text: str) -> None:
    check(name, text)
    # Where the answer is looked for: behind the tags and boxes that lead deeper.
    check(name, f"<think>hm</think><answer>{text}</answer> \\boxed{{{text}}}")
