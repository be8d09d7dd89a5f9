from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.config.rollout import BandFilter, CustomFilter, NoFilter, VarianceFilter
from winnow.errors import ConfigError, RewardError
from winnow.sampling.filters import apply_filter, make_filter
from winnow.types import Score


def scores(*accuracies: float, **extra: object) -> list[Score]:
    return [Score(2 * a - 1, a, extra=extra) for a in accuracies]


BAND = BandFilter(low=0.25, high=0.75)


@pytest.mark.parametrize(
    ("rule", "accuracies", "verdict"),
    [
        (NoFilter(), (0, 0, 0), "qualified"),
        (NoFilter(), (1,), "qualified"),
        (VarianceFilter(), (0, 1, 0), "qualified"),
        (VarianceFilter(), (0, 0, 0), "all_wrong"),
        (VarianceFilter(), (1, 1, 1), "all_right"),
        (VarianceFilter(), (0.25, 0.25), "all_wrong"),
        (VarianceFilter(), (0,), "qualified"),  # a group of one
        (BAND, (0, 0, 0, 1), "qualified"),
        (BAND, (0, 1, 1, 1), "qualified"),
        (BAND, (1, 1, 1, 1), "all_right"),
        (BAND, (0, 0, 0, 0, 1), "all_wrong"),
        # Not missed by a rounding error of the mean.
        (BandFilter(low=0.1, high=0.1), (0.1, 0.1, 0.1), "qualified"),
    ],
)
def test_verdicts_by_hand(rule: Any, accuracies: tuple[float, ...], verdict: str) -> None:
    assert apply_filter(scores(*accuracies), rule) == verdict


@given(st.floats(-1e6, 1e6), st.integers(2, 8))
def test_float_noise_is_no_variance(value: float, n: int) -> None:
    noisy = [float(np.float32(value))] + [value] * (n - 1)
    assert apply_filter(scores(*noisy), VarianceFilter()) != "qualified"


@given(st.floats(-1e3, 1e3), st.floats(0.01, 1.0))
def test_a_difference_that_learning_can_see_is_variance(value: float, gap: float) -> None:
    assert apply_filter(scores(value, value + gap), VarianceFilter()) == "qualified"


def test_the_metric_may_be_the_shaped_or_the_task_reward_or_a_key_of_the_scorer() -> None:
    shaped = [
        Score(-1.0, 0, {"task": -1.0, "overlong": 0.0}, {"steps": 3}),
        Score(-1.5, 0, {"task": -1.0, "overlong": -0.5}, {"steps": 4}),
    ]
    assert apply_filter(shaped, VarianceFilter(metric="reward")) == "qualified"
    assert apply_filter(shaped, VarianceFilter(metric="task_reward")) == "all_wrong"
    assert apply_filter(shaped, VarianceFilter(metric="steps")) == "qualified"
    assert apply_filter(shaped, VarianceFilter(metric="accuracy")) == "all_wrong"


def test_where_a_scorer_gives_no_accuracy_answers_are_to_differ_in_their_reward() -> None:
    def ungraded(*rewards: float) -> list[Score]:
        task = [(reward, {"task": reward / 2, "overlong": reward}) for reward in rewards]
        return [Score(each, float(each > 0), parts, has_accuracy=False) for each, parts in task]

    assert apply_filter(ungraded(0.1, 0.2), VarianceFilter()) == "qualified"
    assert apply_filter(ungraded(0.2, 0.2), VarianceFilter()) == "all_right"
    assert apply_filter(ungraded(0.0, 0.0), VarianceFilter()) == "all_wrong"
    # The task's reward counts, not a penalty beside it, and a failed scoring says nothing of it.
    alike = [Score(r, 1.0, {"task": 0.5}, has_accuracy=False) for r in (0.1, 0.4)]
    assert apply_filter(alike, VarianceFilter()) == "all_right"
    failed = Score(-1.0, 0.0, {"task": -1.0}, error="boom")
    assert apply_filter([failed, *scores(0, 1)], VarianceFilter()) == "qualified"
    # A band is one of accuracies, whoever made them.
    assert apply_filter(ungraded(0.1, 0.2), BandFilter(low=0.9, high=1.0)) == "qualified"


def test_a_missing_metric_is_named_with_what_the_scorer_gives() -> None:
    with pytest.raises(RewardError, match=r"=style is .*accuracy, reward, task_reward, steps;"):
        apply_filter(scores(0, 1, steps=3, pred="12"), VarianceFilter(metric="style"))


@pytest.mark.parametrize("value", ["many", None, float("nan"), float("inf")])
def test_a_metric_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match="=pred must be a finite number"):
        apply_filter(scores(0, 1, pred=value), VarianceFilter(metric="pred"))


def test_answers_whose_scoring_failed_may_lack_the_metric() -> None:
    failed = Score(0.0, 0.0, error="timed out")
    known = [Score(0.0, 0.0, extra={"steps": k}) for k in (1, 2)]
    rule = VarianceFilter(metric="steps")
    assert apply_filter([failed, *known], rule) == "qualified"
    assert apply_filter([failed, known[0]], rule) == "all_wrong"
    assert apply_filter([failed, failed], rule) == "all_wrong"
    assert apply_filter([failed, failed], BandFilter(metric="steps")) == "all_wrong"


MINE = """
def spread(scores, least=0.5):
    rewards = [score.reward for score in scores]
    return max(rewards) - min(rewards) >= least


def broken(scores):
    return scores[0].extra["steps"] > 3


def counts(scores):
    return sum(score.accuracy for score in scores)
"""


def mine(folder: Path, name: str, **options: float) -> CustomFilter:
    (folder / "mine.py").write_text(MINE)
    return CustomFilter(name="custom", path=f"{folder}/mine.py:{name}", options=options)


def test_a_users_own_filter_judges_by_its_function_and_options(tmp_path: Path) -> None:
    by_default, strict = (
        make_filter(mine(tmp_path, "spread", **more)) for more in ({}, {"least": 2.5})
    )
    assert by_default(scores(0, 0.25)) == "qualified"
    assert by_default(scores(0, 0.125)) == "all_wrong"
    assert strict(scores(0, 1)) == "all_right"


def test_a_users_filter_that_fails_or_says_no_yes_or_no_is_named_in_one_line(
    tmp_path: Path,
) -> None:
    with pytest.raises(RewardError, match=r"mine\.py:broken fails with KeyError: 'steps'; fix"):
        make_filter(mine(tmp_path, "broken"))(scores(1))
    with pytest.raises(RewardError, match=r"counts must return True or False, returned 1\.5; fix"):
        make_filter(mine(tmp_path, "counts"))(scores(1, 0.5))
    with pytest.raises(ConfigError, match=r"sampling\.filter\.path .*has no callable gone"):
        make_filter(mine(tmp_path, "gone"))
