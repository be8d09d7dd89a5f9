"""Rules across sections: each line names the fields that contradict each other, and the remedy.

Rules within a section stand in the section (`Section.conflicts`).
"""

from __future__ import annotations

from collections.abc import Iterator

from winnow.config.algorithm import (
    AdaptiveRewardKl,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoPasskAdvantage,
    OptimalTokenBaselineAdvantage,
)
from winnow.config.data import NoTask, SortDigitsTask
from winnow.config.model import SftWarmStart
from winnow.config.rollout import BandFilter, VarianceFilter
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, RayCluster
from winnow.errors import ConfigError


def check_config(config: Config) -> None:
    """Apply every rule across sections.

    Raises:
        ConfigError: a rule is broken; one line each.
    """
    rules = (_start, _groups, _admission, _updates, _lengths, _scores, _evaluation, _placement)
    if faults := [fault for rule in rules for fault in rule(config)]:
        raise ConfigError("\n".join(faults))


def notices(config: Config) -> list[str]:
    """Return a warning for each warm-up that is cut to the steps of the run."""
    steps, critic, start = config.trainer.steps, config.critic, config.warm_start
    found = []
    warmups = {"optim.warmup_steps": config.optim.warmup_steps}
    if isinstance(config.algorithm.advantage, GaeAdvantage):
        warmups["critic.optim.warmup_steps"] = critic.optim.warmup_steps
        if critic.warmup_steps >= steps:
            found.append(
                f"Warning: critic.warmup_steps={critic.warmup_steps} leaves none of "
                f"trainer.steps={steps} for the policy: the critic learns alone for {steps - 1}"
            )
    found += [
        f"Warning: {key}={warmup} is more than trainer.steps={steps}: the learning rate warms up "
        f"over {steps}"
        for key, warmup in warmups.items()
        if warmup > steps
    ]
    if isinstance(start, SftWarmStart) and start.warmup_steps > start.steps:
        found.append(
            f"Warning: warm_start.warmup_steps={start.warmup_steps} is more than "
            f"warm_start.steps={start.steps}: the learning rate warms up over {start.steps}"
        )
    return found


def workers_of(config: Config) -> dict[str, int]:
    """Return the number of processes of each role; 0: the run's own process does its work."""
    strategy = config.trainer.strategy
    return {
        "policy": strategy.ranks if isinstance(strategy, Fsdp2) else 0,
        "rollout": config.rollout.engine.processes,
        "reward": config.reward.processes,
    }


def _start(c: Config) -> Iterator[str]:
    made, task = isinstance(c.warm_start, SftWarmStart), c.data.task
    if isinstance(task, NoTask) and not c.data.train_files:
        yield (
            "data.train_files is empty and data/task=none, so there is nothing to train on; "
            "set data.train_files=[FILE.parquet], or data/task=sort_digits"
        )
    if c.model.path is None and not made:
        yield (
            "model.path is null and warm_start=none, so there is no model; "
            "set model.path=FOLDER, or warm_start=sft"
        )
    for key, value in (("model.path", c.model.path), ("model.tokenizer", c.model.tokenizer)):
        if made and value:
            yield (
                f"{key}={value} and warm_start={c.warm_start.name}, which makes its own, exclude "
                f"each other; set {key}=null or warm_start=none"
            )
            break
    if made and not isinstance(task, SortDigitsTask):
        yield (
            f"warm_start=sft has demonstrations of sort_digits only, got data/task={task.name}; "
            "choose data/task=sort_digits, or warm_start=none with a model.path"
        )


