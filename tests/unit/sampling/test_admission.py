from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.config.rollout import SamplingConfig
from winnow.sampling.admission import MIN_CHANCE, ClosedPrefix, QualifyRate, may_open_group

ALL_HISTORIES = [(visits, yes) for visits in range(4) for yes in range(visits + 1)]


def after(outcomes: str, uid: str = "a", decay: float = 0.98) -> QualifyRate:
    rate = QualifyRate(decay)
    for outcome in outcomes:
        rate.observe(uid, outcome == "+")
    return rate


def test_without_a_filter_only_failures_cast_doubt() -> None:
    rate = QualifyRate(0.98, doubt=0.0)
    assert rate.rate == rate.chance((0, 0)) == 1.0
    rate.observe("a", True)
    assert rate.rate == 1.0
    rate.observe("b", False, in_history=False)
    assert rate.rate == pytest.approx(1.98 / 2.98)


def test_the_global_rate_has_a_beta_prior_and_forgets_by_the_decay() -> None:
    assert after("+").rate == pytest.approx(2 / 3)
    assert after("+-", decay=0.5).rate == pytest.approx(1.5 / 3.5)
    assert after("-" * 500 + "+" * 200).rate > 0.95


@given(st.text("+-", max_size=200), st.sampled_from([0.5, 0.9, 0.98]))
def test_no_chance_falls_below_the_floor_or_rises_above_one(outcomes: str, decay: float) -> None:
    rate = after(outcomes, decay=decay)
    assert all(MIN_CHANCE <= chance <= 1 for chance in map(rate.chance, ALL_HISTORIES))


def test_a_prompts_own_visits_move_its_chance_away_from_the_global_rate() -> None:
    rate = QualifyRate(0.98)
    for visit in range(60):
        rate.observe(f"other {visit}", visit % 2 == 0)
    before = rate.rate
    assert rate.chance(rate.history("new")) == before
    rate.observe("easy", False)
    rate.observe("good", True)
    easy, good = (rate.chance(rate.history(uid)) for uid in ("easy", "good"))
    assert easy < rate.rate < good
    # It shrinks to the global rate: one visit is not believed outright.
    assert easy > 0.25
    assert good < 0.75


def test_only_the_latest_three_visits_of_a_prompt_count() -> None:
    assert after("++++---").history("a") == (3, 0)
    assert after("---++").history("a") == (3, 2)
    assert after("+-").history("a") == (2, 1)
    assert after("").history("a") == (0, 0)


@given(st.lists(st.sampled_from(ALL_HISTORIES), max_size=40), st.text("+-", max_size=20))
def test_the_expectation_is_the_sum_of_the_chances_in_flight(
    histories: list[tuple[int, int]], outcomes: str
) -> None:
    rate = after(outcomes)
    expected = sum(rate.chance(history) for history in histories)
    assert rate.expected_qualified(Counter(histories)) == pytest.approx(expected)


def rule(n: int, lookahead: float, staleness: int) -> Callable[..., bool]:
    config = SamplingConfig(groups_per_step=n, lookahead=lookahead, max_staleness=staleness)
    return partial(may_open_group, config)


def test_groups_open_while_too_few_are_expected_to_qualify() -> None:
    assert rule(4, 0, 0)(qualified=2, in_flight=100, expected=1.9)
    assert not rule(4, 0, 0)(qualified=2, in_flight=2, expected=2.0)
    assert rule(4, 0.5, 1)(qualified=2, in_flight=3, expected=3.9)
    assert not rule(4, 0.5, 1)(qualified=2, in_flight=3, expected=4.0)


def test_groups_that_may_outlive_a_step_are_counted_in_full() -> None:
    assert rule(4, 0, 1)(qualified=0, in_flight=7, expected=0.5)
    assert not rule(4, 0, 1)(qualified=0, in_flight=8, expected=0.5)
    assert not rule(4, 0, 2)(qualified=3, in_flight=9, expected=0.5)
    # With a whole step of look-ahead, the look-ahead is the bound.
    assert rule(4, 1, 3)(qualified=3, in_flight=4, expected=0.5)
    assert not rule(4, 1, 3)(qualified=3, in_flight=5, expected=0.5)


def test_the_estimate_learns_in_admission_order() -> None:
    shuffled, ordered = ClosedPrefix(QualifyRate(0.5)), ClosedPrefix(QualifyRate(0.5))
    outcomes = [(0, "a", "qualified"), (1, "b", "not"), (2, "a", "not"), (3, "c", "qualified")]
    for outcome in outcomes:
        ordered.close(*outcome)  # type: ignore[arg-type]
    for index in (3, 1, 0, 2):
        shuffled.close(*outcomes[index])  # type: ignore[arg-type]
    assert shuffled == ordered


def test_a_failure_counts_in_the_global_rate_but_not_against_the_prompt() -> None:
    prefix = ClosedPrefix(QualifyRate(0.98))
    prefix.close(0, "a", "failed")
    assert prefix.rate.rate < 0.5
    assert prefix.rate.history("a") == (0, 0)


def test_a_dropped_group_tells_nothing() -> None:
    prefix = ClosedPrefix(QualifyRate(0.98))
    prefix.close(0, "a", "dropped")
    assert prefix.rate.rate == 0.5
    assert prefix.close(1, "b", "qualified") == [1]


def test_groups_that_were_skipped_are_never_passed() -> None:
    prefix = ClosedPrefix(QualifyRate(0.98))
    prefix.close(1, "b", "qualified")
    prefix.skip_to(3)
    assert prefix.close(0, "a", "qualified") == []
    assert prefix.close(3, "d", "qualified") == [3]
    assert prefix.rate.history("b") == (0, 0)
