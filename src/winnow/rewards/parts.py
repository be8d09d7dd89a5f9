"""Parts of the reward: names and weights by recipe, and those that an answer's length makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from winnow.config.judge import OpenAiJudge, SequenceClassifier
from winnow.config.reward import (
    CosineConfig,
    CustomManager,
    DapoManager,
    RemoteManager,
    RewardConfig,
)
from winnow.rewards.routing import NO_SCORER, Router

TASK = "task"
"""Part of the reward that the manager's scorer gives."""
OVERLONG, COSINE = "overlong", "cosine"
OVERLONG_REWARD = "overlong_reward"
WRONG_REWARD = -1.0
"""Reward of an answer whose scoring failed. A user's scale is unknown; the lower end of the
usual ones keeps a policy from living on answers that break the scorer."""
Section = SequenceClassifier | OpenAiJudge


def part_weights(config: RewardConfig) -> dict[str, float]:
    """Return a recipe's weights by part; a part without one counts once."""
    weights = {TASK: config.weights.task, COSINE: config.cosine.weight}
    weights |= {name: part.weight for name, part in config.parts.items()}
    models = [each for each in (config.model, config.judge) if isinstance(each, Section)]
    return weights | {each.part: each.weight for each in models}


class ScoreNames:
    """Names of the numbers that the scores of a recipe have.

    Args:
        models: sections of those models that are asked.

    Raises:
        RewardError: a scorer's name is wrong.
    """

    def __init__(self, config: RewardConfig, models: Sequence[Section]) -> None:
        self._config, self._models = config, models
        self._judge = next((each for each in models if isinstance(each, OpenAiJudge)), None)
        is_theirs = isinstance(config.manager, RemoteManager | CustomManager)
        is_rules = config.function.path is None and not is_theirs
        self._router = Router(config.scorers) if is_rules else None

    def of(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """Return the numbers that every score of these sources has; None: only a run will tell."""
        if self._router is None:
            return None
        own = [self._router.scorer(source).metrics | self.common(source) for source in data_sources]
        return frozenset.intersection(*own) if own else self.common()

    def common(self, data_source: str | None = None) -> frozenset[str]:
        """Return the numbers of every training score, or of those of a source."""
        names = {"reward", *self._config.parts}
        if data_source is None or self.has_task(data_source):
            names |= {"accuracy", "task_reward", TASK}
        if self.judge_decides(training=True):
            names.add("accuracy")
        if self._config.overlong.enabled:
            names.add(OVERLONG)
        if self._config.cosine.enabled:
            names.add(COSINE)
        if isinstance(self._config.manager, DapoManager):
            names.add(OVERLONG_REWARD)
        names |= {model.part for model in self._models}
        return frozenset(names)

    def has_task(self, data_source: str) -> bool:
        """Return whether something else than models scores this source."""
        return self._router is None or self._router.scorer(data_source) is not NO_SCORER

    def wrong_reward(self, data_source: str) -> float:
        """Return the reward of a wrong answer."""
        if self._router is None:
            return WRONG_REWARD
        return self._router.scorer(data_source).wrong_reward

    def judge_decides(self, training: bool) -> bool:
        """Return whether the accuracy is the judge's."""
        if self._judge is None or not self._judge.as_accuracy:
            return False
        return training or self._judge.in_evaluation


def length_parts(
    config: RewardConfig, accuracy: float, length_tokens: int, limit_tokens: int
) -> dict[str, float]:
    """Return the parts of the reward that an answer's length makes."""
    parts: dict[str, float] = {}
    if config.overlong.enabled:
        parts[OVERLONG] = overlong_penalty(
            length_tokens, limit_tokens, config.overlong.buffer_tokens, config.overlong.factor
        )
    if config.cosine.enabled:
        limit = config.cosine.limit_tokens or limit_tokens
        parts[COSINE] = cosine_reward(config.cosine, accuracy >= 1, length_tokens, limit)
    return parts


def overlong_penalty(
    length_tokens: int, limit_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13); no answer is over the limit.

    0 up to `limit - buffer`, then falling linearly to -factor at the limit.
    """
    over = length_tokens - (limit_tokens - buffer_tokens)
    return -factor * min(max(over, 0) / buffer_tokens, 1.0)


def cosine_reward(
    config: CosineConfig, is_right: bool, length_tokens: int, limit_tokens: int
) -> float:
    """Return the cosine reward of arXiv 2502.03373, section 4.2.

    With r_0 and r_L the ends for right or for wrong answers,
    r_L + (r_0 - r_L) / 2 * (1 + cos(pi * length / limit)): r_0 at no length, r_L towards the
    limit; an answer that has reached the limit gets `exceeded`, right or wrong.
    """
    if length_tokens >= limit_tokens:
        return config.exceeded
    short, long = (
        (config.right_short, config.right_long)
        if is_right
        else (config.wrong_short, config.wrong_long)
    )
    fall = (1 + math.cos(math.pi * length_tokens / limit_tokens)) / 2
    return long + (short - long) * fall
