"""Rules across sections: each line names the fields that contradict each other, and the remedy.

Rules within a section stand in the section (`Section.conflicts`). In the texts here `<rollout.n>`
stands for the key with its value: `rollout.n=1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from typing import Any

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.data import DataConfig, Sft
from winnow.config.environment import Environment
from winnow.config.model import ModelConfig, WarmStart
from winnow.config.reward import UNROUTED, RewardConfig
from winnow.config.roles import Roles
from winnow.config.rollout import VLLM_MAX_RANK, RolloutConfig, SamplingConfig
from winnow.config.root import Config, RunConfig
from winnow.config.trainer import CPU_MICROBATCH_TOKENS, Cluster, EvaluationConfig, TrainerConfig
from winnow.errors import ConfigError

Rule = Callable[..., Iterator[str]]
"""Yields a line for each fault. Its parameters are the sections that it depends on, by their names;
`roles` are the recipe's, `longest` is of `max_sequence_tokens`, and `config` is all of it."""
_KEY = re.compile(r"(?<![^ (])<([a-z_./]+)>")


def check_config(config: Config) -> None:
    """Apply every rule across sections.

    Raises:
        ConfigError: a rule is broken; one line each.
    """
    if faults := _apply(RULES, config):
        raise ConfigError("\n".join(faults))


def config_warnings(config: Config) -> list[str]:
    """Return warnings about settings that are legal and unlikely to be meant: a warm-up longer than
    the run, idle ranks or engines, off-policy tokens without a correction."""
    return _apply(WARNINGS, config)


def _apply(rules: Iterable[Rule], config: Config) -> list[str]:
    """Return the lines of rules, with the value of each key in them."""
    arguments = {**dict(config), "config": config, "roles": Roles(config)}
    arguments["longest"] = max_sequence_tokens(config)
    calls = (rule(**{n: arguments[n] for n in signature(rule).parameters}) for rule in rules)
    lines = [line for call in calls for line in call]
    settings = _settings(config, _KEY.findall(" ".join(lines)))
    return [_KEY.sub(lambda match: settings[match[1]], line) for line in lines]


def _settings(config: Config, keys: Iterable[str]) -> dict[str, str]:
    """Return keys with their values, or with the names of variants. Example: `rollout.n=1`."""
    settings = {}
    for key in keys:
        value: Any = config
        for name in re.split(r"[./]", key):
            value = getattr(value, name, None)
        value = getattr(value, "name", value)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        shown = shown.lower() if isinstance(value, bool) else shown
        settings[key] = f"{key}={'null' if value is None else shown}"
    return settings


def max_sequence_tokens(config: Config) -> int:
    """Return the most tokens that an answer has with its prompt, in training and evaluation."""
    evaluated = config.evaluation.max_response_tokens or 0
    return config.data.max_prompt_tokens + max(config.rollout.max_response_tokens, evaluated)


