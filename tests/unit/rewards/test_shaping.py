"""The soft overlong penalty."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.algorithms.overlong import soft_overlong_penalty
from winnow.rewards.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "paper", "verl"),
    [
        (0, 0.0, 0.0),
        (80, 0.0, 0.0),
        (81, -1 / 48, -1 / 48),
        (104, -0.5, -0.5),
        (128, -1.0, -1.0),
        (152, -1.0, -1.5),
    ],
)
def test_the_penalty_falls_over_the_buffer(length: int, paper: float, verl: float) -> None:
    assert overlong_penalty(length, 128, 48) == pytest.approx(paper)
    assert overlong_penalty(length, 128, 48, form="verl") == pytest.approx(verl)
    assert overlong_penalty(length, 128, 48, factor=0.5) == pytest.approx(paper / 2)


@settings(deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 300), st.floats(0.1, 3), st.sampled_from(["paper", "verl"])
)
def test_it_is_the_same_as_the_reference_among_the_algorithms(
    length: int, buffer: int, factor: float, form: str
) -> None:
    limit = 300
    reference = soft_overlong_penalty(length, limit, buffer, factor, form)  # type: ignore[arg-type]
    assert overlong_penalty(length, limit, buffer, factor, form) == pytest.approx(reference)  # type: ignore[arg-type]
