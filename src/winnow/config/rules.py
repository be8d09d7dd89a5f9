"""Rules across sections: each line names the fields that contradict each other, and the remedy.

Rules within a section stand in the section (`Section.conflicts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from winnow.config.algorithm import (
    AdaptiveRewardKl,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoPasskAdvantage,
    OptimalTokenBaselineAdvantage,
)
from winnow.config.data import Demonstrations, NoTask, SortDigitsTask
from winnow.config.model import LoraAdapter, SftWarmStart
from winnow.config.roles import Roles
from winnow.config.rollout import (
    VLLM_ADAPTER_RANK,
    BandFilter,
    HttpEngineConfig,
    VarianceFilter,
    VllmEngineConfig,
)
from winnow.config.root import Config
from winnow.config.trainer import AsyncMode, Megatron, RayCluster, SyncMode
from winnow.errors import ConfigError


def check_config(config: Config) -> None:
    """Apply every rule across sections.

    Raises:
        ConfigError: a rule is broken; one line each.
    """
    rules = (
        *(_start, _truths, _groups, _admission, _updates, _lengths, _scores, _evaluation, _engine),
        *(_mode, _warm_started_model, _megatron, _placement, _routes),
    )
    if faults := [fault for rule in rules for fault in rule(config)]:
        raise ConfigError("\n".join(faults))


def notices(config: Config) -> list[str]:
    """Return warnings of what a recipe hardly means: warm-ups longer than the run, idle engines,
    tokens of older weights without a correction."""
    lines = [*_uncorrected(config), *_undivided(config)]
    warmups = [("optim.warmup_steps", "trainer.steps")]
    if isinstance(config.algorithm.advantage, GaeAdvantage):
        warmups.append(("critic.optim.warmup_steps", "trainer.steps"))
        if config.critic.warmup_steps >= config.trainer.steps:
            lines.append(
                f"Warning: {_quote(config, 'critic.warmup_steps')} leaves none of "
                f"{_quote(config, 'trainer.steps')} for the policy: the critic learns alone for "
                f"{config.trainer.steps - 1}"
            )
    if not isinstance(config.trainer.mode, SyncMode) and config.sampling.max_staleness == 1:
        lines.append(
            f"{_quote(config, 'trainer/mode', _STALENESS)}: while a step waits to be learnt, no "
            "more groups are open than a step trains on; 2 leaves engines more to write"
        )
    if isinstance(config.warm_start, SftWarmStart):
        warmups.append(("warm_start.warmup_steps", "warm_start.steps"))
    lines += [
        f"Warning: {_quote(config, warmup)} is more than {_quote(config, steps)}: the learning "
        f"rate warms up over {_value(config, steps)}"
        for warmup, steps in warmups
        if _value(config, warmup) > _value(config, steps)
    ]
    return lines


def _undivided(config: Config) -> Iterator[str]:
    """Yield what steps cost that ranks or micro-batches do not divide; nothing is dropped."""
    trainer = config.trainer
    together = getattr(trainer.strategy, "sequence", 1)
    if isinstance(trainer.strategy, Megatron):
        together = trainer.strategy.share_ranks
    ranks = Roles(config)["policy"].count // together
    update, key = config.groups_per_update * config.rollout.n, "trainer.microbatch_tokens"
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if ranks > update:
        yield (
            f"Warning: an update has {update} answers for {ranks} ranks that learn side by side: "
            f"{ranks - update} have nothing to do; raise trainer.mini_batch_groups or "
            "sampling.groups_per_step, or have fewer ranks"
        )
    if longest > _value(config, key):
        yield (
            f"Warning: {_quote(config, key)} holds no answer of {longest} tokens with its prompt, "
            f"which then runs alone and takes the memory of {longest}"
        )


def _uncorrected(config: Config) -> Iterator[str]:
    correction = config.algorithm.correction
    weight, rejection = correction.weight.name, correction.rejection.name
    is_off = (weight, rejection) == ("none", "none") and correction.mode != "bypass"
    if is_off and not isinstance(config.trainer.mode, SyncMode):
        yield (
            f"Warning: {_quote(config, 'trainer/mode')} learns from tokens of older weights, and "
            "algorithm/correction/weight=none and rejection=none correct nothing for that; recipes "
            "set algorithm/correction/weight=truncated (dapo_one_step_off)"
        )


def longest_tokens(config: Config) -> int:
    """Return the most tokens that an answer has with its prompt, in training and evaluation."""
    evaluated = config.evaluation.max_response_tokens or 0
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, evaluated)


_STALENESS = "sampling.max_staleness"


def _value(config: Config, key: str) -> Any:
    """Return the value of a key; the name of the variant for a union."""
    value: Any = config
    for name in re.split(r"[./]", key):
        value = getattr(value, name)
    return getattr(value, "name", value)


def _quote(config: Config, *keys: str) -> str:
    """Return keys with their values: `a=1, b=null and c/d=e`."""
    settings = []
    for key in keys:
        value = _value(config, key)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        settings.append(f"{key}={'null' if value is None else shown}")
    return " and ".join([", ".join(settings[:-1]), settings[-1]] if settings[1:] else settings)


def _start(c: Config) -> Iterator[str]:
    makes_model, task = isinstance(c.warm_start, SftWarmStart), c.data.task
    imitates = isinstance(c.sft, Demonstrations)
    if isinstance(c.sft, Demonstrations) and not c.sft.train_files:
        yield "sft.train_files is empty, so there is nothing to imitate; set sft.train_files=[FILE]"
    for key in ("data.max_train_prompts", "data.sampler"):
        if imitates and _value(c, key) is not None:
            yield (
                f"{_quote(c, key)} chooses among the prompts of training by rewards, and all of "
                f"sft.train_files is imitated; set {key}=null"
            )
    if isinstance(task, NoTask) and not c.data.train_files and not imitates:
        yield (
            "data.train_files is empty and data/task=none, so there is nothing to train on; "
            "set data.train_files=[FILE.parquet], or data/task=sort_digits"
        )
    if c.model.path is None and not makes_model:
        yield (
            "model.path is null and warm_start=none, so there is no model; "
            "set model.path=FOLDER, or warm_start=sft"
        )
    for key in ("model.path", "model.tokenizer"):
        if makes_model and _value(c, key):
            yield (
                f"{_quote(c, key, 'warm_start')}, which makes its own, exclude each other; set "
                f"{key}=null or warm_start=none"
            )
    if makes_model and not isinstance(task, SortDigitsTask):
        yield (
            f"warm_start=sft has demonstrations of sort_digits only, got {_quote(c, 'data/task')}; "
            "choose data/task=sort_digits, or warm_start=none with a model.path"
        )


def _warm_started_model(c: Config) -> Iterator[str]:
    """Yield the lines for what ranks cannot share of a model that the recipe makes itself."""
    strategy, start = c.trainer.strategy, c.warm_start
    if not isinstance(start, SftWarmStart):
        return
    for field in ("sequence", "tensor"):
        if start.model.heads % getattr(strategy, field, 1):
            yield (
                f"{_quote(c, f'trainer.strategy.{field}')} does not divide "
                f"{_quote(c, 'warm_start.model.heads')}; use a divisor of it"
            )
    if not isinstance(strategy, Megatron):
        return
    if strategy.expert > 1:
        yield (
            f"{_quote(c, 'trainer.strategy.expert')} spreads experts, of which the model of "
            "warm_start=sft has none; set it to 1"
        )
    if strategy.pipeline > start.model.layers:
        yield (
            f"{_quote(c, 'trainer.strategy.pipeline')} is more than "
            f"{_quote(c, 'warm_start.model.layers')}; make it {start.model.layers} or less"
        )


def _megatron(c: Config) -> Iterator[str]:
    if not isinstance(c.trainer.strategy, Megatron):
        return
    if isinstance(c.model.adapter, LoraAdapter):
        yield (
            f"{_quote(c, 'trainer/strategy', 'model/adapter')} exclude each other, as "
            "megatron-core has no adapters; set trainer/strategy=fsdp2, or model/adapter=none"
        )
    if not c.model.recompute_attention:
        yield (
            "model.recompute_attention=false and trainer/strategy=megatron exclude each other, as "
            "Megatron recomputes whole layers; set trainer/strategy=fsdp2, or "
            "model.recompute_attention=true"
        )


def _truths(c: Config) -> Iterator[str]:
    reward = c.reward
    is_custom = reward.function.path or reward.manager.name in ("remote", "custom")
    if c.data.columns.truth == "none" and not (is_custom or "none" in reward.scorers.values()):
        yield (
            "data.columns.truth=none leaves the built-in scorers nothing to compare with; set "
            "reward.function.path=FILE.py, 'reward.scorers={*: none}' where a model or a judge "
            "scores, or name the column"
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
            f"{_quote(c, 'algorithm/advantage')} compares the answers to a prompt, and "
            "rollout.n=1 gives one; set rollout.n to 2 or more"
        )
    if isinstance(rule, BandFilter) and rule.metric == "accuracy" and 0 < rule.low <= rule.high < 1:
        band = _quote(c, "rollout.n", "sampling.filter.low", "sampling.filter.high")
        yield (
            f"{band} let no group pass, as one answer is right or wrong; set rollout.n to 2 or "
            "more, or choose sampling/filter=none"
        )


def _admission(c: Config) -> Iterator[str]:
    sampling = c.sampling
    staleness, most = sampling.max_staleness, sampling.max_groups_per_step
    if sampling.lookahead > staleness:
        yield (
            f"{_quote(c, 'sampling.lookahead')} admits groups for more steps ahead than "
            f"{_quote(c, 'sampling.max_staleness')} lets them wait; lower lookahead to {staleness} "
            "or less, or raise max_staleness"
        )
    if most is not None and most < sampling.groups_per_step:
        yield (
            f"{_quote(c, 'sampling.max_groups_per_step', 'sampling.groups_per_step')} let no step "
            f"fill; set the first to {sampling.groups_per_step} or more, or to null"
        )


def _mode(c: Config) -> Iterator[str]:
    """Yield the rules of the modes in which sampling goes on while a step is learnt."""
    mode, sampling = _quote(c, "trainer/mode"), c.sampling
    if isinstance(c.trainer.mode, SyncMode):
        return
    if "rollout" not in Roles(c) and not isinstance(c.rollout.engine, HttpEngineConfig):
        yield (
            f"{mode} writes answers while a step is learnt, which takes engines in processes of "
            f"their own, got {_quote(c, 'rollout/engine', 'rollout.engine.processes')}; set "
            "rollout.engine.processes=1 or more (rollout/engine=custom has none), or "
            "trainer/mode=sync"
        )
    if isinstance(c.trainer.mode, AsyncMode) and c.run.deterministic:
        yield (
            f"{mode} takes new weights whenever they are there, and run.deterministic=true "
            "promises the same bits; set run.deterministic=false, or trainer/mode=one_step_off"
        )
    if sampling.max_staleness < 1:
        yield (
            f"{mode} learns from groups of older weights, and {_quote(c, _STALENESS)} allows "
            f"none; set {_STALENESS} to 1 or more (2 keeps engines as busy as 1 does with "
            "trainer/mode=sync), or trainer/mode=sync"
        )
    if sampling.commit != "admission_order":
        yield (
            f"{mode} never drops a group for being late, and {_quote(c, 'sampling.commit')} does; "
            "set sampling.commit=admission_order, or trainer/mode=sync"
        )


def _updates(c: Config) -> Iterator[str]:
    groups, mini = c.sampling.groups_per_step, c.groups_per_update
    if groups % mini:
        near = [size for size in range(1, groups + 1) if groups % size == 0]
        fitting = min(near, key=lambda size: (abs(size - mini), size))
        yield (
            f"{_quote(c, 'sampling.groups_per_step')} cannot be cut into mini-batches of "
            f"{_quote(c, 'trainer.mini_batch_groups')} groups; use a divisor, such as {fitting}"
        )
    # Fused mode takes `old` from the update's own forward pass, which is the step's only one.
    is_one_update = c.trainer.epochs == 1 and mini == groups
    if c.algorithm.correction.mode == "fused" and not is_one_update:
        got = ("trainer.epochs", "trainer.mini_batch_groups", "sampling.groups_per_step")
        yield (
            f"algorithm.correction.mode=fused needs one update a step, got {_quote(c, *got)}; set "
            "trainer.epochs=1 and trainer.mini_batch_groups=null, or "
            "algorithm.correction.mode=recompute"
        )
    # With a shorter horizon a step could turn the KL's weight negative.
    kl, answers = c.algorithm.kl.reward, groups * c.rollout.n
    if isinstance(kl, AdaptiveRewardKl) and kl.horizon_samples <= 0.2 * answers:
        yield (
            f"{_quote(c, 'algorithm.kl.reward.horizon_samples')} is too short for the {answers} "
            f"answers of {_quote(c, 'sampling.groups_per_step', 'rollout.n')}, which could turn "
            f"the weight negative; set it to {answers // 5 + 1} or more, better to several times "
            f"{answers}"
        )


def _lengths(c: Config) -> Iterator[str]:
    limit, overlong, cosine = c.rollout.max_response_tokens, c.reward.overlong, c.reward.cosine
    for key, is_used in (
        ("reward.overlong.buffer_tokens", overlong.enabled),
        ("reward.cosine.limit_tokens", cosine.enabled),
    ):
        if is_used and (_value(c, key) or 0) > limit:
            yield (
                f"{_quote(c, key)} is longer than {_quote(c, 'rollout.max_response_tokens')}; make "
                f"it at most {limit}, or raise the limit"
            )


def _scores(c: Config) -> Iterator[str]:
    """Yield the line for a reward without a part that counts; gdpo has weights of its own."""
    weights = c.reward.part_weights()
    gdpo = isinstance(c.algorithm.advantage, GdpoAdvantage)
    if c.reward.weights.task == 0 and not any(weights.values()) and not gdpo:
        zeros = " and ".join(f"{key}=0" for key in ("reward.weights.task", *weights))
        none = "" if weights else " and reward/model=none"
        yield f"{zeros}{none} leave no reward to learn from; set a weight to another number"


def _evaluation(c: Config) -> Iterator[str]:
    save, evaluate = c.trainer.save_every, c.evaluation.every
    if c.trainer.keep_best is None:
        return
    eval_files = c.data.eval_files or getattr(c.sft, "eval_files", ())
    if not eval_files and isinstance(c.data.task, NoTask):
        yield (
            f"{_quote(c, 'trainer.keep_best')} is a figure of an evaluation, but data.eval_files "
            "is empty; set data.eval_files=[FILE], or trainer.keep_best=null"
        )
    elif save is None or evaluate is None or evaluate % save:
        yield (
            f"{_quote(c, 'trainer.keep_best')} asks for checkpoints of evaluated steps, but "
            f"{_quote(c, 'trainer.save_every', 'evaluation.every')} do not meet; make "
            "evaluation.every a multiple of trainer.save_every, or set trainer.keep_best=null"
        )


_OVERLAPPED = "trainer/mode=one_step_off", "trainer/mode=async"


def _engine(c: Config) -> Iterator[str]:
    engine, adapter = c.rollout.engine, c.model.adapter
    rank = adapter.rank if isinstance(adapter, LoraAdapter) else 0
    is_alone = isinstance(adapter, LoraAdapter) and adapter.publish == "adapter"
    if is_alone and isinstance(engine, HttpEngineConfig):
        yield (
            f"model.adapter.publish=adapter and {_quote(c, 'rollout/engine')} exclude each other: "
            "servers get whole weights; set model.adapter.publish=merged or rollout/engine=torch"
        )
    most = VLLM_ADAPTER_RANK
    if is_alone and isinstance(engine, VllmEngineConfig) and rank > most:
        yield (
            f"{_quote(c, 'model.adapter.rank')} is more than the {most} that vLLM takes; lower it, "
            "or set model.adapter.publish=merged"
        )
    longest = longest_tokens(c)
    if (
        isinstance(engine, VllmEngineConfig)
        and not engine.chunked_prefill
        and engine.prefill_tokens < longest
    ):
        setting = _quote(c, "rollout.engine.chunked_prefill", "rollout.engine.prefill_tokens")
        yield (
            f"{setting} prefill no answer that goes on behind {longest} tokens, the longest prompt "
            f"and response; set prefill_tokens to {longest} or more, or chunked_prefill=true"
        )
    sleeps = isinstance(engine, VllmEngineConfig) and engine.sleep
    for key in ("trainer/mode", "run.device"):
        if sleeps and (setting := _quote(c, key)) in ("run.device=cpu", *_OVERLAPPED):
            yield (
                f"rollout.engine.sleep=true and {setting} exclude each other, as engines sleep on "
                "GPUs while a step is learnt; set rollout.engine.sleep=false"
            )
    if isinstance(engine, HttpEngineConfig) and c.run.deterministic:
        yield (
            "run.deterministic=true and rollout/engine=http exclude each other: servers write free "
            "of ticks, with random numbers of their own; set run.deterministic=false, or choose "
            "rollout/engine=vllm or torch"
        )


def _routes(c: Config) -> Iterator[str]:
    """Yield the rules of engines and models that tell or take no routes."""
    if not c.rollout.routing_replay:
        return
    setting = "rollout.routing_replay=true"
    if isinstance(c.rollout.engine, HttpEngineConfig):
        yield (
            f"{setting} needs an engine that tells the experts of each token, and "
            f"{_quote(c, 'rollout/engine')} tells none; choose rollout/engine=vllm or torch, or "
            "set it to false"
        )
    if isinstance(c.rollout.engine, VllmEngineConfig) and not c.rollout.engine.prefix_caching:
        yield (
            f"{setting} needs rollout.engine.prefix_caching=true with "
            f"{_quote(c, 'rollout/engine')}, which keeps routes by the blocks of that cache; set "
            "that to true, or set it to false"
        )
    if getattr(c.trainer.strategy, "compile", False):
        yield (
            f"{setting} and {_quote(c, 'trainer.strategy.compile')} exclude each other, as routers "
            "are compiled with their blocks; set one of them to false"
        )


def _placement(c: Config) -> Iterator[str]:
    cluster = c.cluster
    if not isinstance(cluster, RayCluster):
        return
    roles, pools, chosen = Roles(c), cluster.pools, cluster.roles.model_dump()
    names = ", ".join(pools)
    if not roles:
        yield (
            "cluster=ray has nothing to place: trainer/strategy=single, no engine apart and "
            "reward.processes=0 keep everything in the run's process; set "
            "trainer/strategy=fsdp2, rollout.engine.processes=1 or cluster=local"
        )
    if cluster.nodes > 1 and pools:
        yield (
            f"cluster.nodes={cluster.nodes} spreads ranks where no pools are given, but "
            f"cluster.pools has {names}; set nodes of the pool, and leave cluster.nodes at 1"
        )
    elif roles["policy"].count % cluster.nodes:
        yield (
            f"{_quote(c, 'trainer.strategy.ranks')} cannot be spread over "
            f"{_quote(c, 'cluster.nodes')}, as many on each; use a divisor of ranks"
        )
    for role in roles.entries if pools or any(chosen.values()) else ():
        name = role.pool
        slots = pools[name].nodes * pools[name].per_node if name in pools else 0
        if slots != role.count or (name and not slots):
            yield (
                f"cluster.roles.{role.name}={name or 'null'} has {slots} slots in cluster.pools "
                f"({names}), and {role.key} asks for {role.count}; name a pool whose nodes "
                f"x per_node is {role.count} (null for 0), or change {role.key}"
            )
        mates = [r.name for r in roles.entries if r.pool == name and r.name != role.name]
        for mate in mates if name and role.width > 1 else ():
            key = role.key.replace("processes", "tensor_parallel")
            yield (
                f"{key}={role.width} takes several GPUs a slot, which cluster.roles.{role.name}="
                f"{name} shares with {mate}; give it a pool of its own"
            )
    for name in [name for name in pools if name not in chosen.values()]:
        yield f"cluster.pools.{name} has no role; name it in cluster.roles, or leave it out"
