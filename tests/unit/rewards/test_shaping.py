"""The soft overlong penalty."""

from __future__ import annotations

import pytest

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
