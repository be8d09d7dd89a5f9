"""Rules across sections: each names the fields that contradict each other, and the remedy."""

from __future__ import annotations

from collections.abc import Callable

from winnow.config.checks_algorithm import ALGORITHM_RULES
from winnow.config.checks_cluster import CLUSTER_RULES
from winnow.config.checks_correction import CORRECTION_RULES
from winnow.config.checks_judge import JUDGE_RULES
from winnow.config.checks_reward import REWARD_RULES
from winnow.config.data import NoTask, SortDigitsTask
from winnow.config.root import Config
from winnow.config.sampling import BandFilter, VarianceFilter
from winnow.config.trainer import Fsdp2
from winnow.config.warm_start import SftWarmStart
from winnow.errors import ConfigError

Rule = Callable[[Config], str | None]
"""Returns what is wrong, or None."""


def check_config(config: Config) -> None:
    """Apply every rule.

    Raises:
        ConfigError: with one line for each rule that is broken.
    """
    faults = [fault for rule in RULES if (fault := rule(config))]
    if faults:
        raise ConfigError("\n".join(faults))


def _groups_of_one(c: Config) -> str | None:
    filters = isinstance(c.sampling.filter, VarianceFilter)
    if c.rollout.n > 1 or c.algorithm.advantage.name != "grpo" or not filters:
        return None
    return (
        "rollout.n=1 makes groups of one, in which sampling/filter=variance has nothing to compare "
        "and algorithm/advantage=grpo nothing to be relative to; set rollout.n to 2 or more, "
        "or choose sampling/filter=none"
    )


def _overlong_buffer(c: Config) -> str | None:
    buffer, limit = c.reward.overlong.buffer_tokens, c.rollout.max_response_tokens
    if not c.reward.overlong.enabled or buffer <= limit:
        return None
    return (
        f"reward.overlong.buffer_tokens={buffer} is longer than "
        f"rollout.max_response_tokens={limit}; make the buffer at most {limit}, or raise the limit"
    )


def _mini_batches(c: Config) -> str | None:
    groups, mini = c.sampling.groups_per_step, c.trainer.mini_batch_groups
    if mini is None or groups % mini == 0:
        return None
    near = [size for size in range(1, groups + 1) if groups % size == 0]
    fitting = min(near, key=lambda size: (abs(size - mini), size))
    return (
        f"sampling.groups_per_step={groups} cannot be cut into mini-batches of "
        f"trainer.mini_batch_groups={mini} groups; use a divisor, such as {fitting}"
    )


def _replicas(c: Config) -> str | None:
    strategy = c.trainer.strategy
    if not isinstance(strategy, Fsdp2) or strategy.ranks % strategy.replicas == 0:
        return None
    return (
        f"trainer.strategy.ranks={strategy.ranks} cannot be cut into "
        f"trainer.strategy.replicas={strategy.replicas} groups of ranks; use a divisor of ranks"
    )


def _lookahead(c: Config) -> str | None:
    lookahead, staleness = c.sampling.lookahead, c.sampling.max_staleness
    if lookahead <= staleness:
        return None
    return (
        f"sampling.lookahead={lookahead:g} admits groups for more steps ahead than "
        f"sampling.max_staleness={staleness} lets them wait; lower lookahead to {staleness} "
        "or less, or raise max_staleness"
    )


def _groups_looked_at(c: Config) -> str | None:
    most, groups = c.sampling.max_groups_per_step, c.sampling.groups_per_step
    if most is None or most >= groups:
        return None
    return (
        f"sampling.max_groups_per_step={most} is less than sampling.groups_per_step={groups}, "
        f"so no step could fill; set it to {groups} or more, or null for {10 * groups}"
    )


def _prompts(c: Config) -> str | None:
    task, files = c.data.task, c.data.train_files
    if isinstance(task, NoTask) and not files:
        return (
            "data.train_files is empty and data/task=none, so there is nothing to train on; "
            "set data.train_files=[FILE.parquet], or data/task=sort_digits"
        )
    if files and not isinstance(task, NoTask):
        return (
            f"data.train_files={list(files)} and data/task={task.name} both give prompts; "
            "set data.train_files=[] or data/task=none"
        )
    return None


def _start(c: Config) -> str | None:
    made = isinstance(c.warm_start, SftWarmStart)
    if c.model.path is None and not made:
        return (
            "model.path is null and warm_start=none, so there is no model; "
            "set model.path=FOLDER, or warm_start=sft"
        )
    given = f"model.path={c.model.path}" if c.model.path else f"model.tokenizer={c.model.tokenizer}"
    if made and (c.model.path or c.model.tokenizer):
        key = given.partition("=")[0]
        return (
            f"{given} and warm_start={c.warm_start.name}, which makes its own, exclude each other; "
            f"set {key}=null or warm_start=none"
        )
    return None


def _warm_start_task(c: Config) -> str | None:
    if not isinstance(c.warm_start, SftWarmStart) or isinstance(c.data.task, SortDigitsTask):
        return None
    return (
        f"warm_start=sft has demonstrations of sort_digits only, got data/task={c.data.task.name}; "
        "choose data/task=sort_digits, or warm_start=none with a model.path"
    )


