"""Rewards of conversations: the environment's part, and what a reward function is given."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.scoring import LIMIT, PROMPT
from tests.written import environment, written

from winnow.config.reward import RewardConfig
from winnow.errors import RewardError
from winnow.rewards.pipeline import RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt, Score, Trajectory

OWN = {"manager": {"name": "environment"}}


def score(
    section: dict[str, Any], *turns: tuple[float, dict[str, float]], prompt: Prompt = PROMPT
) -> Score:
    """The score of a conversation of turns with rewards and figures; the last one is right."""
    segments = [environment([5])]
    for reward, figures in turns:
        turn = replace(written([1, 2]), reward=reward, figures={"calls": 1.0, **figures})
        segments += [turn, environment([3])]
    return asyncio.run(
        rewards(section).score(prompt, Trajectory(tuple(segments[1:-1]), "stop"), "#1359")
    )


def rewards(section: dict[str, Any]) -> Rewards:
    config = RewardConfig.model_validate(section)
    return Rewards(config, RewardPipeline(config, LIMIT, conversations=True), conversations=True)


def test_the_environments_rewards_are_a_part_with_a_weight() -> None:
    found = score({"weights": {"environment": 0.5}}, (0.5, {}), (-0.25, {}))
    assert found.parts == {"task": 1.0, "environment": 0.25}
    assert (found.reward, found.accuracy) == (1.125, 1.0)


def test_lengths_are_those_that_the_limit_counts_with_the_environments_tokens() -> None:
    overlong = {"enabled": True, "buffer_tokens": LIMIT}
    assert score({"overlong": overlong}, (0, {}), (0, {})).parts["overlong"] == -5 / LIMIT


@pytest.mark.parametrize(
    ("turns", "accuracy", "is_stated"),
    [
        ([(1.0, {}), (-0.5, {})], 1.0, False),
        ([(1.0, {}), (-1.0, {})], 0.0, False),
        ([(1.0, {"success": 0.0})], 0.0, True),
        ([(0.0, {"success": 0.0, "accuracy": 0.5})], 0.5, True),
        ([(0.0, {"success": 1.0}), (0.0, {})], 1.0, True),  # the last was cut off: no reply to it
    ],
)
def test_an_environment_can_be_the_whole_reward(
    turns: list[tuple[float, dict[str, float]]], accuracy: float, is_stated: bool
) -> None:
    found = score(OWN, *turns)
    assert found.parts == {"environment": sum(reward for reward, _ in turns)}
    assert found.reward == found.parts["environment"]
    assert (found.accuracy, found.has_accuracy) == (accuracy, is_stated)
    assert not rewards(OWN).takes_time(["any"])


def test_an_accuracy_that_is_no_share_fails_its_answer_alone() -> None:
    found = score(OWN, (1.0, {"accuracy": 37.0}))
    assert found.error.startswith("ValueError: the accuracy must lie in [0, 1], got 37")


def test_filters_take_the_part_of_conversations_only() -> None:
    for metric in ("accuracy", "reward", "environment"):
        for section in ({}, OWN):
            rewards(section).require_metric(metric, ["gsm8k"])
    rewards(OWN).check_sources(["any"], held_out=True)
    config = RewardConfig()
    single = Rewards(config, RewardPipeline(config, LIMIT))
    with pytest.raises(RewardError, match=r"sampling\.filter\.metric is environment"):
        single.require_metric("environment", ["gsm8k"])


def test_a_function_gets_the_rewards_under_verls_names(tmp_path: Path) -> None:
    file = tmp_path / "seen.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0, 'seen': dict(extra_info)}\n"
    )
    section = {"manager": {"name": "naive"}, "function": {"path": str(file)}}
    prompt = replace(PROMPT, extra={"extra_info": {"index": 7}})
    found = score(section, (0.5, {"calc": 0.5}), (0.0, {"calc": 0.75}), prompt=prompt)
    assert found.extra["seen"] == {
        "index": 7,
        "num_turns": 4,
        "rollout_reward_scores": {"calc": 0.75, "user_turn_rewards": [0.5, 0.0]},
    }
    assert prompt.extra == {"extra_info": {"index": 7}}
