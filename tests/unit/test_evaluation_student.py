"""Student's t distribution against published tables and closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from winnow.evaluation.student import two_sided_bound, two_sided_p

TABLE = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 29: 2.045, 100: 1.984, 1_000_000: 1.960}
"""Degrees of freedom, and the bound of a 95 % interval."""


@pytest.mark.parametrize(("degrees", "bound"), TABLE.items())
def test_the_bounds_are_those_of_the_tables(degrees: int, bound: float) -> None:
    assert two_sided_bound(0.05, degrees) == pytest.approx(bound, abs=6e-4)


@settings(max_examples=25)
@given(st.floats(0, 1e6))
@example(1e-6)
@example(5e-324)
def test_with_one_and_two_degrees_there_are_closed_forms(t: float) -> None:
    assert two_sided_p(t, 1) == pytest.approx(2 / math.pi * math.atan2(1, t), abs=1e-12)
    assert two_sided_p(-t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 5000), st.floats(1e-6, 0.999))
def test_a_bound_is_exceeded_with_its_chance(degrees: int, p: float) -> None:
    assert two_sided_p(two_sided_bound(p, degrees), degrees) == pytest.approx(p, rel=1e-9)


def test_the_ends() -> None:
    assert two_sided_p(0, 3) == 1
    assert two_sided_p(math.inf, 3) == 0
    assert 0 < two_sided_p(50, 29) < 1e-25
