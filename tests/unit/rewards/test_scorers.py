"""The built-in scorers, by tables and on real gold answers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.rewards.scorers import SCORERS
from winnow.types import Score

# What they compare with is one text; the others have files of their own.
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


def score(name: str, text: str, truth: object) -> Score:
    return SCORERS[name].score("any", text, truth, {})


def accuracy(name: str, text: str, truth: object) -> float:
    return score(name, text, truth).accuracy


@pytest.mark.parametrize("name", PLAIN)
def test_an_empty_answer_is_wrong_and_gets_the_wrong_reward(name: str) -> None:
    empty = score(name, "", "42")
    assert (empty.reward, empty.accuracy, empty.error) == (SCORERS[name].wrong_reward, 0.0, "")
    assert empty.parts == {"task": empty.reward}
    assert empty.extra == {"pred": ""}


def test_without_a_mark_there_is_no_answer_whatever_the_truth() -> None:
    assert score("sort_digits", "", "").accuracy == 0


@pytest.mark.parametrize("name", PLAIN)
@given(text=st.text(max_size=80), truth=st.text(max_size=10) | st.integers())
def test_any_text_gets_a_score(name: str, text: str, truth: object) -> None:
    given_score = score(name, text, truth)
    assert given_score.accuracy in (0.0, 1.0)
    right = given_score.accuracy == 1.0
    assert given_score.reward == (1.0 if right else SCORERS[name].wrong_reward)


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
    (r"Answer: $\text{3\sqrt{13}}$", r"3\sqrt{13}"),
    (r"Answer: $\text{{east}}$", r"\text{east}"),
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


def test_real_gold_answers_of_aime_and_math_500_are_right(shared_data: Path) -> None:
    table = pq.read_table(shared_data / "math" / "aime24_aime25_math500.parquet")
    golds = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
    assert len(golds) == 560
    for gold in golds:
        assert accuracy("dapo_math", f"Answer: {gold}", gold) == 1, gold
        assert accuracy("dapo_math", f"Answer: ${gold}$", gold) == 1, gold
        assert accuracy("dapo_math_boxed", rf"\boxed{{{gold}}}", gold) == 1, gold


def test_real_gold_answers_of_dapo_math_are_right_and_the_next_ones_wrong(
    shared_data: Path,
) -> None:
    table = pq.read_table(shared_data / "math" / "dapo_math_17k.parquet")
    golds = [row["ground_truth"] for row in table["reward_model"].to_pylist()]
    assert all(accuracy("dapo_math", f"Answer: {gold}", gold) == 1 for gold in golds)
    pairs = [(a, b) for a, b in pairwise(golds) if a != b]
    assert not any(accuracy("dapo_math", f"Answer: {a}", b) for a, b in pairs)


@pytest.mark.parametrize("file", ["train.jsonl", "test.jsonl"])
def test_real_worked_answers_of_gsm8k_are_right(file: str, shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / file).read_text(encoding="utf-8").splitlines()
    for answer in (json.loads(line)["answer"] for line in lines):
        gold = answer.rpartition("####")[2].strip().replace(",", "")
        assert accuracy("gsm8k", answer, gold) == 1, answer
        assert accuracy("gsm8k_flexible", answer, gold) == 1, answer
