"""The rollout engine of a recipe: in the driver, over worker processes, or over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.config.base import Section
from winnow.config.judge import Judge, SequenceClassifier, scorer_sharding, to_judge_keys
from winnow.config.model import LoraAdapter
from winnow.config.reward import RewardConfig
from winnow.config.roles import Roles, needs_reference
from winnow.config.rollout import (
    CustomEngine,
    HttpEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from winnow.config.root import Config
from winnow.config.rules import max_sequence_tokens
from winnow.config.trainer import Cluster, LocalCluster, TrainerConfig
from winnow.data.tokenizer import make_decoder
from winnow.errors import ConfigError, ModelError
from winnow.models.fetch import local_folder
from winnow.ranks.models import LoadedPolicy
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import Engine, load_custom_engine

if TYPE_CHECKING:
    from torch.nn import Parameter

    from winnow.learning.canary import Canary
    from winnow.workers.group import WorkerGroup

_POSITIONS = 1024
"""Positions of a model whose configuration has no `max_position_embeddings`."""
_HTTP_OPTIONS = {"exact_draws", "slots", "reload_timeout_s", "restart_timeout_s"}
_TORCH_OPTIONS = {"slots", "prefill_tokens", "cache_gib", "memory_share"}
_VLLM_OPTIONS = _TORCH_OPTIONS | {
    *("tensor_parallel", "prefix_caching", "chunked_prefill", "extra")
}


def check_engine_installed(cluster: Cluster, engine: Section, judge: Judge) -> None:
    """Refuse an engine whose package is not installed here; nodes of Ray are not checked.

    Args:
        engine: `rollout.engine`.
        judge: `reward.judge`, whose engine is checked, too.

    Raises:
        ConfigError: vLLM is missing or too old.
    """
    if not isinstance(cluster, LocalCluster):
        return
    from winnow.rollout.vllm.refusals import check_installed

    if isinstance(engine, VllmEngineConfig):
        check_installed()
    if isinstance(getattr(judge, "engine", None), VllmEngineConfig):
        with reword_judge_errors():
            check_installed()


@contextlib.contextmanager
def reword_judge_errors() -> Iterator[None]:
    """Replace `rollout.engine` by `reward.judge.engine` in errors raised within the block."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(to_judge_keys(str(error))) from error


def published_adapter(adapter: Section) -> LoraAdapter | None:
    """Return the adapter that engines receive without its base; None: they get whole weights."""
    if not isinstance(adapter, LoraAdapter) or adapter.publish == "merged":
        return None
    return adapter


def draw_canary(policy: LoadedPolicy, temperature: float) -> Canary:
    """Draw the fixed sequences on which published weights are checked."""
    from winnow.learning.canary import Canary

    model, config = policy.model, policy.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or _POSITIONS
    arguments = policy.vocabulary, positions, model.dtype, temperature
    return Canary.random(*arguments, vision=policy.vision)


def engines_sleep(engine: Section, trainer: TrainerConfig, cluster: Cluster, roles: Roles) -> bool:
    """Return whether engines free their memory while a step is learned."""
    sleep = getattr(engine, "sleep", False)
    if sleep is not None:
        return bool(sleep)
    shares = roles.shares_devices or cluster.share_devices
    return shares and trainer.mode.name == "sync"


def staging_engines(trainer: TrainerConfig, roles: Roles) -> int:
    """Return how many engines may copy an update beside their weights, if memory allows; or 0.

    In other modes than `async` no answer goes on while weights are published; and on shared GPUs
    ranks learn meanwhile, which need the memory.
    """
    stages = trainer.mode.name == "async" and not roles.shares_devices
    return max(roles["rollout"].count, 1) if stages else 0


def engines_share_gpus(roles: Roles) -> bool:
    """Return whether engines are on GPUs of what trains: in its processes, or in its pool."""
    return roles.shares_devices or "rollout" not in roles


