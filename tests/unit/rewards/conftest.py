"""What the tests of scoring share: a user's file, and services that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winnow.config.reward import RewardConfig, UserFunction
from winnow.rewards.service import RewardService
from winnow.types import Prompt, Segment, Trajectory, VersionSpan

LIMIT = 128
SIGNATURE = "data_source, solution_str, ground_truth, extra_info"
PROMPT = Prompt("sort_digits:5391", np.array([8, 6]), "5391:", "sort_digits", "1359")

UserService = Callable[..., RewardService]


def answer(length: int) -> Trajectory:
    """An answer of so many tokens."""
    tokens = Segment(
        np.zeros(length, np.int64), np.zeros(length, np.float32), (VersionSpan(0, length),)
    )
    return Trajectory((tokens,), "stop")


@pytest.fixture
def user_service(tmp_path: Path) -> Iterator[UserService]:
    """Makes a service of a function's body, or of a whole file's text."""
    made: list[RewardService] = []

    def make(body: str, *, kwargs: Any = None, **config: Any) -> RewardService:
        file = tmp_path / "reward.py"
        is_file = "compute_score" in body
        file.write_text(body if is_file else f"def compute_score({SIGNATURE}):\n    {body}\n")
        function = UserFunction(path=str(file), kwargs=kwargs or {})
        made.append(RewardService(RewardConfig(function=function, **config), LIMIT))
        return made[-1]

    yield make
    for service in made:
        service.close()
