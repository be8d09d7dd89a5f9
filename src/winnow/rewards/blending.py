"""The reward of an answer from its parts: a weighted sum, of plain numbers.

Parts keep the numbers that scorers gave, so that metrics and filters see them as they are;
weights work on the sum alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from winnow.config.judge import OpenAiJudge, SequenceClassifier
from winnow.config.reward import RewardConfig
from winnow.rewards.shaping import COSINE
from winnow.types import Score

TASK = "task"


def part_weights(config: RewardConfig) -> dict[str, float]:
    """The weights that a recipe gives, by part; a part that is not named counts once."""
    weights = {TASK: config.weights.task, COSINE: config.cosine.weight}
    weights |= {name: part.weight for name, part in config.parts.items()}
    if isinstance(config.model, SequenceClassifier):
        weights[config.model.part] = config.model.weight
    if isinstance(config.judge, OpenAiJudge):
        weights[config.judge.part] = config.judge.weight
    return weights


def blended(score: Score, more: Mapping[str, float], weights: Mapping[str, float]) -> Score:
    """The score with further parts, and the reward that all of them make."""
    parts = {**score.parts, **more}
    reward = sum(weights.get(name, 1.0) * value for name, value in parts.items())
    return replace(score, reward=float(reward), parts=parts)
