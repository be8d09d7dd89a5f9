"""The limit of requests and tokens a minute, on a clock of the test's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.rewards.judge import RateLimit

QUICK = settings(max_examples=20, deadline=None)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def let_through(limit: RateLimit, clock: Clock, tokens: float = 0.0) -> float:
    """Wait as long as the limit says; returns the moment."""
    for _ in range(10):
        wait_s = limit.try_acquire(tokens)
        if not wait_s:
            return clock.now
        clock.now += wait_s
    raise AssertionError("never let through")


def busiest_minute(times: list[float], amounts: list[float]) -> float:
    """The most within any 60 seconds, whose end does not count."""
    return max(
        sum(a for t, a in zip(times, amounts, strict=True) if start <= t < start + 60 - 1e-6)
        for start in times
    )


@QUICK
@given(
    limit=st.integers(1, 90),
    shares=st.lists(st.floats(0.1, 1), min_size=1),
    pauses=st.dictionaries(st.integers(0, 100), st.floats(0, 90)),
    counts_tokens=st.booleans(),
)
def test_no_minute_sees_more_requests_or_tokens_than_the_limit(
    limit: int, shares: list[float], pauses: dict[int, float], counts_tokens: bool
) -> None:
    clock = Clock()
    most = 1000 * limit if counts_tokens else limit
    rate = RateLimit(None, most, clock) if counts_tokens else RateLimit(most, None, clock)
    times, amounts = [], []
    for place in range(100 if counts_tokens else 2 * limit + 10):
        clock.now += pauses.get(place, 0.0)  # otherwise as fast as it goes
        amounts.append(shares[place % len(shares)] * most / 10 if counts_tokens else 1.0)
        times.append(let_through(rate, clock, amounts[-1]))
    assert busiest_minute(times, amounts) <= most * (1 + 1e-6)


@pytest.mark.parametrize("limit", [1, 9, 60])
def test_most_of_what_is_allowed_is_used(limit: int) -> None:
    clock = Clock()
    rate = RateLimit(limit, None, clock)
    begin = clock.now
    times = [let_through(rate, clock) for _ in range(5 * limit)]
    assert 5 * limit / ((times[-1] - begin) / 60 or 1) >= 0.9 * limit


def test_what_has_been_saved_up_does_not_come_at_once() -> None:
    clock = Clock()
    rate = RateLimit(60, None, clock)
    clock.now += 3600
    times = [let_through(rate, clock) for _ in range(8)]
    assert [t - times[0] for t in times[:6]] == [0] * 6
    assert times[7] - times[5] == pytest.approx(2 * 60 / 55)


def test_both_limits_hold_and_a_refusal_takes_from_neither() -> None:
    clock = Clock()
    rate = RateLimit(600, 1000, clock)
    assert rate.try_acquire(100) == 0
    assert rate.try_acquire(100) == pytest.approx(100 / 15)
    assert rate.try_acquire(1) == pytest.approx(1 / 15)  # nothing was taken by the one before
    clock.now += 1000
    assert [rate.try_acquire(0) for _ in range(60)] == [0] * 60  # nor of the requests
    assert rate.try_acquire(0) > 0


def test_an_estimate_is_corrected_by_what_was_used() -> None:
    clock = Clock()
    rate = RateLimit(None, 1000, clock)
    assert rate.try_acquire(100) == 0
    rate.settle(100, 20)
    assert rate.try_acquire(80) == 0
    rate.settle(80, 130)  # 50 in debt
    assert rate.try_acquire(10) == pytest.approx(60 / 15)
    rate.settle(0, -1_000_000)  # a bucket is never more than full
    assert rate.try_acquire(100) == 0
    assert rate.try_acquire(1) > 0


def test_a_request_larger_than_the_bucket_goes_when_that_is_full() -> None:
    clock = Clock()
    rate = RateLimit(None, 1000, clock)
    assert rate.try_acquire(700) == 0
    first = clock.now
    assert let_through(rate, clock, 700) - first == pytest.approx(700 / 15)


def test_a_pause_stops_everyone_and_shorter_ones_do_not_end_it() -> None:
    clock = Clock()
    rate = RateLimit(None, None, clock)
    assert rate.try_acquire(5) == 0
    rate.pause(7)
    rate.pause(2)
    assert rate.try_acquire(5) == pytest.approx(7)
    clock.now += 7
    assert rate.try_acquire(5) == 0
