"""Rules across sections: each line names the fields that contradict each other, and the remedy.

Rules within a section stand in the section (`Section.conflicts`). In the texts here `<rollout.n>`
stands for the key with its value: `rollout.n=1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from winnow.config.roles import Roles
from winnow.config.rollout import VLLM_MAX_RANK
from winnow.config.root import Config
from winnow.errors import ConfigError


def check_config(config: Config) -> None:
    """Apply every rule across sections.

    Raises:
        ConfigError: a rule is broken; one line each.
    """
    rules = (
        *(_sources, _truth_column, _group_size, _admission, _updates, _lengths, _reward),
        *(_evaluation, _engine, _mode, _warm_start, _unsupported, _placement, _sharing),
    )
    if faults := [_with_values(config, fault) for rule in rules for fault in rule(config)]:
        raise ConfigError("\n".join(faults))


def config_warnings(config: Config) -> list[str]:
    """Return warnings about settings that are legal and unlikely to be meant: a warm-up longer than
    the run, idle ranks or engines, off-policy tokens without a correction."""
    rules = _correction_warnings, _batch_warnings, _warmup_warnings
    return [_with_values(config, line) for rule in rules for line in rule(config)]


def _warmup_warnings(c: Config) -> Iterator[str]:
    warmups = [("optim.warmup_steps", "trainer.steps")]
    if c.algorithm.advantage.name == "gae":
        warmups.append(("critic.optim.warmup_steps", "trainer.steps"))
        if c.critic.warmup_steps >= c.trainer.steps:
            yield (
                "Warning: <critic.warmup_steps> leaves none of <trainer.steps> for the policy: the "
                f"first {c.trainer.steps - 1} train the critic only"
            )
    if c.trainer.mode.name != "sync" and c.sampling.max_staleness == 1:
        yield (
            "<trainer/mode> with <sampling.max_staleness> opens no new groups while a full step "
            "waits for the trainer; 2 keeps the engines busier"
        )
    if c.warm_start.name == "sft":
        warmups.append(("warm_start.warmup_steps", "warm_start.steps"))
    for warmup, steps in warmups:
        if _value(c, warmup) > _value(c, steps):
            yield (
                f"Warning: <{warmup}> is more than <{steps}>: the learning rate warms up over all "
                f"{_value(c, steps)} steps"
            )


def _batch_warnings(c: Config) -> Iterator[str]:
    """Yield the cost of steps that ranks or micro-batches do not divide; nothing is dropped."""
    strategy = c.trainer.strategy
    sharing = getattr(strategy, "sequence", 1)
    if strategy.name == "megatron":
        sharing = strategy.model_parallel_ranks
    ranks = Roles(c)["policy"].count // sharing
    update = c.groups_per_update * c.rollout.n
    longest = c.data.max_prompt_tokens + c.rollout.max_response_tokens
    if ranks > update:
        yield (
            f"Warning: an update has {update} answers for {ranks} data-parallel ranks, so "
            f"{ranks - update} idle; raise trainer.mini_batch_groups or sampling.groups_per_step, "
            "or use fewer ranks"
        )
    if longest > c.trainer.microbatch_tokens:
        yield (
            "Warning: <trainer.microbatch_tokens> is less than the longest prompt and answer "
            f"({longest} tokens), which runs alone and takes the memory of {longest}"
        )


def _correction_warnings(c: Config) -> Iterator[str]:
    correction = c.algorithm.correction
    weight, rejection = correction.weight.name, correction.rejection.name
    is_off = (weight, rejection) == ("none", "none") and correction.mode != "bypass"
    if is_off and c.trainer.mode.name != "sync":
        yield (
            "Warning: <trainer/mode> trains on off-policy tokens without a correction "
            "(algorithm/correction/weight=none and rejection=none); set "
            "algorithm/correction/weight=truncated, as the recipe dapo_one_step_off does"
        )


def max_sequence_tokens(config: Config) -> int:
    """Return the most tokens that an answer has with its prompt, in training and evaluation."""
    evaluated = config.evaluation.max_response_tokens or 0
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, evaluated)


def _value(config: Config, key: str) -> Any:
    """Return the value of a key, or the name of a union's variant; None if it has no such key."""
    value: Any = config
    for name in re.split(r"[./]", key):
        value = getattr(value, name, None)
    return getattr(value, "name", value)


