"""The soft overlong penalty."""

from __future__ import annotations

import pytest

from winnow.rewards.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -1 / 48), (104, -0.5), (128, -1.0), (152, -1.0)],
)
def test_the_penalty_falls_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 128, 48) == pytest.approx(penalty)
    assert overlong_penalty(length, 128, 48, factor=0.5) == pytest.approx(penalty / 2)