def _groups(c: Config) -> Iterator[str]:
    """Yield the rules about groups of one answer."""
    if c.rollout.n > 1:
        return
    advantage, rule = c.algorithm.advantage, c.sampling.filter
    if advantage.name == "grpo" and isinstance(rule, VarianceFilter):
        yield (
            "rollout.n=1 makes groups of one, in which sampling/filter=variance has nothing to "
            "compare and algorithm/advantage=grpo nothing to be relative to; set rollout.n to 2 or "
            "more, or choose sampling/filter=none"
        )
    if isinstance(advantage, GrpoPasskAdvantage | OptimalTokenBaselineAdvantage):
        yield (
            f"algorithm/advantage={advantage.name} compares the answers to a prompt, and "
            "rollout.n=1 gives one; set rollout.n to 2 or more"
        )
    if isinstance(rule, BandFilter) and rule.metric == "accuracy" and 0 < rule.low <= rule.high < 1:
        yield (
            f"rollout.n=1 leaves one answer, right or wrong, to the mean accuracy between "
            f"sampling.filter.low={rule.low:g} and sampling.filter.high={rule.high:g}, so no group "
            "could pass; set rollout.n to 2 or more, or choose sampling/filter=none"
        )


def _admission(c: Config) -> Iterator[str]:
    sampling = c.sampling
    lookahead, staleness = sampling.lookahead, sampling.max_staleness
    most, groups = sampling.max_groups_per_step, sampling.groups_per_step
    if lookahead > staleness:
        yield (
            f"sampling.lookahead={lookahead:g} admits groups for more steps ahead than "
            f"sampling.max_staleness={staleness} lets them wait; lower lookahead to {staleness} or "
            "less, or raise max_staleness"
        )
    if most is not None and most < groups:
        yield (
            f"sampling.max_groups_per_step={most} is less than sampling.groups_per_step={groups}, "
            f"so no step could fill; set it to {groups} or more, or null for {10 * groups}"
        )


def _updates(c: Config) -> Iterator[str]:
    groups, mini, epochs = c.sampling.groups_per_step, c.trainer.mini_batch_groups, c.trainer.epochs
    if mini is not None and groups % mini:
        near = [size for size in range(1, groups + 1) if groups % size == 0]
        fitting = min(near, key=lambda size: (abs(size - mini), size))
        yield (
            f"sampling.groups_per_step={groups} cannot be cut into mini-batches of "
            f"trainer.mini_batch_groups={mini} groups; use a divisor, such as {fitting}"
        )
    # Fused mode takes `old` from the update's own forward pass, which is the step's only one.
    if c.algorithm.correction.mode == "fused" and (epochs > 1 or mini not in (None, groups)):
        yield (
            f"algorithm.correction.mode=fused needs one update a step, got trainer.epochs={epochs} "
            f"and trainer.mini_batch_groups={'null' if mini is None else mini} of "
            f"sampling.groups_per_step={groups}; set trainer.epochs=1 and "
            "trainer.mini_batch_groups=null, or algorithm.correction.mode=recompute"
        )
    # With a shorter horizon a step could turn the KL's weight negative.
    kl, n = c.algorithm.kl.reward, groups * c.rollout.n
    if isinstance(kl, AdaptiveRewardKl) and kl.horizon_samples <= 0.2 * n:
        yield (
            f"algorithm.kl.reward.horizon_samples={kl.horizon_samples} is too short for "
            f"sampling.groups_per_step={groups} groups of rollout.n={c.rollout.n} answers, which "
            f"could turn the weight negative; set it to {n // 5 + 1} or more, better to several "
            f"times {n}"
        )


def _lengths(c: Config) -> Iterator[str]:
    limit, overlong, cosine = c.rollout.max_response_tokens, c.reward.overlong, c.reward.cosine
    if overlong.enabled and overlong.buffer_tokens > limit:
        yield (
            f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is longer than "
            f"rollout.max_response_tokens={limit}; make the buffer at most {limit}, or raise the "
            "limit"
        )
    if cosine.enabled and cosine.limit_tokens is not None and cosine.limit_tokens > limit:
        yield (
            f"reward.cosine.limit_tokens={cosine.limit_tokens} is longer than "
            f"rollout.max_response_tokens={limit}, so no answer could exceed it; set it to null or "
            f"at most {limit}, or raise the limit"
        )


def _scores(c: Config) -> Iterator[str]:
    """Yield the line for a reward without a part that counts; gdpo has weights of its own."""
    others = c.reward.part_weights()
    gdpo = isinstance(c.algorithm.advantage, GdpoAdvantage)
    if c.reward.weights.task != 0 or any(others.values()) or gdpo:
        return
    if not others:
        yield (
            "reward.weights.task=0 and reward/model=none leave no reward to learn from; "
            "set reward.weights.task to another number"
        )
        return
    *zeros, last = (f"{key}=0" for key in ("reward.weights.task", *others))
    yield (
        f"{', '.join(zeros)} and {last} leave no reward to learn from; set one of them to another "
        "number"
    )