def _setting(config: Config, key: str) -> str:
    """Return a key with its value. Example: `rollout.n=1`."""
    value = _value(config, key)
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    shown = shown.lower() if isinstance(value, bool) else shown
    return f"{key}={'null' if value is None else shown}"


def _with_values(config: Config, text: str) -> str:
    """Put the key and its value in the place of each `<key>` of a text."""
    return re.sub(r"(?<![^ (])<([a-z_./]+)>", lambda match: _setting(config, match[1]), text)


_OVERLAPPED = {
    "sampling.max_staleness=0": "set it to 1, or 2 for busier engines, or trainer/mode=sync",
    "sampling.commit=completion_order": "set it to admission_order, or trainer/mode=sync",
}
_SLEEP = "set rollout.engine.sleep=false"
_UNSUPPORTED = {
    "trainer/mode=one_step_off": _OVERLAPPED,
    "trainer/mode=async": {
        "run.deterministic=true": "set it to false, or trainer/mode=one_step_off",
        **_OVERLAPPED,
    },
    "trainer/strategy=megatron": {
        "model/adapter=lora": "set trainer/strategy=fsdp2, or model/adapter=none",
        "model.recompute_attention=false": "set it to true, or choose trainer/strategy=fsdp2",
    },
    "trainer.strategy.compile=true": {"rollout.routing_replay=true": "set one of them to false"},
    "rollout/engine=http": {
        "run.deterministic=true": "set it to false, or choose rollout/engine=vllm or torch",
        "model.adapter.publish=adapter": "set it to merged, or choose rollout/engine=torch",
        "rollout.routing_replay=true": "set it to false, or choose rollout/engine=vllm or torch",
    },
    "cluster.share_devices=true": {
        "rollout/engine=http": "set it to false, or choose rollout/engine=vllm or torch",
        "rollout/engine=custom": "set it to false, or choose rollout/engine=vllm or torch",
        "sft=demonstrations": "set it to false",
    },
    "rollout.engine.sleep=true": {
        "trainer/mode=one_step_off": _SLEEP,
        "trainer/mode=async": _SLEEP,
    },
    "rollout.n=1": {
        "algorithm/advantage=grpo_passk": "set rollout.n to 2 or more",
        "algorithm/advantage=optimal_token_baseline": "set rollout.n to 2 or more",
    },
}
"""The remedy for each two settings that exclude each other."""


def _unsupported(c: Config) -> Iterator[str]:
    for setting, others in _UNSUPPORTED.items():
        for other, remedy in others.items():
            if all(_setting(c, each.partition("=")[0]) == each for each in (setting, other)):
                yield f"{setting} does not support {other}; {remedy}"


def _sources(c: Config) -> Iterator[str]:
    task, makes_model = c.data.task, c.warm_start.name == "sft"
    is_sft = c.sft.name == "demonstrations"
    if c.sft.name == "demonstrations" and not c.sft.train_files:
        yield "sft.train_files is empty; set sft.train_files=[FILE]"
    for key in ("data.max_train_prompts", "data.sampler"):
        if is_sft and _value(c, key) is not None:
            yield f"<{key}> does not apply to SFT, which trains on all rows; set {key}=null"
    if task.name == "none" and not c.data.train_files and not is_sft:
        yield (
            "data.train_files is empty and data/task=none; set data.train_files=[FILE.parquet], or "
            "data/task=sort_digits"
        )
    if c.model.path is None and not makes_model:
        yield "model.path is null and warm_start=none; set model.path=FOLDER, or warm_start=sft"
    for key in ("model.path", "model.tokenizer"):
        if makes_model and _value(c, key):
            yield f"<{key}> conflicts with <warm_start>; set {key}=null or warm_start=none"
    if makes_model and task.name != "sort_digits":
        yield (
            "warm_start=sft supports data/task=sort_digits only, got <data/task>; choose "
            "data/task=sort_digits, or warm_start=none with a model.path"
        )


