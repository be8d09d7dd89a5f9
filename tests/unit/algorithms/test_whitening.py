"""Whitening by hand, in loops, and over any split of the numbers among ranks."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.algorithms.whitening import Moments, merge, moments, whiten

NUMBERS = st.integers(-64, 64).map(lambda n: n / 16)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_three_numbers_worked_by_hand() -> None:
    got = whiten(f64(1.0, 99.0, 1.0, -1.0), mask_of(1, 0, 1, 1))
    # Mean 1/3; squares 4/9 + 4/9 + 16/9 = 8/3, over two: variance 4/3.
    std = math.sqrt(4 / 3 + 1e-8)
    assert got.tolist() == pytest.approx([2 / 3 / std, 0.0, 2 / 3 / std, -4 / 3 / std], rel=1e-12)


def test_moments_worked_by_hand() -> None:
    got = moments(f64(1.0, 99.0, 1.0, -1.0), mask_of(1, 0, 1, 1))
    assert got.count == 3
    assert (got.mean, got.m2, got.variance) == pytest.approx((1 / 3, 8 / 3, 4 / 3))


@given(data=st.lists(st.tuples(NUMBERS, st.booleans()), max_size=20))
def test_loops_agree(data: list[tuple[float, bool]]) -> None:
    chosen = [x for x, inside in data if inside]
    mean = statistics.fmean(chosen) if chosen else 0.0
    variance = statistics.variance(chosen) if len(chosen) > 1 else 0.0
    expected = [(x - mean) / math.sqrt(variance + 1e-8) if inside else 0.0 for x, inside in data]
    got = whiten(f64(*[x for x, _ in data]), mask_of(*[inside for _, inside in data]))
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(
    data=st.lists(st.tuples(NUMBERS, st.booleans(), st.integers(0, 3)), max_size=20),
    shift=st.sampled_from([0.0, 1e6]),
)
def test_ranks_that_share_moments_whiten_as_one(
    data: list[tuple[float, bool, int]], shift: float
) -> None:
    x = f64(*[value + shift for value, _, _ in data])
    mask = mask_of(*[inside for _, inside, _ in data])
    rank = torch.tensor([r for _, _, r in data], dtype=torch.int64)
    shares = [rank == r for r in range(4)]
    whole = merge(moments(x[share], mask[share]) for share in shares)
    alone = moments(x, mask)
    assert whole.count == alone.count
    assert (whole.mean, whole.m2) == pytest.approx((alone.mean, alone.m2), rel=1e-9, abs=1e-7)
    together = torch.zeros_like(x)
    for share in shares:
        together[share] = whiten(x[share], mask[share], whole)
    torch.testing.assert_close(together, whiten(x, mask), rtol=1e-7, atol=1e-7)


def test_moments_of_nothing_change_no_other() -> None:
    some = Moments(3, 1.5, 2.0)
    assert some.combine(Moments()) == some
    assert Moments().combine(some) == some
    assert Moments().combine(Moments()) == Moments()
    assert merge([]) == Moments()


def test_one_token_and_none_become_zero() -> None:
    assert moments(f64(7.0), mask_of(1)).variance == 0
    assert whiten(f64(7.0, 3.0), mask_of(1, 0)).tolist() == [0.0, 0.0]
    assert whiten(f64(7.0, 3.0), mask_of(0, 0)).tolist() == [0.0, 0.0]
    assert whiten(torch.empty(0), torch.empty(0, dtype=torch.bool)).shape == (0,)


@pytest.mark.parametrize("value", [0.1, -1.0, 0.0, 1e6])
def test_equal_numbers_with_float_noise_become_zero(value: float) -> None:
    exact = torch.full((8,), value)
    noisy = torch.nextafter(exact, exact + torch.tensor([1.0, -1.0] * 4))
    assert noisy.unique().numel() == 2
    assert not whiten(noisy, torch.ones(8, dtype=torch.bool)).any()


def test_small_numbers_that_differ_are_no_noise() -> None:
    got = whiten(f64(1e-4, -1e-4), mask_of(1, 1))
    # Variance 2e-8, beside 1e-8.
    assert got.tolist() == pytest.approx([1e-4 / math.sqrt(3e-8), -1e-4 / math.sqrt(3e-8)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_inside_the_mask_and_unread_outside(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        whiten(f64(1.0, bad), mask_of(1, 1))
    with pytest.raises(ValueError, match="must be finite"):
        whiten(f64(1.0, bad), mask_of(1, 1), Moments(2, 0.0, 1.0))
    clean = whiten(f64(1.0, 2.0, 0.0), mask_of(1, 1, 0))
    assert torch.equal(whiten(f64(1.0, 2.0, bad), mask_of(1, 1, 0)), clean)


def test_the_dtype_stays_and_sums_are_exact_in_fp32_too() -> None:
    x = torch.tensor([16777216.0, 16777218.0, 16777220.0]) * 16
    got = whiten(x, torch.ones(3, dtype=torch.bool), Moments(3, 0.0, 2.0))
    assert got.dtype == torch.float32
    large = moments(x, torch.ones(3, dtype=torch.bool))
    assert (large.mean, large.m2) == (16777218.0 * 16, 2 * 32.0**2)


def test_shapes_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match=r"got \[2\] and \[3\]"):
        whiten(f64(1.0, 2.0), mask_of(1, 1, 1))
