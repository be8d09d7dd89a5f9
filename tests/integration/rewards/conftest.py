"""Services of a user's function that are closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scoring import LIMIT, SIGNATURE, UserRewards, rewards_of

from winnow.config.reward import RewardConfig, UserFunction
from winnow.rewards.rewards import Rewards


@pytest.fixture
def user_service(tmp_path: Path) -> Iterator[UserRewards]:
    """Makes a service of a function's body, or of a whole file's text."""
    made: list[Rewards] = []

    def make(body: str, *, kwargs: Any = None, **config: Any) -> Rewards:
        file = tmp_path / "reward.py"
        is_file = "compute_score" in body
        file.write_text(body if is_file else f"def compute_score({SIGNATURE}):\n    {body}\n")
        function = UserFunction(path=str(file), kwargs=kwargs or {})
        made.append(rewards_of(RewardConfig(function=function, **config), LIMIT))
        return made[-1]

    yield make
    for service in made:
        service.close()
