"""Questions and ground truths out of the layouts in which data sets are published."""

from __future__ import annotations

from typing import Any

import pytest

from winnow.boxed import last_box_content
from winnow.data.published import SETS, add_dapo_instruction, convert_row, strip_instruction
from winnow.data.sources import Row
from winnow.errors import DataError


def item(name: str, **record: Any) -> Row:
    return convert_row(record, "f.jsonl row 7", SETS[name])


def notes(row: Row) -> Any:
    return row.extra["extra_info"]


def error(name: str, **record: Any) -> str:
    with pytest.raises(DataError) as caught:
        item(name, **record)
    assert str(caught.value).startswith("f.jsonl row 7: ")
    return str(caught.value).removeprefix("f.jsonl row 7: ")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{5}$.", "5"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\text{a} \\ {b}} c}", r"\text{a} \\ {b}"),
        (r"\fbox{ 3 }", "3"),
        (r"the answer is $\boxed 7$.", "7"),
        (r"\boxed{12", None),
        ("no box", None),
        (r"\boxedtext{4}", None),
    ],
)
def test_the_last_box_is_read_with_its_braces(text: str, content: str | None) -> None:
    assert last_box_content(text) == content


def test_gsm8k_answers_follow_the_last_mark() -> None:
    made = item("gsm8k", question=" How many? ", answer="2*600=<<2*600=1200>>\n#### $1,200")
    assert made.ground_truth == "1200"
    assert made.messages == ({"role": "user", "content": " How many? "},)
    assert made.data_source == "openai/gsm8k"
    assert notes(made)["question"] == " How many? "


def test_math_answers_come_from_a_column_or_from_the_box_of_the_solution() -> None:
    boxed = item("math", problem="p", solution=r"so \boxed{x^2}", level="Level 3", type="Algebra")
    assert (boxed.ground_truth, boxed.data_source) == ("x^2", "MATH")
    assert notes(boxed) == {"level": "Level 3", "type": "Algebra"}
    assert item("math", problem="p", solution=r"\boxed{1}", answer="2").ground_truth == "2"


@pytest.mark.parametrize(
    ("written", "read"),
    [("033", "33"), (33, "33"), (33.0, "33"), ("$070$", "70"), (r"336^\circ", "336"), ("0", "0")],
)
def test_aime_answers_become_plain_integers(written: object, read: str) -> None:
    assert item("aime-2025", problem="p", answer=written).ground_truth == read
    assert item("aime-2024", Problem="p", Answer=written).ground_truth == read


@pytest.mark.parametrize(
    "prompt",
    [
        add_dapo_instruction("1+1?"),
        "1+1? Let's think step by step and output the final answer within \\boxed{}.",
        '1+1? Let\'s think step by step and output the final answer after "####".',
        "\n1+1? ",
    ],
)
def test_known_instructions_come_off(prompt: str) -> None:
    assert strip_instruction(prompt) == "1+1?"


def test_a_row_that_does_not_fit_is_named_with_field_and_value() -> None:
    assert error("gsm8k", answer="#### 1").startswith("question or problem is missing; it must be")
    assert error("gsm8k", question="q", answer="1") == (
        "answer is the text '1'; it must be a text with the final answer after ####"
    )
    assert error("gsm8k", question="q", answer="#### ").startswith("answer is the text '####'")
    assert error("gsm8k", question=[], answer="#### 1").startswith("question is an empty list")
    assert error("math", problem="p") == (
        "answer or solution is missing; it must be the final answer, or a text with it"
    )
    assert error("math", problem="p", solution="none").endswith("the final answer in \\boxed{}")
    assert error("math", problem="p", solution=True).startswith("solution is the bool True")
    assert error("aime-2025", problem="p", answer="1/2") == (
        "the answer is the text '1/2'; it must be an integer from 0 to 999"
    )
    assert error("dapo-math-17k", data_source="math_dapo", prompt="p", reward_model={}).startswith(
        "reward_model.ground_truth is missing"
    )
    assert error("dapo-math-17k", prompt="p", reward_model={"ground_truth": ["1"]}).startswith(
        "reward_model.ground_truth is the list ['1']"
    )
