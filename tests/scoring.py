"""What the tests of scoring share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from winnow.config.reward import RewardConfig
from winnow.rewards.judge import Judge
from winnow.rewards.model_scorer import ModelScorer
from winnow.rewards.pipeline import Decode, RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt, Score, Segment, Trajectory, VersionSpan

LIMIT = 128
SIGNATURE = "data_source, solution_str, ground_truth, extra_info"
PROMPT = Prompt("sort_digits:5391", np.array([8, 6]), "5391:", "sort_digits", "1359")

UserRewards = Callable[..., Rewards]
"""Makes rewards of a function's body, or of a whole file's text."""


def rewards_of(
    config: RewardConfig,
    max_response_tokens: int = LIMIT,
    model: ModelScorer | None = None,
    judge: Judge | None = None,
    decode: Decode | None = None,
) -> Rewards:
    """All that scores, in this process."""
    pipeline = RewardPipeline(config, max_response_tokens, model, judge, decode)
    return Rewards(config, pipeline, [each.config for each in (model, judge) if each is not None])


def answer(length: int) -> Trajectory:
    """An answer of so many tokens."""
    tokens = Segment(
        np.zeros(length, np.int64), np.zeros(length, np.float32), (VersionSpan(0, length),)
    )
    return Trajectory((tokens,), "stop")


def ask(
    rewards: Rewards,
    texts: Sequence[str],
    *,
    prompt: Prompt = PROMPT,
    length: int = 10,
    training: bool = True,
) -> list[Score]:
    """Scores of answers to a prompt that are asked for together."""

    async def together() -> list[Score]:
        asked = (rewards.score(prompt, answer(length), text, training) for text in texts)
        return list(await asyncio.gather(*asked))

    return asyncio.run(together())