def _warm_start(c: Config) -> Iterator[str]:
    """Yield the lines for a model from scratch that the strategy cannot cut."""
    strategy, start = c.trainer.strategy, c.warm_start
    if start.name != "sft":
        return
    for field in ("sequence", "tensor"):
        if start.model.heads % getattr(strategy, field, 1):
            key = f"trainer.strategy.{field}"
            yield f"<{key}> does not divide <warm_start.model.heads>; use a divisor of it"
    if strategy.name != "megatron":
        return
    if strategy.expert > 1:
        yield "<trainer.strategy.expert> needs experts, and warm_start=sft has none; set it to 1"
    if strategy.pipeline > start.model.layers:
        yield (
            "<trainer.strategy.pipeline> is more than <warm_start.model.layers>; set it to "
            f"{start.model.layers} or less"
        )


def _truth_column(c: Config) -> Iterator[str]:
    reward = c.reward
    is_custom = reward.function.path or reward.manager.name in ("remote", "custom")
    if c.data.columns.truth == "none" and not (is_custom or "none" in reward.scorers.values()):
        yield (
            "data.columns.truth=none, but the built-in scorers need a ground truth; set "
            "reward.function.path=FILE.py, 'reward.scorers={*: none}' where a model or a judge "
            "scores, or name the column"
        )


def _group_size(c: Config) -> Iterator[str]:
    """Yield the rules about groups of one answer."""
    if c.rollout.n > 1:
        return
    advantage, rule = c.algorithm.advantage, c.sampling.filter
    if advantage.name == "grpo" and rule.name == "variance":
        yield (
            "rollout.n=1 leaves nothing to compare for sampling/filter=variance and "
            "algorithm/advantage=grpo; set rollout.n to 2 or more, or choose sampling/filter=none"
        )
    if rule.name == "band" and rule.metric == "accuracy" and 0 < rule.low <= rule.high < 1:
        yield (
            "<rollout.n>, <sampling.filter.low> and <sampling.filter.high> let no group pass, as "
            "one answer is right or wrong; set rollout.n to 2 or more, or choose "
            "sampling/filter=none"
        )


def _admission(c: Config) -> Iterator[str]:
    sampling = c.sampling
    staleness, most = sampling.max_staleness, sampling.max_groups_per_step
    if sampling.lookahead > staleness:
        yield (
            "<sampling.lookahead> is more than <sampling.max_staleness>; set lookahead to "
            f"{staleness} or less, or raise max_staleness"
        )
    if most is not None and most < sampling.groups_per_step:
        yield (
            "<sampling.max_groups_per_step> is less than <sampling.groups_per_step>; set it to "
            f"{sampling.groups_per_step} or more, or to null"
        )


def _mode(c: Config) -> Iterator[str]:
    """Yield the rules of the modes that sample and train at the same time."""
    has_engines = "rollout" in Roles(c) or c.rollout.engine.name == "http"
    if c.trainer.mode.name != "sync" and not has_engines:
        yield (
            "<trainer/mode> needs engines in separate processes, got <rollout/engine> and "
            "<rollout.engine.processes>; set rollout.engine.processes=1 or more "
            "(rollout/engine=custom has none), or trainer/mode=sync"
        )


