"""Which numbers a recipe's scores have: known from the recipe, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from winnow.config.judge import OpenAiJudge, SequenceClassifier
from winnow.config.reward import CustomManager, DapoManager, RemoteManager, RewardConfig
from winnow.rewards.blending import TASK
from winnow.rewards.routing import NO_SCORER, Router
from winnow.rewards.shaping import COSINE, OVERLONG, OVERLONG_REWARD
from winnow.rewards.user_function import WRONG_REWARD

Section = SequenceClassifier | OpenAiJudge


class ScoreNames:
    """What scores are made of.

    Args:
        models: the sections of those models that are asked.
    """

    def __init__(self, config: RewardConfig, models: Sequence[Section]) -> None:
        """Read the recipe.

        Raises:
            RewardError: a scorer's name is wrong.
        """
        self._config, self._models = config, models
        self._judge = next((each for each in models if isinstance(each, OpenAiJudge)), None)
        somebody_else = isinstance(config.manager, RemoteManager | CustomManager)
        is_rules = config.function.path is None and not somebody_else
        self._router = Router(config.scorers) if is_rules else None

    def of(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """The numbers that every score of these sources has; None: only a run will tell."""
        if self._router is None:
            return None
        own = [self._router.scorer(source).metrics | self.common(source) for source in data_sources]
        return frozenset.intersection(*own) if own else self.common()

    def common(self, data_source: str | None = None) -> frozenset[str]:
        """Numbers of every training score, or of those of a source."""
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
        """Whether something else than models scores this source."""
        return self._router is None or self._router.scorer(data_source) is not NO_SCORER

    def wrong_reward(self, data_source: str) -> float:
        """Of a wrong answer."""
        if self._router is None:
            return WRONG_REWARD
        return self._router.scorer(data_source).wrong_reward

    def judge_decides(self, training: bool) -> bool:
        """Whether the accuracy is the judge's."""
        if self._judge is None or not self._judge.as_accuracy:
            return False
        return training or self._judge.in_evaluation