def _correction_warnings(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> Iterator[str]:
    correction = algorithm.correction
    weight, rejection = correction.weight.name, correction.rejection.name
    is_off = (weight, rejection) == ("none", "none") and correction.mode != "bypass"
    if is_off and trainer.mode.name != "sync":
        yield (
            "Warning: <trainer/mode> trains on off-policy tokens without a correction "
            "(algorithm/correction/weight=none and rejection=none); set "
            "algorithm/correction/weight=truncated, as the recipe dapo_one_step_off does"
        )


def _batch_warnings(
    trainer: TrainerConfig, sampling: SamplingConfig, rollout: RolloutConfig, roles: Roles
) -> Iterator[str]:
    """Yield the cost of steps that ranks do not divide; nothing is dropped."""
    strategy = trainer.strategy
    sharing = getattr(strategy, "sequence", 1)
    if strategy.name == "megatron":
        sharing = strategy.model_parallel_ranks
    ranks = roles["policy"].count // sharing
    update = trainer.groups_per_update(sampling.groups_per_step) * rollout.n
    if ranks > update:
        yield (
            f"Warning: an update has {update} answers for {ranks} data-parallel ranks, so "
            f"{ranks - update} idle; raise trainer.mini_batch_groups or sampling.groups_per_step, "
            "or use fewer ranks"
        )


def _microbatch_warnings(
    data: DataConfig, rollout: RolloutConfig, trainer: TrainerConfig, environment: Environment
) -> Iterator[str]:
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if environment.name != "none" and environment.history == "fork":
        longest *= environment.max_turns  # its contexts run together
    tokens = trainer.microbatch_tokens
    if tokens not in (None, CPU_MICROBATCH_TOKENS) and longest > trainer.token_budget:
        yield (
            "Warning: <trainer.microbatch_tokens> is less than the longest prompt and answer "
            f"({longest} tokens), which runs alone and takes the memory of {longest}"
        )


def _warmup_warnings(config: Config) -> Iterator[str]:
    trainer, critic, start = config.trainer, config.critic, config.warm_start
    warmups = [("optim", config.optim.warmup_steps, "trainer", trainer.steps)]
    if config.algorithm.advantage.name == "gae":
        warmups.append(("critic.optim", critic.optim.warmup_steps, "trainer", trainer.steps))
        if critic.warmup_steps >= trainer.steps:
            yield (
                "Warning: <critic.warmup_steps> leaves none of <trainer.steps> for the policy: the "
                f"first {trainer.steps - 1} train the critic only"
            )
    if trainer.mode.name != "sync" and config.sampling.max_staleness == 1:
        yield (
            "<trainer/mode> with <sampling.max_staleness> opens no new groups while a full step "
            "waits for the trainer; 2 keeps the engines busier"
        )
    if start.name == "sft":
        warmups.append(("warm_start", start.warmup_steps, "warm_start", start.steps))
    for at, warmup, run, steps in warmups:
        if warmup > steps:
            yield (
                f"Warning: <{at}.warmup_steps> is more than <{run}.steps>: the learning rate warms "
                f"up over all {steps} steps"
            )


_OVERLAPPED = {
    "sampling.max_staleness=0": "set it to 1, or 2 for busier engines, or trainer/mode=sync",
    "sampling.commit=completion_order": "set it to admission_order, or trainer/mode=sync",
}
_SLEEP = "set rollout.engine.sleep=false"
_WHOLE = "set it to filter or error, as prompts are rendered anew, or environment.history=append"
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
    "environment.history=fork": {
        f"data.overlong_prompts={side}": _WHOLE for side in ("left", "right", "middle")
    },
    "rollout.n=1": {
        "algorithm/advantage=grpo_passk": "set rollout.n to 2 or more",
        "algorithm/advantage=optimal_token_baseline": "set rollout.n to 2 or more",
    },
}
"""The remedy for each two settings that exclude each other."""


def _unsupported(config: Config) -> Iterator[str]:
    texts = {text for setting, others in _UNSUPPORTED.items() for text in (setting, *others)}
    current = {*_settings(config, [text.partition("=")[0] for text in texts]).values()}
    for setting, others in _UNSUPPORTED.items():
        for other, remedy in others.items():
            if {setting, other} <= current:
                yield f"{setting} does not support {other}; {remedy}"


def _sources(
    data: DataConfig, sft: Sft, model: ModelConfig, warm_start: WarmStart
) -> Iterator[str]:
    task, makes_model, is_sft = data.task, warm_start.name == "sft", sft.name == "demonstrations"
    if sft.name == "demonstrations" and not sft.train_files:
        yield "sft.train_files is empty; set sft.train_files=[FILE]"
    choices = {"data.max_train_prompts": data.max_train_prompts, "data.sampler": data.sampler}
    for key, choice in choices.items():
        if is_sft and choice is not None:
            yield f"<{key}> does not apply to SFT, which trains on all rows; set {key}=null"
    if task.name == "none" and not data.train_files and not is_sft:
        yield (
            "data.train_files is empty and data/task=none; set data.train_files=[FILE.parquet], or "
            "data/task=sort_digits"
        )
    if model.path is None and not makes_model:
        yield "model.path is null and warm_start=none; set model.path=FOLDER, or warm_start=sft"
    for key, folder in {"model.path": model.path, "model.tokenizer": model.tokenizer}.items():
        if makes_model and folder:
            yield f"<{key}> conflicts with <warm_start>; set {key}=null or warm_start=none"
    if makes_model and task.name not in ("sort_digits", "calc", "shapes"):
        yield (
            "warm_start=sft supports data/task=sort_digits, calc and shapes only, got <data/task>; "
            "choose data/task=sort_digits, or warm_start=none with a model.path"
        )


def _warm_start(trainer: TrainerConfig, warm_start: WarmStart) -> Iterator[str]:
    """Yield the lines for a model from scratch that the strategy cannot cut."""
    strategy = trainer.strategy
    if warm_start.name != "sft":
        return
    for field in ("sequence", "tensor"):
        if warm_start.model.heads % getattr(strategy, field, 1):
            key = f"trainer.strategy.{field}"
            yield f"<{key}> does not divide <warm_start.model.heads>; use a divisor of it"
    if strategy.name != "megatron":
        return
    if strategy.expert > 1:
        yield "<trainer.strategy.expert> needs experts, and warm_start=sft has none; set it to 1"
    if strategy.pipeline > warm_start.model.layers:
        yield (
            "<trainer.strategy.pipeline> is more than <warm_start.model.layers>; set it to "
            f"{warm_start.model.layers} or less"
        )


