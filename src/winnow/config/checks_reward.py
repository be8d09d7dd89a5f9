"""Rules about what answers are scored by; `winnow.config.checks` applies them."""

from __future__ import annotations

from winnow.config.advantage import GdpoAdvantage
from winnow.config.judge import NoJudge, OpenAiJudge
from winnow.config.reward_manager import (
    BatchManager,
    CustomManager,
    DapoManager,
    NaiveManager,
    ParallelManager,
    RemoteManager,
)
from winnow.config.reward_model import NoRewardModel
from winnow.config.reward_shares import limits
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
    task, model = c.reward.weights.task, c.reward.model
    others = {f"reward.parts.{name}.weight": part.weight for name, part in c.reward.parts.items()}
    if not isinstance(model, NoRewardModel):
        others["reward.model.weight"] = model.weight
    if isinstance(c.reward.judge, OpenAiJudge):
        others["reward.judge.weight"] = c.reward.judge.weight
    if c.reward.cosine.enabled:
        others["reward.cosine.weight"] = c.reward.cosine.weight
    if task != 0 or any(others.values()) or isinstance(c.algorithm.advantage, GdpoAdvantage):
        return None
    if not others:
        return (
            "reward.weights.task=0 and reward/model=none leave no reward to learn from; "
            "set reward.weights.task to another number"
        )
    zeros = ", ".join(["reward.weights.task=0", *(f"{key}=0" for key in list(others)[:-1])])
    return (
        f"{zeros} and {list(others)[-1]}=0 leave no reward to learn "
        "from; set one of them to another number"
    )


def workers_of_a_manager(c: Config) -> str | None:
    """The number of workers fits who calls the scorers."""
    manager, workers = c.reward.manager, c.reward.workers
    given = f"reward/manager={manager.name} and reward.workers={workers}"
    if isinstance(manager, NaiveManager) and workers:
        return (
            f"{given}: naive scores in the run's own process; set reward.workers=null, or "
            "reward/manager=parallel"
        )
    if isinstance(manager, ParallelManager | BatchManager) and workers == 0:
        return f"{given}: it scores in workers; set reward.workers to null or at least 1"
    if isinstance(manager, RemoteManager | CustomManager) and workers and not c.reward.parts:
        return f"{given}: there is nothing that workers would score; set reward.workers=null"
    return None


def function_of_a_manager(c: Config) -> str | None:
    """A user's function is there for batch, and for nobody who would not call it."""
    manager, path = c.reward.manager, c.reward.function.path
    if isinstance(manager, BatchManager) and path is None:
        return (
            "reward/manager=batch and reward.function.path=null: it calls your own function with "
            "many answers; name its file in reward.function.path, or set reward/manager=auto"
        )
    if isinstance(manager, RemoteManager | CustomManager) and path is not None:
        return (
            f"reward/manager={manager.name} and reward.function.path={path}: only one of them can "
            "score; set reward.function.path=null, or reward/manager=auto"
        )
    return None


def dapo_without_overlong(c: Config) -> str | None:
    """The manager is there for the penalty."""
    if not isinstance(c.reward.manager, DapoManager) or c.reward.overlong.enabled:
        return None
    return (
        "reward/manager=dapo adds the penalty for long answers, but reward.overlong.enabled=false; "
        "set reward.overlong.enabled=true, or reward/manager=auto"
    )


def parts_of_one_name(c: Config) -> str | None:
    """A model's part is not that of a scorer."""
    for field, model in (("model", c.reward.model), ("judge", c.reward.judge)):
        if not isinstance(model, NoRewardModel | NoJudge) and model.part in c.reward.parts:
            return (
                f"reward.{field}.part={model.part} and reward.parts.{model.part} have the same "
                "name; rename one of them"
            )
    return None


def cosine_beyond_the_limit(c: Config) -> str | None:
    """An answer can reach the limit."""
    limit, most = c.reward.cosine.limit_tokens, c.rollout.max_response_tokens
    if not c.reward.cosine.enabled or limit is None or limit <= most:
        return None
    return (
        f"reward.cosine.limit_tokens={limit} is longer than rollout.max_response_tokens={most}, so "
        f"no answer could exceed it; set it to null or at most {most}, or raise the limit"
    )


def processes_without_a_share(c: Config) -> str | None:
    """Each of those that score may do something."""
    processes = c.reward.processes
    for (section, key), limit in limits(c.reward).items():
        if limit < processes:
            return (
                f"reward.processes={processes} share reward.{section}.{key}={limit}, which leaves "
                f"some of them nothing; set reward.processes to {limit} or less, or raise the limit"
            )
    return None


REWARD_RULES = (
    left_to_nobody,
    nothing_to_learn,
    workers_of_a_manager,
    function_of_a_manager,
    dapo_without_overlong,
    parts_of_one_name,
    cosine_beyond_the_limit,
    processes_without_a_share,
)
