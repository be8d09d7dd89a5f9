"""Scorers of mathematics by boxes and by value: tables, real gold answers, hostile formulas."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.unit.rewards.conftest import answer

from winnow.config.reward import RewardConfig
from winnow.rewards.routing import Router
from winnow.rewards.scorers import SCORERS
from winnow.rewards.scorers.math_text import normalize, read_answer
from winnow.rewards.service import RewardService
from winnow.types import Prompt, Score

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


def test_a_worked_solution_may_be_the_truth() -> None:
    for name in MATH:
        assert accuracy(name, r"\boxed{7}", r"We add: $3 + 4 = \boxed{7}$ and 8 is far.") == 1


HOSTILE = [
    "9^{9^{9^{9}}}",
    "100000000!",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n}",
    "(" * 150 + "x",
    r"\frac{" * 60,
    "{" * 300,
]


@pytest.mark.slow
@pytest.mark.parametrize("formula", HOSTILE)
def test_a_formula_without_end_is_wrong_and_costs_seconds_only(formula: str) -> None:
    assert accuracy("math_verify", rf"\boxed{{{formula}}}", "7") == 0


def test_a_formula_without_end_is_wrong_without_a_box_too() -> None:
    assert accuracy("math_verify", f"Answer: {HOSTILE[0]}", "7") == 0


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


@pytest.mark.slow
def test_a_worker_compares_values_with_a_time_limit_of_its_own() -> None:
    """The endless formula is a wrong answer, not a failed scoring."""
    said = [r"\boxed{0.25}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{3}"]
    prompt = Prompt("m:1", np.array([1]), "?", "MATH-500", r"\frac{1}{4}")

    async def ask(service: RewardService) -> list[Score]:
        asked = (service.score(prompt, answer(1), text, True) for text in said)
        return list(await asyncio.gather(*asked))

    # Its first answer waits for computer algebra to be loaded, on a machine that may be busy.
    config = RewardConfig(workers=1, timeout_s=120)
    with contextlib.closing(RewardService(config, 128)) as service:
        service.check_sources({"MATH-500"})
        scores = asyncio.run(ask(service))
    assert [each.accuracy for each in scores] == [1.0, 0.0, 0.0]
    assert [each.error for each in scores] == ["", "", ""]
    assert service.scored_apart() == 3


@pytest.fixture(scope="module")
def gold(shared_data: Path) -> list[tuple[str, str]]:
    """Data source and gold answer of AIME 2024, AIME 2025 and MATH-500."""
    table = pq.read_table(shared_data / "math" / "aime24_aime25_math500.parquet")
    rows = [(row["data_source"], row["reward_model"]["ground_truth"]) for row in table.to_pylist()]
    assert len(rows) == 560
    return rows


def test_real_gold_answers_are_right_however_they_are_stated(gold: list[tuple[str, str]]) -> None:
    router = Router({})
    for source, truth in gold:
        for name in MATH:
            for form in (r"So it is \boxed{%s}.", "So.\nAnswer: $%s$", "So.\nAnswer: %s"):
                assert accuracy(name, form % truth, truth) == 1, (name, form, truth)
        assert router.scorer(source).score(source, f"Answer: {truth}", truth, {}).accuracy == 1


def test_real_gold_answers_of_other_problems_are_wrong_as_texts(
    gold: list[tuple[str, str]],
) -> None:
    truths = sorted({truth for _, truth in gold})
    plain = {normalize(truth) for truth in truths}
    # One answer is written in two ways: 10080 and 10,080.
    assert (len(truths), len(plain)) == (336, 335)
    for truth in truths:
        wrong = [other for other in truths if normalize(other) != normalize(truth)]
        said = rf"\boxed{{{truth}}}"
        assert not any(accuracy("math", said, other) for other in wrong[:: len(wrong) // 20])


@pytest.mark.slow
def test_real_gold_answers_of_the_next_problem_are_wrong_by_the_scorer_of_their_source(
    gold: list[tuple[str, str]],
) -> None:
    router = Router({})
    pairs = [
        (source, truth, other)
        for (source, truth), (_, other) in zip(gold, gold[1:] + gold[:1], strict=True)
        if truth != other
    ]
    assert len(pairs) == 548
    for source, truth, other in pairs:
        said = f"So \\boxed{{{other}}}.\nAnswer: {other}"
        assert router.scorer(source).score(source, said, truth, {}).accuracy == 0, (truth, other)