def _memory_options(
    config: Config, roles: Roles, policy: LoadedPolicy, trains: bool = True
) -> dict[str, Any]:
    """Return the engine arguments about memory that it shares with the trainer."""
    shares = trains and engines_share_gpus(roles)
    parameters = list(policy.model.parameters())
    return {
        "sleep": engines_sleep(config.rollout.engine, config.trainer, config.cluster, roles),
        "reserved_gib": reserved_gib(config, roles, parameters) if shares else None,
        "staging_engines": staging_engines(config.trainer, roles),
    }


def reserved_gib(config: Config, roles: Roles, policy: Sequence[Parameter]) -> float:
    """Return an upper bound of what learning has yet to allocate on a GPU of an engine that starts.

    These are fp32 masters and AdamW's two moments of all trained weights: an FSDP2 rank holds its
    part of a replica, a Megatron rank its part of all ranks; and nothing where they stay in host
    memory. The run's own process loads critic and reference after the engines, too. Both are taken
    to be as large as the policy.
    """
    strategy = config.trainer.strategy
    critic: Any = config.critic.strategy if "critic" in roles else strategy
    whole, itemsize = sum(p.numel() for p in policy), policy[0].element_size()
    has_critic = config.algorithm.advantage.name == "gae"
    trained = [(sum(p.numel() for p in policy if p.requires_grad), strategy)]
    shares_pool = "critic" not in roles or roles["critic"].pool_name == roles["policy"].pool_name
    if has_critic and shares_pool:
        trained.append((whole, critic))
    on_gpus = [(n, each) for n, each in trained if not getattr(each, "offload", False)]
    total = sum(12 * n * getattr(s, "replicas", 1) / getattr(s, "ranks", 1) for n, s in on_gpus)
    if "policy" not in roles:
        has_reference = needs_reference(config.algorithm) and "reference" not in roles
        total += whole * itemsize * (has_reference + (has_critic and "critic" not in roles))
    return total / 2**30


def make_local_engine(config: Config, policy: LoadedPolicy, trains: bool = True) -> Engine:
    """Make the engine of this process: a user's, or the embedded one over the policy's weights.

    Raises:
        ConfigError: a user's engine cannot be made.
    """
    section = config.rollout.engine
    # A stop string may be a special token, such as a chat template's end of a turn.
    decode = make_decoder(policy.tokenizer, special_tokens=True)
    options: dict[str, Any] = {"decode": decode, "live_updates": not config.run.deterministic}
    if isinstance(section, CustomEngine):
        options["vocab_size"] = policy.vocabulary
        return load_custom_engine(section.path, section.options, model=policy.model, **options)
    if not isinstance(section, TorchEngineConfig | VllmEngineConfig):
        section = TorchEngineConfig()
    longest, routes = max_sequence_tokens(config), config.rollout.routing_replay
    options |= engine_options(section, policy.vocabulary, longest, _TORCH_OPTIONS)
    options |= _memory_options(config, Roles(config), policy, trains)
    return TorchEngine(policy.model, fp32_head=config.model.fp32_head, routes=routes, **options)


def engine_options(
    engine: Section, vocabulary: int, longest: int, names: set[str] = _VLLM_OPTIONS
) -> dict[str, Any]:
    """Return the arguments of torch's or vLLM's engine, from its section.

    Args:
        vocabulary: ids at or beyond it are never drawn.
        longest: most tokens of a prompt and its answer.
        names: fields of the section to pass, where it has them.
    """
    return engine.model_dump(include=names) | {"vocab_size": vocabulary, "longest": longest}


def engine_worker_arguments(
    config: Config, roles: Roles, policy: LoadedPolicy, start: str | None
) -> dict[str, Any]:
    """Return the arguments of an engine worker."""
    from winnow.models.lora import adapter_base, saved_adapter

    base, alone = None, published_adapter(config.model.adapter)
    if isinstance(config.model.adapter, LoraAdapter):
        folder = Path(local_folder(policy.path))
        base = adapter_base(folder, start or config.model.source)
        alone = alone and saved_adapter(folder, alone)
    return {
        "model": base or policy.path,
        "dtype": config.model.dtype,
        "tokenizer": policy.tokenizer_folder if config.rollout.stop else None,
        "trust_remote_code": config.model.trust_remote_code,
        **({} if alone is None else {"adapter": alone}),
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
        **({"routes": True} if config.rollout.routing_replay else {}),
        **engine_options(config.rollout.engine, policy.vocabulary, max_sequence_tokens(config)),
        **_memory_options(config, roles, policy),
    }