def _support(c: Config) -> str | None:
    r = c.rollout
    cuts = [
        text
        for cut, text in (
            (r.top_p < 1, f"rollout.top_p={r.top_p:g}"),
            (r.top_k > 0, f"rollout.top_k={r.top_k}"),
            (r.min_p > 0, f"rollout.min_p={r.min_p:g}"),
        )
        if cut
    ]
    if not cuts or r.support == "ignore":
        return None
    return (
        f"{' and '.join(cuts)} cut tokens that the trained policy still counts, and "
        "rollout.support=error refuses that; set rollout.support=ignore to train all the same, "
        "or sample from the whole vocabulary (top_p=1, top_k=0, min_p=0)"
    )


def _norm_tokens(c: Config) -> str | None:
    a = c.algorithm
    if a.aggregation_norm_tokens is None or a.aggregation == "seq-mean-token-sum-norm":
        return None
    return (
        f"algorithm.aggregation_norm_tokens={a.aggregation_norm_tokens} has no use in "
        f"algorithm.aggregation={a.aggregation}; set it to null, or aggregation to "
        "seq-mean-token-sum-norm"
    )


def _digits(c: Config) -> str | None:
    task = c.data.task
    if not isinstance(task, SortDigitsTask) or task.min_digits <= task.max_digits:
        return None
    return (
        f"data.task.min_digits={task.min_digits} is more than "
        f"data.task.max_digits={task.max_digits}; lower the one or raise the other"
    )


def _demonstration_shares(c: Config) -> str | None:
    if not isinstance(c.warm_start, SftWarmStart):
        return None
    mix = c.warm_start.demonstrations
    # Shares such as 0.1 and 0.9 may sum to a hair over 1 in floats.
    if mix.guess_share + mix.working_share <= 1 + 1e-9:
        return None
    return (
        f"warm_start.demonstrations.guess_share={mix.guess_share:g} and "
        f"warm_start.demonstrations.working_share={mix.working_share:g} sum to more than 1; "
        "lower one of them"
    )


def _band(c: Config) -> str | None:
    band = c.sampling.filter
    if not isinstance(band, BandFilter) or band.low <= band.high:
        return None
    return (
        f"sampling.filter.low={band.low:g} is above sampling.filter.high={band.high:g}, "
        "so no group could pass; lower the one or raise the other"
    )


def _band_of_one(c: Config) -> str | None:
    band = c.sampling.filter
    if c.rollout.n > 1 or not isinstance(band, BandFilter) or band.metric != "accuracy":
        return None
    if not 0 < band.low <= band.high < 1:
        return None
    return (
        f"rollout.n=1 leaves one answer, right or wrong, to the mean accuracy between "
        f"sampling.filter.low={band.low:g} and sampling.filter.high={band.high:g}, so no group "
        "could pass; set rollout.n to 2 or more, or choose sampling/filter=none"
    )


def _warmup(c: Config) -> str | None:
    warmup, steps = c.optim.warmup_steps, c.trainer.steps
    if warmup <= steps:
        return None
    return (
        f"optim.warmup_steps={warmup} is more than trainer.steps={steps}, so the learning rate "
        f"would never reach its peak; set optim.warmup_steps to {steps} or less, or train longer"
    )


def _warm_start_warmup(c: Config) -> str | None:
    start = c.warm_start
    if not isinstance(start, SftWarmStart) or start.warmup_steps <= start.steps:
        return None
    return (
        f"warm_start.warmup_steps={start.warmup_steps} is more than "
        f"warm_start.steps={start.steps}; set warm_start.warmup_steps to {start.steps} or less"
    )


def _scorers(c: Config) -> str | None:
    path, scorers = c.reward.function.path, c.reward.scorers
    if path is None or not scorers:
        return None
    return (
        f"reward.function.path={path} scores every source, so reward.scorers "
        f"({', '.join(scorers)}) would never be asked; set reward.function.path=null, "
        "or leave reward.scorers empty"
    )


def _keep_best(c: Config) -> str | None:
    best, save, evaluate = c.trainer.keep_best, c.trainer.save_every, c.evaluation.every
    if best is not None and not c.data.eval_files and isinstance(c.data.task, NoTask):
        return (
            f"trainer.keep_best={best} is a figure of an evaluation, but data.eval_files is empty; "
            "set data.eval_files=[FILE], or trainer.keep_best=null"
        )
    if best is None or (save is not None and evaluate is not None and evaluate % save == 0):
        return None
    pair = " and ".join(
        f"{key}={'null' if value is None else value}"
        for key, value in (("trainer.save_every", save), ("evaluation.every", evaluate))
    )
    return (
        f"trainer.keep_best={best} asks for checkpoints of evaluated steps, but "
        f"{pair} do not meet; "
        "make evaluation.every a multiple of trainer.save_every, or set trainer.keep_best=null"
    )


RULES: tuple[Rule, ...] = (
    _groups_of_one,
    _overlong_buffer,
    _mini_batches,
    _replicas,
    _lookahead,
    _groups_looked_at,
    _prompts,
    _start,
    _warm_start_task,
    _support,
    _norm_tokens,
    _digits,
    _demonstration_shares,
    _band,
    _band_of_one,
    _warmup,
    _warm_start_warmup,
    _scorers,
    _keep_best,
    *CLUSTER_RULES,
    *ALGORITHM_RULES,
    *CORRECTION_RULES,
    *REWARD_RULES,
    *JUDGE_RULES,
)
