"""Rules about what answers are scored by; `winnow.config.checks` applies them."""

from __future__ import annotations

from winnow.config.advantage import GdpoAdvantage
from winnow.config.judge import NoJudge, OpenAiJudge
from winnow.config.reward_model import NoRewardModel
from winnow.config.root import Config


def left_to_nobody(c: Config) -> str | None:
    """A source without a scorer needs a model."""
    sources = [source for source, scorer in c.reward.scorers.items() if scorer == "none"]
    models = c.reward.model, c.reward.judge
    if not sources or models != (NoRewardModel(), NoJudge()):
        return None
    return (
        f"reward.scorers.{sources[0]}=none leaves a source to the reward model or the judge, but "
        "reward/model=none and reward/judge=none; name a scorer, or set reward/model="
        "sequence_classifier or reward/judge=openai"
    )


def nothing_to_learn(c: Config) -> str | None:
    """Some part must count; gdpo has weights of its own."""
    task, model, judge = c.reward.weights.task, c.reward.model, c.reward.judge
    if isinstance(judge, OpenAiJudge) and judge.weight != 0:
        return None
    if task != 0 or isinstance(c.algorithm.advantage, GdpoAdvantage):
        return None
    if isinstance(model, NoRewardModel):
        return (
            "reward.weights.task=0 and reward/model=none leave no reward to learn from; "
            "set reward.weights.task to another number"
        )
    if model.weight != 0:
        return None
    return (
        f"reward.weights.task=0 and reward.model.weight={model.weight:g} leave no reward to learn "
        "from; set one of them to another number"
    )


REWARD_RULES = (left_to_nobody, nothing_to_learn)