def _evaluation(c: Config) -> Iterator[str]:
    best, save, evaluate = c.trainer.keep_best, c.trainer.save_every, c.evaluation.every
    if best is None:
        return
    if not c.data.eval_files and isinstance(c.data.task, NoTask):
        yield (
            f"trainer.keep_best={best} is a figure of an evaluation, but data.eval_files is empty; "
            "set data.eval_files=[FILE], or trainer.keep_best=null"
        )
    elif save is None or evaluate is None or evaluate % save:
        pair = " and ".join(
            f"{key}={'null' if value is None else value}"
            for key, value in (("trainer.save_every", save), ("evaluation.every", evaluate))
        )
        yield (
            f"trainer.keep_best={best} asks for checkpoints of evaluated steps, but "
            f"{pair} do not meet; "
            "make evaluation.every a multiple of trainer.save_every, or set trainer.keep_best=null"
        )


_COUNTS = {
    "policy": ("trainer.strategy.ranks", "trainer/strategy=fsdp2"),
    "rollout": ("rollout.engine.processes", "rollout.engine.processes=1"),
    "reward": ("reward.processes", "reward.processes=1"),
}
"""For each role: the key that gives its number of workers, and the setting that gives it some."""


def _placement(c: Config) -> Iterator[str]:
    cluster = c.cluster
    if not isinstance(cluster, RayCluster):
        return
    workers, roles = workers_of(c), cluster.roles.model_dump()
    if not any(workers.values()):
        yield (
            "cluster=ray has nothing to place: trainer/strategy=single, rollout.engine.processes=0 "
            "and reward.processes=0 keep everything in the run's process; set "
            "trainer/strategy=fsdp2, rollout.engine.processes=1 or cluster=local"
        )
    if cluster.nodes > 1 and cluster.pools:
        yield (
            f"cluster.nodes={cluster.nodes} spreads ranks where no pools are given, but "
            f"cluster.pools has {', '.join(cluster.pools)}; set nodes of the pool, and leave "
            "cluster.nodes at 1"
        )
    elif workers["policy"] % cluster.nodes:
        yield (
            f"trainer.strategy.ranks={workers['policy']} cannot be spread over "
            f"cluster.nodes={cluster.nodes}, as many on each; use a divisor of ranks"
        )
    if cluster.pools or any(roles.values()):
        for role, pool in roles.items():
            yield from _role(cluster, role, pool, workers[role])
        for name in cluster.pools:
            if name not in roles.values():
                yield (
                    f"cluster.pools.{name} has no role; name it in cluster.roles, or leave it out"
                )


def _role(cluster: RayCluster, role: str, name: str | None, workers: int) -> Iterator[str]:
    """Yield the line for a role that does not fit its pool."""
    pools, (asked, gives) = cluster.pools, _COUNTS[role]
    if name is None:
        if workers:
            yield (
                f"cluster.roles.{role} is null, but {asked}={workers} must be placed, too; set "
                f"cluster.roles.{role} to a pool ({', '.join(pools) or 'add one to cluster.pools'})"
            )
    elif name not in pools:
        known = f"has {', '.join(pools)}; name one of them, or" if pools else "is empty;"
        yield (
            f"cluster.roles.{role}={name} is no pool: cluster.pools {known} add "
            f"cluster.pools.{name}.per_node={max(workers, 1)}"
        )
    elif not workers:
        yield (
            f"cluster.roles.{role}={name} has no workers to place; set {gives}, "
            f"or cluster.roles.{role}=null"
        )
    elif (slots := pools[name].nodes * pools[name].per_node) != workers:
        yield (
            f"{asked}={workers} does not fit cluster.pools.{name}, whose {pools[name].nodes} nodes "
            f"x {pools[name].per_node} are {slots} slots for one worker of each of its roles; set "
            f"{asked}={slots}, or change nodes or per_node"
        )