def _updates(c: Config) -> Iterator[str]:
    groups, mini = c.sampling.groups_per_step, c.groups_per_update
    if groups % mini:
        near = [size for size in range(1, groups + 1) if groups % size == 0]
        fitting = min(near, key=lambda size: (abs(size - mini), size))
        yield (
            "<sampling.groups_per_step> is not a multiple of <trainer.mini_batch_groups>; use a "
            f"divisor, such as {fitting}"
        )
    # Fused mode takes `old` from the update's own forward pass, which is the step's only one.
    is_one_update = c.trainer.epochs == 1 and mini == groups
    if c.algorithm.correction.mode == "fused" and not is_one_update:
        yield (
            "algorithm.correction.mode=fused needs one update a step, got <trainer.epochs>, "
            "<trainer.mini_batch_groups> and <sampling.groups_per_step>; set trainer.epochs=1 and "
            "trainer.mini_batch_groups=null, or algorithm.correction.mode=recompute"
        )
    # With a shorter horizon a step could turn the KL's weight negative.
    kl, answers = c.algorithm.kl.reward, groups * c.rollout.n
    if kl.name == "adaptive" and kl.horizon_samples <= 0.2 * answers:
        yield (
            f"<algorithm.kl.reward.horizon_samples> is too short for {answers} answers a step "
            "(<sampling.groups_per_step>, <rollout.n>): the weight could turn negative; set it to "
            f"{answers // 5 + 1} or more, ideally several times {answers}"
        )


def _lengths(c: Config) -> Iterator[str]:
    limit, overlong, cosine = c.rollout.max_response_tokens, c.reward.overlong, c.reward.cosine
    for key, is_used in (
        ("reward.overlong.buffer_tokens", overlong.enabled),
        ("reward.cosine.limit_tokens", cosine.enabled),
    ):
        if is_used and (_value(c, key) or 0) > limit:
            yield f"<{key}> is more than <rollout.max_response_tokens>; set it to at most {limit}"


def _reward(c: Config) -> Iterator[str]:
    """Yield the line for a reward whose weights are all 0; gdpo has weights of its own."""
    weights = c.reward.part_weights()
    gdpo = c.algorithm.advantage.name == "gdpo"
    if c.reward.weights.task == 0 and not any(weights.values()) and not gdpo:
        zeros = " and ".join(f"{key}=0" for key in ("reward.weights.task", *weights))
        none = "" if weights else " and reward/model=none"
        yield f"{zeros}{none} leave no reward to learn from; set a weight to another number"


def _evaluation(c: Config) -> Iterator[str]:
    save, evaluate = c.trainer.save_every, c.evaluation.every
    if c.trainer.keep_best is None:
        return
    eval_files = c.data.eval_files or getattr(c.sft, "eval_files", ())
    if not eval_files and c.data.task.name == "none":
        yield (
            "<trainer.keep_best> needs an evaluation, but data.eval_files is empty; set "
            "data.eval_files=[FILE], or trainer.keep_best=null"
        )
    elif save is None or evaluate is None or evaluate % save:
        yield (
            "<trainer.keep_best> needs a checkpoint at each evaluation, got <trainer.save_every> "
            "and <evaluation.every>; make evaluation.every a multiple of trainer.save_every, or "
            "set trainer.keep_best=null"
        )


def _engine(c: Config) -> Iterator[str]:
    engine, adapter, longest = c.rollout.engine, c.model.adapter, max_sequence_tokens(c)
    if engine.name != "vllm":
        return
    if adapter.name == "lora" and adapter.publish == "adapter" and adapter.rank > VLLM_MAX_RANK:
        yield (
            f"<model.adapter.rank> is above vLLM's maximum, {VLLM_MAX_RANK}; lower it, or set "
            "model.adapter.publish=merged"
        )
    if not engine.chunked_prefill and engine.prefill_tokens < longest:
        yield (
            "<rollout.engine.chunked_prefill> and <rollout.engine.prefill_tokens> cannot resume an "
            f"answer of {longest} tokens, the longest prompt and response; set prefill_tokens to "
            f"{longest} or more, or chunked_prefill=true"
        )
    if c.rollout.routing_replay and not engine.prefix_caching:
        yield (
            "<rollout.routing_replay> with <rollout/engine> needs "
            "rollout.engine.prefix_caching=true; set that to true, or routing_replay to false"
        )