def _truth_column(data: DataConfig, reward: RewardConfig) -> Iterator[str]:
    is_custom = reward.function.path or reward.manager.name in UNROUTED
    if data.columns.truth == "none" and not (is_custom or "none" in reward.scorers.values()):
        yield (
            "data.columns.truth=none, but the built-in scorers need a ground truth; set "
            "reward.function.path=FILE.py, 'reward.scorers={*: none}' where a model or a judge "
            "scores, or name the column"
        )


def _group_size(
    rollout: RolloutConfig, sampling: SamplingConfig, algorithm: AlgorithmConfig
) -> Iterator[str]:
    """Yield the rules about groups of one answer."""
    if rollout.n > 1:
        return
    advantage, rule = algorithm.advantage, sampling.filter
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


def _admission(sampling: SamplingConfig) -> Iterator[str]:
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


def _mode(trainer: TrainerConfig, rollout: RolloutConfig, roles: Roles) -> Iterator[str]:
    """Yield the rules of the modes that sample and train at the same time."""
    has_engines = "rollout" in roles or rollout.engine.name == "http"
    if trainer.mode.name != "sync" and not has_engines:
        yield (
            "<trainer/mode> needs engines in separate processes, got <rollout/engine> and "
            "<rollout.engine.processes>; set rollout.engine.processes=1 or more "
            "(rollout/engine=custom has none), or trainer/mode=sync"
        )


def _updates(
    sampling: SamplingConfig,
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
) -> Iterator[str]:
    groups, mini = sampling.groups_per_step, trainer.groups_per_update(sampling.groups_per_step)
    if groups % mini:
        near = [size for size in range(1, groups + 1) if groups % size == 0]
        fitting = min(near, key=lambda size: (abs(size - mini), size))
        yield (
            "<sampling.groups_per_step> is not a multiple of <trainer.mini_batch_groups>; use a "
            f"divisor, such as {fitting}"
        )
    # Fused mode takes `old` from the update's own forward pass, which is the step's only one.
    is_one_update = trainer.epochs == 1 and mini == groups
    if algorithm.correction.mode == "fused" and not is_one_update:
        yield (
            "algorithm.correction.mode=fused needs one update a step, got <trainer.epochs>, "
            "<trainer.mini_batch_groups> and <sampling.groups_per_step>; set trainer.epochs=1 and "
            "trainer.mini_batch_groups=null, or algorithm.correction.mode=recompute"
        )
    # With a shorter horizon a step could turn the KL's weight negative.
    kl, answers = algorithm.kl.reward, groups * rollout.n
    if kl.name == "adaptive" and kl.horizon_samples <= 0.2 * answers:
        yield (
            f"<algorithm.kl.reward.horizon_samples> is too short for {answers} answers a step "
            "(<sampling.groups_per_step>, <rollout.n>): the weight could turn negative; set it to "
            f"{answers // 5 + 1} or more, ideally several times {answers}"
        )


_REUSE_NEEDS = {
    "trainer/mode": ("sync",),
    "trainer/strategy": ("single",),
    "rollout/engine": ("torch",),
    "rollout.engine.processes": ("0", "null"),
    "rollout.top_p": ("1",),
    "rollout.top_k": ("0",),
    "rollout.min_p": ("0",),
    "model.dtype": ("float32",),
    "algorithm/correction/weight": ("none",),
    "algorithm/correction/rejection": ("none",),
}
"""Values, by key, under which the sampler's log-probs are those of the policy before the step."""


def reuse_faults(config: Config) -> list[str]:
    """Return a line for each setting with which `algorithm.correction.mode=reuse` is not exact."""
    return [
        f"algorithm.correction.mode=reuse needs {key}={_REUSE_NEEDS[key][0]}, got {setting}; set "
        "that, or algorithm.correction.mode=recompute"
        for key, setting in _settings(config, _REUSE_NEEDS).items()
        if setting.removeprefix(f"{key}=") not in _REUSE_NEEDS[key]
    ]


def _reuse(config: Config) -> Iterator[str]:
    if config.algorithm.correction.mode == "reuse":
        yield from reuse_faults(config)


