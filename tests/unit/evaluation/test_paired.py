"""Paired tests against hand-computed numbers, counting, and simulated evaluations."""

from __future__ import annotations

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.evaluation.compare import EXACT_FLIPS, FLIPS, paired, sign_flip_p

FEW = st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8)


def counted(differences: list[float]) -> float:
    """The share of all sign patterns, zeros included, that go as far."""
    bound = abs(sum(differences)) - 1e-9
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(p, differences, strict=True))) for p in patterns]
    return sum(total >= bound for total in sums) / len(patterns)


def test_a_comparison_by_hand() -> None:
    found = paired([0.5, 0.5, 0.0, 1.0], [1.0, 0.5, 0.5, 0.75])
    assert (found.problems, found.won, found.tied, found.lost) == (4, 2, 1, 1)
    assert (found.a, found.b, found.difference) == (0.5, 0.6875, 0.1875)
    # Differences .5 0 .5 -.25: variance .140625 (n - 1), over 4 problems.
    error = math.sqrt(0.140625 / 4)
    assert found.standard_error == pytest.approx(error)
    assert (found.low, found.high) == pytest.approx(
        (0.1875 - 3.182446 * error, 0.1875 + 3.182446 * error)
    )
    # t = 1 with 3 degrees of freedom; signs of .5 .5 -.25: 4 of 8 go as far as .75.
    assert found.p_t == pytest.approx(0.391002, abs=1e-6)
    assert found.p_sign_flips == 0.5
    assert not found.is_clear


def test_students_example_of_two_drugs_for_sleep() -> None:
    # Student 1908; t = 4.0621, 9 degrees of freedom, p = 0.00283 (as R's t.test says).
    a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired(a, b)
    assert found.p_t == pytest.approx(0.002833, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    # All nine differences that are not 0 point one way: 2 of 512 patterns.
    assert found.p_sign_flips == 2 / 512
    assert found.is_clear


@settings(max_examples=25)
@given(FEW)
def test_few_differences_are_counted_in_full(differences: list[float]) -> None:
    assert sign_flip_p(differences) == pytest.approx(counted(differences), abs=1e-12)


def test_many_differences_are_drawn_and_come_near_the_count() -> None:
    generator = np.random.default_rng(3)
    few = generator.normal(0.3, 1, size=EXACT_FLIPS)
    exact = sign_flip_p(few)
    # A hair more moves no sum across the bound, but makes them one too many to count.
    drawn = sign_flip_p([*few, 1e-15])
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / FLIPS))
    assert sign_flip_p([*few, 1e-15]) == drawn != sign_flip_p([*few, 1e-15], seed=1)
    assert sign_flip_p(np.ones(100)) == 1 / (1 + FLIPS), "no p is 0"


@settings(max_examples=25)
@given(FEW, FEW, st.randoms())
def test_order_does_not_matter_and_sides_only_turn_the_sign(
    left: list[float], right: list[float], random: Random
) -> None:
    pairs = list(zip(left, right, strict=False))
    a, b = zip(*pairs, strict=True)
    c, d = zip(*random.sample(pairs, len(pairs)), strict=True)
    here, mixed, turned = paired(a, b), paired(c, d), paired(b, a)
    assert mixed.difference == pytest.approx(here.difference)
    assert mixed.p_sign_flips == pytest.approx(here.p_sign_flips)
    assert turned.difference == pytest.approx(-here.difference)
    assert (turned.won, turned.lost) == (here.lost, here.won)
    assert turned.p_t == pytest.approx(here.p_t, abs=1e-9)


def test_alike_evaluations_are_called_different_five_times_of_a_hundred() -> None:
    generator = np.random.default_rng(0)
    rates = generator.beta(0.5, 1, size=(400, 12))
    a, b = (generator.binomial(8, rates) / 8 for _ in range(2))
    found = [paired(x, y) for x, y in zip(a, b, strict=True)]
    covered = np.mean([f.low <= 0 <= f.high for f in found])
    assert 0.92 <= covered <= 0.98
    for p in ([f.p_t for f in found], [f.p_sign_flips for f in found]):
        assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.08


def test_the_difference_called_visible_is_seen_four_times_of_five() -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 0.1, size=(120, 40))
    shift = paired(np.zeros(40), noise[0] / noise[0].std(ddof=1) * 0.1).visible
    clear = [paired(np.zeros(40), row + shift).p_t < 0.05 for row in noise]
    assert 0.7 <= np.mean(clear) <= 0.9


def test_pairing_takes_out_what_both_find_hard() -> None:
    generator = np.random.default_rng(2)
    hard = generator.uniform(0, 0.9, size=100)
    found = paired(hard, hard + 0.02 + generator.normal(0, 0.01, size=100))
    apart = math.sqrt(2 * hard.var(ddof=1) / 100)
    assert found.is_clear
    assert found.standard_error < apart / 10


def test_the_same_everywhere_and_a_single_problem() -> None:
    same = paired([0.1 + 0.2, 0.5], [0.3, 0.5])
    assert (same.p_t, same.p_sign_flips, same.tied, (same.low, same.high)) == (1, 1, 2, (0, 0))
    one = paired([0.0], [1.0])
    assert math.isnan(one.standard_error)
    assert (one.p_t, one.p_sign_flips, (one.low, one.high), one.is_clear) == (1, 1, (-1, 1), False)
    constant = paired([0.0] * 10, [0.5] * 10)
    assert (constant.p_t, constant.p_sign_flips, constant.is_clear) == (0, 2 / 1024, True)


@pytest.mark.parametrize(("a", "b"), [([], []), ([0.5], [0.5, 0.5])])
def test_what_cannot_be_paired_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(AssertionError, match="equally long"):
        paired(a, b)