def make_engine(
    config: Config,
    policy: LoadedPolicy,
    groups: Mapping[str, Sequence[WorkerGroup]],
    trains: bool = True,
) -> Engine:
    """Make the rollout engine of a recipe: over servers, over worker processes, or in this process.

    Args:
        groups: by role, as `StartWorkers` returns them.
        trains: False where nothing is trained beside an engine in this process.

    Raises:
        ConfigError: the engine cannot be made, or a server does not answer.
    """
    rollout = config.rollout
    if isinstance(section := rollout.engine, HttpEngineConfig):
        from winnow.http.client import read_token
        from winnow.rollout.http.engine import make_http_engine

        canary, folder = draw_canary(policy, rollout.temperature), section.weights_folder
        return make_http_engine(
            section.url,
            read_token(section.token_env, "rollout.engine.token_env"),
            section.timeout_s,
            policy.vocabulary,
            policy.model.config.get_text_config().vocab_size,
            longest=max(max_sequence_tokens(config), *map(len, canary.sequences)),
            decode=make_decoder(policy.tokenizer, special_tokens=True),
            live_updates=not config.run.deterministic,
            prompt=(canary.sequences[0].tolist(), (*canary.images, ())[0]),
            folder=None if folder is None else Path(folder).expanduser().absolute(),
            **section.model_dump(include=_HTTP_OPTIONS),
        )
    if "rollout" not in groups:
        return make_local_engine(config, policy, trains)
    from winnow.rollout.engine_group import EngineGroup, quantum_for
    from winnow.rollout.remote_engine import RemoteEngine

    workers = {RemoteEngine(g, g.call_blocking("call", "")[0]): g for g in groups["rollout"]}
    engines = list(workers)
    if len(engines) == 1:
        return engines[0]
    if config.run.deterministic or not trains:
        quantum = quantum_for(rollout.max_response_tokens)
        return EngineGroup(engines, config.run.deterministic, quantum)
    from winnow.rollout.replacement import ReplacingEngineGroup

    async def restart(engine: RemoteEngine) -> RemoteEngine:
        start = workers.pop(engine).restart
        assert start is not None, "`WorkerGroups` has started it"
        group = await start()
        replacement = RemoteEngine(group, await group.call_rank(0, "call", ""))
        replacement.on_served = engine.on_served
        workers[replacement] = group
        return replacement

    return ReplacingEngineGroup(engines, restart, Roles(config).shares_devices)


def has_separate_weights(engine: Section, roles: Roles | Mapping[str, Any]) -> bool:
    """Return whether the engine has its weights in other processes than the driver.

    Args:
        engine: `rollout.engine`.
        roles: contains `rollout` where engines have processes.
    """
    return isinstance(engine, HttpEngineConfig) or "rollout" in roles


def driver_holds_no_weights(engine: Section, roles: Roles) -> bool:
    """Return whether the policy is trained and sampled in other processes than the driver."""
    return "policy" in roles and has_separate_weights(engine, roles)


def driver_uses_device(
    engine: Section, reward: RewardConfig, cluster: Cluster, roles: Roles
) -> bool:
    """Return whether the driver runs a model on a GPU, if there is one.

    A reward model in the driver does so on this machine; on Ray, GPUs belong to actors.
    """
    scores = isinstance(reward.model, SequenceClassifier) and not reward.processes
    scores = scores and scorer_sharding(reward.model) is None
    is_local = isinstance(cluster, LocalCluster)
    return not driver_holds_no_weights(engine, roles) or (scores and is_local)
