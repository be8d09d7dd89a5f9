"""Which scorer a data source goes to."""

from __future__ import annotations

import pytest

from winnow.errors import RewardError
from winnow.rewards.routing import Router


@pytest.mark.parametrize(
    ("source", "scorer"),
    [
        ("sort_digits", "sort_digits"),
        ("gsm8k", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("math_dapo", "dapo_math"),
        ("math_dapo_reasoning", "dapo_math"),
        ("DAPO-17k", "dapo_math"),
        ("AIME-2024-30", "dapo_math"),
        ("aime_2025", "dapo_math"),
        ("MATH-500", "dapo_math"),
        ("HuggingFaceH4/MATH-500", "dapo_math"),
    ],
)
def test_a_source_is_known_whatever_its_case_and_variant(source: str, scorer: str) -> None:
    assert Router({}).scorer(source).name == scorer


def test_the_recipe_comes_before_the_built_in_routes_and_the_longest_prefix_wins() -> None:
    router = Router({"My*": "gsm8k", "my-maths*": "dapo_math", "MY-MATHS-1": "dapo_math_boxed",
                     "aime*": "dapo_math_boxed"})  # fmt: skip
    names = ["my-own", "my-maths-2", "my-maths-1", "AIME24", "gsm8k"]
    assert [router.scorer(name).name for name in names] == [
        "gsm8k", "dapo_math", "dapo_math_boxed", "dapo_math_boxed", "gsm8k"
    ]  # fmt: skip


def test_a_star_alone_takes_every_source() -> None:
    assert Router({"*": "gsm8k_flexible"}).scorer("anything").name == "gsm8k_flexible"


@pytest.mark.parametrize("source", ["gsm8k-hard", "sort_digit", "lighteval/MATH", "numina"])
def test_an_unknown_source_is_refused_with_the_known_ones(source: str) -> None:
    with pytest.raises(RewardError) as caught:
        Router({}).check(["gsm8k", source])
    assert str(caught.value) == (
        f"data_source {source} has no scorer; known are sort_digits, gsm8k, openai/gsm8k, "
        "math_dapo*, dapo_math*, dapo-math*, dapo-17k*, aime*, math-500*, "
        "HuggingFaceH4/MATH-500. Name one of sort_digits, gsm8k, gsm8k_flexible, dapo_math, "
        "dapo_math_boxed in reward.scorers, or your own function in reward.function.path"
    )


def test_an_unknown_scorer_is_refused() -> None:
    with pytest.raises(RewardError) as caught:
        Router({"aime*": "gsm9k"})
    assert str(caught.value) == (
        "reward.scorers.aime* is gsm9k, which is no scorer; there are sort_digits, gsm8k, "
        "gsm8k_flexible, dapo_math, dapo_math_boxed"
    )
