"""Files of a user's that import their neighbours, here and in workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.scoring import PROMPT, SIGNATURE, answer, rewards_of

from winnow.config.reward import CustomManager, RewardConfig, UserFunction

FILE = f"""
from neighbour_of_rewards import length

def compute_score({SIGNATURE}):
    return length(solution_str)

class Own:
    def __init__(self, config): ...
    def score(self, prompt, text):
        return length(text)
"""


@pytest.mark.parametrize("how", ["here", "in a worker", "class"])
def test_a_users_file_imports_its_neighbour(how: str, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("def length(text):\n    return len(text)\n")
    file = tmp_path / "reward.py"
    file.write_text(FILE)
    function = UserFunction(path=str(file))
    config = {
        "here": RewardConfig(function=function, workers=0),
        "in a worker": RewardConfig(function=function, workers=1),
        "class": RewardConfig(manager=CustomManager(path=f"{file}:Own")),
    }[how]
    rewards = rewards_of(config)
    try:
        score = asyncio.run(rewards.score(PROMPT, answer(3), "abc", True))
    finally:
        rewards.close()
    assert (score.reward, score.error) == (3.0, "")
