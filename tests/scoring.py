"""What the tests of scoring share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from winnow.rewards.service import RewardService
from winnow.types import Prompt, Segment, Trajectory, VersionSpan

LIMIT = 128
SIGNATURE = "data_source, solution_str, ground_truth, extra_info"
PROMPT = Prompt("sort_digits:5391", np.array([8, 6]), "5391:", "sort_digits", "1359")

UserService = Callable[..., RewardService]
"""Makes a service of a function's body, or of a whole file's text."""


def answer(length: int) -> Trajectory:
    """An answer of so many tokens."""
    tokens = Segment(
        np.zeros(length, np.int64), np.zeros(length, np.float32), (VersionSpan(0, length),)
    )
    return Trajectory((tokens,), "stop")
