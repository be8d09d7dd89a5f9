"""Which scorer a data source goes to."""

from __future__ import annotations

import sys

import pytest

from winnow.errors import RewardError
from winnow.rewards.routing import ROUTES, Router
from winnow.rewards.scorers import SCORERS


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("sort_digits", "sort_digits"),
        ("gsm8k", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("math_dapo_reasoning", "dapo_math"),
        ("aime_2025", "dapo_math"),
        ("MATH", "math_verify"),
        ("lighteval/MATH-Hard", "math_verify"),
        ("DigitalLearningGmbH/MATH-lighteval", "math_verify"),
        ("HuggingFaceH4/MATH-500", "math_verify"),
        ("AI-MO/NuminaMath-CoT", "math_verify"),
        ("hiyouga/geometry3k", "geometry3k"),
        ("searchR1_hotpotqa", "search_qa_em"),
        ("TIGER-Lab/MMLU-Pro", "multiple_choice"),
        ("gpqa_diamond", "multiple_choice"),
        ("Jiayi-Pan/Countdown-Tasks-3to4", "countdown"),
        ("reasoning_gym/chain_sum", "reasoning_gym"),
    ],
)
def test_a_source_is_known_whatever_its_case_and_variant(source: str, scorer: str) -> None:
    assert Router({}).scorer(source).name == scorer
    assert Router({}).scorer(source.upper()).name == scorer


def test_every_route_leads_to_a_scorer() -> None:
    assert set(ROUTES.values()) <= SCORERS.keys()
    assert len({source.lower() for source in ROUTES}) == len(ROUTES)


def test_the_recipe_comes_before_the_built_in_routes_and_the_longest_prefix_wins() -> None:
    router = Router({"My*": "gsm8k", "my-maths*": "dapo_math", "MY-MATHS-1": "dapo_math_boxed",
                     "aime*": "dapo_math_boxed"})  # fmt: skip
    names = ["my-own", "my-maths-2", "my-maths-1", "AIME24", "gsm8k"]
    assert [router.scorer(name).name for name in names] == [
        "gsm8k", "dapo_math", "dapo_math_boxed", "dapo_math_boxed", "gsm8k"
    ]  # fmt: skip


def test_a_star_alone_takes_every_source() -> None:
    assert Router({"*": "gsm8k_flexible"}).scorer("anything").name == "gsm8k_flexible"


@pytest.mark.parametrize(
    ("source", "near"),
    [
        ("gsm8k-hard", " (similar: gsm8k)"),
        ("sort_digit", " (similar: sort_digits)"),
        ("mathematics", " (similar: arithmetic)"),
        ("klingon", ""),
        ("nqx", " (similar: nq, nq_*)"),
    ],
)
def test_an_unknown_source_is_refused_with_those_near_it(source: str, near: str) -> None:
    with pytest.raises(RewardError) as caught:
        Router({}).check(["gsm8k", source])
    assert str(caught.value) == (
        f"data_source {source} has no scorer{near}; name one of {', '.join(SCORERS)} in "
        "reward.scorers, or your own function in reward.function.path"
    )


def test_an_unknown_scorer_is_refused() -> None:
    with pytest.raises(RewardError) as caught:
        Router({"aime*": "gsm9k"})
    assert str(caught.value).startswith(
        "reward.scorers.aime* is gsm9k, which is not a scorer; available: sort_digits, gsm8k, "
    )


def test_a_scorer_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(RewardError) as caught:
        Router({"mine": "reasoning_gym"}).check(["mine"])
    assert str(caught.value) == (
        "data_source mine is scored by reasoning_gym, whose package is not installed; "
        "pip install 'winnow-rl[reasoning-gym]', or name another in reward.scorers"
    )