def _lengths(rollout: RolloutConfig, reward: RewardConfig) -> Iterator[str]:
    limit, overlong, cosine = rollout.max_response_tokens, reward.overlong, reward.cosine
    for key, tokens in (
        ("reward.overlong.buffer_tokens", overlong.enabled and overlong.buffer_tokens),
        ("reward.cosine.limit_tokens", cosine.enabled and cosine.limit_tokens),
    ):
        if (tokens or 0) > limit:
            yield f"<{key}> is more than <rollout.max_response_tokens>; set it to at most {limit}"


def _reward(
    reward: RewardConfig, algorithm: AlgorithmConfig, environment: Environment
) -> Iterator[str]:
    """Yield the line for a reward whose weights are all 0; gdpo has weights of its own."""
    weights = {"reward.weights.task": reward.weights.task, **reward.part_weights()}
    if environment.name != "none":
        weights["reward.weights.environment"] = reward.weights.environment
        if reward.manager.name == "environment":
            del weights["reward.weights.task"]
    elif reward.manager.name == "environment":
        yield (
            "reward/manager=environment needs an environment, got environment=none; set "
            "environment=custom and environment.path, or reward/manager=auto"
        )
    if not any(weights.values()) and algorithm.advantage.name != "gdpo":
        zeros = " and ".join(f"{key}=0" for key in weights)
        none = "" if len(weights) > 1 else " and reward/model=none"
        yield f"{zeros}{none} leave no reward to learn from; set a weight to another number"


def _evaluation(
    trainer: TrainerConfig, evaluation: EvaluationConfig, data: DataConfig, sft: Sft
) -> Iterator[str]:
    save, evaluate = trainer.save_every, evaluation.every
    if trainer.keep_best is None:
        return
    eval_files = data.eval_files or getattr(sft, "eval_files", ())
    if not eval_files and data.task.name == "none":
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


def _engine(rollout: RolloutConfig, model: ModelConfig, longest: int) -> Iterator[str]:
    engine, adapter = rollout.engine, model.adapter
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
    if rollout.routing_replay and not engine.prefix_caching:
        yield (
            "<rollout.routing_replay> with <rollout/engine> needs "
            "rollout.engine.prefix_caching=true; set that to true, or routing_replay to false"
        )


def _environment(
    environment: Environment, data: DataConfig, rollout: RolloutConfig, sft: Sft
) -> Iterator[str]:
    """Yield what conversations exclude."""
    for is_set, setting, remedy in (
        (data.chat_template == "none", "data.chat_template=none", "set it to auto, or to a file"),
        (rollout.routing_replay, "rollout.routing_replay=true", "set it to false"),
        (rollout.stop, "rollout.stop, whose strings may be in replies", "set rollout.stop=[]"),
        (sft.name != "none", "sft=demonstrations", "set environment=none"),
    ):
        if is_set and environment.name != "none":
            yield f"<environment> does not support {setting}; {remedy}"


def _placement(cluster: Cluster, roles: Roles) -> Iterator[str]:
    if cluster.name != "ray":
        return
    pools, chosen = cluster.pools, cluster.roles.model_dump()
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


def _sharing(
    cluster: Cluster, rollout: RolloutConfig, trainer: TrainerConfig, run: RunConfig, roles: Roles
) -> Iterator[str]:
    """Yield the rules of engines on the GPUs of what trains."""
    if not cluster.share_devices or rollout.engine.name not in ("torch", "vllm"):
        return
    engine = rollout.engine
    engines, ranks = roles["rollout"], roles["policy"].count
    nodes, gpus = getattr(cluster, "nodes", 1), ranks or 1
    wide = f"rollout.engine.tensor_parallel={engines.width}"
    key = "<trainer.strategy.ranks>" if ranks else "<trainer/strategy>"
    if getattr(cluster, "pools", None):
        yield "<cluster.share_devices> conflicts with cluster.pools; remove one of them"
    elif cluster.name == "ray" and not ranks:
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
    unbounded = engine.name == "vllm" and engine.memory_share is None and run.device != "cpu"
    if unbounded and trainer.mode.name != "sync":
        yield (
            "<cluster.share_devices> with <trainer/mode> keeps engines and ranks in GPU memory at "
            "the same time; set rollout.engine.memory_share, such as 0.4"
        )


RULES = (
    *(_sources, _truth_column, _group_size, _admission, _updates, _reuse, _lengths),
    *(_reward, _evaluation, _engine, _environment, _mode, _warm_start, _unsupported),
    *(_placement, _sharing),
)
WARNINGS = _correction_warnings, _batch_warnings, _microbatch_warnings, _warmup_warnings
