"""What length does to the reward: the soft overlong penalty and the cosine."""

from __future__ import annotations

import math

import pytest

from winnow.config.reward import CosineConfig
from winnow.rewards.pipeline import cosine_reward, overlong_penalty


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -1 / 48), (104, -0.5), (128, -1.0), (152, -1.0)],
)
def test_the_penalty_falls_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 128, 48) == pytest.approx(penalty)
    assert overlong_penalty(length, 128, 48, factor=0.5) == pytest.approx(penalty / 2)


THIRD, SIXTH = 0.75, (2 + math.sqrt(3)) / 4
"""(1 + cos(pi/3)) / 2 and (1 + cos(pi/6)) / 2: what is left of the way from long to short."""


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 2.0, -10.0),
        (20, 1 + SIXTH, -10 * SIXTH),
        (40, 1 + THIRD, -10 * THIRD),
        (60, 1.5, -5.0),
        (80, 1.25, -2.5),
        (120, -10.0, -10.0),
        (500, -10.0, -10.0),
    ],
)
def test_the_cosine_by_hand_at_the_authors_values(length: int, right: float, wrong: float) -> None:
    config = CosineConfig(enabled=True)
    assert cosine_reward(config, True, length, 120) == pytest.approx(right)
    assert cosine_reward(config, False, length, 120) == pytest.approx(wrong)


def test_the_cosine_takes_any_ends() -> None:
    config = CosineConfig(right_short=1, right_long=0.5, wrong_short=-1, wrong_long=-0.5,
                          exceeded=-3)  # fmt: skip
    assert cosine_reward(config, True, 5, 10) == pytest.approx(0.75)
    assert cosine_reward(config, False, 5, 10) == pytest.approx(-0.75)
    assert cosine_reward(config, True, 10, 10) == -3
