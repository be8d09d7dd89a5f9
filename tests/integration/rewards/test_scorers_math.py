"""Scorers of mathematics on real gold answers, hostile formulas and long texts; in a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tests.scorers import CASES, accuracy, check, score
from tests.scoring import answer, rewards_of

from winnow.config.reward import RewardConfig
from winnow.rewards.rewards import Rewards
from winnow.rewards.routing import Router
from winnow.types import Prompt, Score

MATH = ["math", "math_verify", "dapo_math_lenient"]
GEOMETRY = Path(__file__).parents[2] / "fixtures" / "geometry3k.json"


HOSTILE = [
    "9^{9^{9^{9}}}",
    "100000000!",
    r"\sum_{n=1}^{10^{9}} \frac{1}{n}",
    "(" * 150 + "x",
    r"\frac{" * 60 + "{" * 300,
]


@pytest.mark.slow
@pytest.mark.parametrize("formula", HOSTILE)
def test_a_formula_without_end_is_wrong_and_costs_seconds_only(formula: str) -> None:
    assert accuracy("math_verify", rf"\boxed{{{formula}}}", "7") == 0


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "formula",
    [
        *HOSTILE,
        *(
            "9**9**9**9",
            "99999999!/7",
            "9^sqrt(9^sqrt(9^sqrt(9^9)))",
            "0.1e999999999",
            "9!!!!!!!/5",
        ),
        *("((((((((9^9)^9)^9)^9)^9)^9)^9)^9)^9", "(((x+y)^9)^9)^9/((x+y)^9)^9", "sqrt(" * 60 + "2"),
        *("[0]*9**9", "eye(99999)", "sqrt(2).n(99999999)", "1" * 390 + ".5", r"\frac{" * 60),
    ],
)
def test_geometry_takes_a_formula_without_end_for_a_wrong_answer(formula: str) -> None:
    assert accuracy("geometry3k", rf"\boxed{{{formula}}}", r"\frac{\sqrt{2}}{2}") == 0


def test_geometry_is_scored_as_mathruler_scores_it() -> None:
    table = json.loads(GEOMETRY.read_text())
    assert len(table["rows"]) >= 300
    for text, truth, right, form in table["rows"]:
        found = score("geometry3k", text, truth)
        assert (found.accuracy, found.extra["format"]) == (right, form), (text, truth)
        assert found.reward == pytest.approx(0.9 * right + 0.1 * form)
    for text, truth, right, _ in table["differences"]:
        assert (right, accuracy("geometry3k", text, truth)) == (1, 0), (text, truth)


@pytest.mark.slow
def test_a_worker_compares_values_with_a_time_limit_of_its_own() -> None:
    """The endless formula is a wrong answer, not a failed scoring."""
    said = [r"\boxed{0.25}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{3}"]
    prompt = Prompt("m:1", np.array([1]), "?", "MATH-500", r"\frac{1}{4}")

    async def ask(service: Rewards) -> list[Score]:
        asked = (service.score(prompt, answer(1), text, True) for text in said)
        return list(await asyncio.gather(*asked))

    # Its first answer waits for computer algebra to be loaded, on a machine that may be busy.
    config = RewardConfig(workers=1, timeout_s=120)
    with contextlib.closing(rewards_of(config, 128)) as service:
        service.check_sources({"MATH-500"})
        scores = asyncio.run(ask(service))
    assert [each.accuracy for each in scores] == [1.0, 0.0, 0.0]
    assert [each.error for each in scores] == ["", "", ""]
    assert service.count_offloaded() == 3


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
    for source, truth, other in pairs[::4]:
        said = f"So \\boxed{{{other}}}.\nAnswer: {other}"
        assert router.scorer(source).score(source, said, truth, {}).accuracy == 0, (truth, other)


LONG = [
    "(", "{", "}", "$", "\\boxed{", "<answer>", "</answer>", "<think>", "</think>", "Answer:",
    "answer ", "answer is ", "\n", " ", "\\", "1", "1,000,", "\\frac", "=", "####", "A ", "\\box 5",
]  # fmt: skip
AROUND = [("", ""), ("\\boxed{", "}"), ("<answer>", "</answer>"), ("Answer:", "")]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", CASES)
def test_a_long_text_of_anything_ends(name: str) -> None:
    """A rule of Python's that takes the square of the length takes minutes for these."""
    for piece in LONG:
        for before, after in AROUND:
            check(name, before + piece * (100_000 // len(piece)) + after)