def _placement(c: Config) -> Iterator[str]:
    cluster = c.cluster
    if cluster.name != "ray":
        return
    roles, pools, chosen = Roles(c), cluster.pools, cluster.roles.model_dump()
    if not roles:
        yield (
            "cluster=ray has nothing to place: trainer/strategy=single, in-process engines and "
            "reward.processes=0 use the run's process only; set trainer/strategy=fsdp2, "
            "rollout.engine.processes=1 or cluster=local"
        )
    if cluster.nodes > 1 and pools:
        yield "<cluster.nodes> conflicts with cluster.pools; set nodes of the pool instead"
    elif roles["policy"].count % cluster.nodes:
        yield "<trainer.strategy.ranks> is not a multiple of <cluster.nodes>; use a divisor"
    for role in roles.entries if pools or any(chosen.values()) else ():
        name = role.pool
        slots = pools[name].nodes * pools[name].per_node if name in pools else 0
        needs = role.count * role.slots
        each = f", of {role.slots} slots each" if role.slots > 1 else ""
        if slots != needs or (name and not slots):
            yield (
                f"<cluster.roles.{role.name}> has {slots} slots in cluster.pools, but {role.key} "
                f"is {role.count}{each}; name a pool whose nodes x per_node is {needs} (null for "
                f"0), or change {role.key}"
            )
        elif name and pools[name].per_node % role.slots:
            yield (
                f"cluster.pools.{name}.per_node={pools[name].per_node} splits an engine of "
                f"{role.slots} GPUs over nodes; use a multiple of {role.slots}, or another "
                f"{role.key.replace('processes', 'tensor_parallel')}"
            )
        widths = (each.width for each in roles if name and each.pool == name and each.gpus)
        if role.width % (narrow := min(widths, default=1)):
            yield (
                f"{role.key.replace('processes', 'tensor_parallel')}={role.width} is not a "
                f"multiple of {narrow}, the GPUs of a slot of cluster.pools.{name}; use a "
                f"multiple, or name another pool in cluster.roles.{role.name}"
            )
    for name in [name for name in pools if name not in chosen.values()]:
        yield f"cluster.pools.{name} has no role; name it in cluster.roles, or remove it"


def _sharing(c: Config) -> Iterator[str]:
    """Yield the rules of engines on the GPUs of what trains."""
    if not c.cluster.share_devices or c.rollout.engine.name not in ("torch", "vllm"):
        return
    roles, engine = Roles(c), c.rollout.engine
    engines, ranks = roles["rollout"], roles["policy"].count
    nodes, gpus = getattr(c.cluster, "nodes", 1), ranks or 1
    wide = f"rollout.engine.tensor_parallel={engines.width}"
    key = "<trainer.strategy.ranks>" if ranks else "<trainer/strategy>"
    if getattr(c.cluster, "pools", None):
        yield "<cluster.share_devices> conflicts with cluster.pools; remove one of them"
    elif c.cluster.name == "ray" and not ranks:
        yield (
            "<cluster.share_devices> with cluster=ray needs ranks, got <trainer/strategy>; choose "
            "trainer/strategy=fsdp2, or cluster=local"
        )
    elif gpus % engines.width:
        yield (
            f"{wide} does not divide {key}, whose GPUs engines share (<cluster.share_devices>); "
            "use a divisor"
        )
    elif "rollout" in roles and engines.gpus != gpus:
        yield (
            f"rollout.engine.processes={engines.count} with {wide} needs {engines.gpus} GPUs, but "
            f"{key} has {gpus} to share (<cluster.share_devices>); set processes to "
            f"{gpus // engines.width}, or null"
        )
    elif "rollout" not in roles and ranks:
        yield (
            "<cluster.share_devices> needs engines in separate processes, got "
            "<rollout.engine.processes>; set it to null"
        )
    elif (gpus // nodes) % engines.width:
        yield (
            f"{wide} needs the GPUs of an engine on one node, and {key} on <cluster.nodes> puts "
            f"{gpus // nodes} on each; use a divisor of that"
        )
    unbounded = engine.name == "vllm" and engine.memory_share is None and c.run.device != "cpu"
    if unbounded and c.trainer.mode.name != "sync":
        yield (
            "<cluster.share_devices> with <trainer/mode> keeps engines and ranks in GPU memory at "
            "the same time; set rollout.engine.memory_share, such as 0.4"
        )
