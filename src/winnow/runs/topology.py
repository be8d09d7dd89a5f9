"""Engine, learner and scoring of a run, placed in its own process or in others.

The learning side is in the run's process, or sharded over ranks; answers are written by an engine
in the run's process, or by several in processes of their own. Where neither is in the run's
process, it holds no weights. What scores is in the run's process, or whole in each of several; a
reward model may be sharded over ranks of its own, which the run's process asks.
Processes are started on this machine or on a Ray cluster, as `Roles` says.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.config.judge import SequenceClassifier, engines_of, sharding_of
from winnow.config.model import LoraAdapter
from winnow.config.roles import Role, Roles
from winnow.config.rollout import (
    CustomEngine,
    HttpEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from winnow.config.root import Config
from winnow.config.rules import longest_tokens
from winnow.config.trainer import Fsdp2, LocalCluster, Megatron, RayCluster
from winnow.data.tokenizer import decoder
from winnow.learning.learner import AnyLearner
from winnow.models.causal_lm import has_adapter, model_writer
from winnow.models.fetch import MODEL_CACHE, local_folder
from winnow.observe.profile import nsight_of, profiler_of
from winnow.rewards.pipeline import Rewards
from winnow.rollout.engine import Engine, WeightUpdate, load_custom_engine
from winnow.rollout.torch_engine import TorchEngine
from winnow.runs.build_learner import make_learner
from winnow.runs.checkpoint import this_machine
from winnow.runs.loading import Policies
from winnow.runs.loop import Sending, Sharing
from winnow.runs.metrics import Passes
from winnow.runs.placement import (
    allocator_variables,
    devices_of,
    local_devices,
    pools_of,
    runtime_env_of,
    visible_devices,
)
from winnow.runs.rewarding import asked_models, make_rewards
from winnow.runs.state import LocalTensors, Tensors

if TYPE_CHECKING:
    from winnow.learning.canary import Canary
    from winnow.rollout.http_engine import HttpEngine
    from winnow.workers.group import Starting, WorkerGroup, WorkerGroups

WorkerProcesses = Callable[[], Mapping[str, Sequence["WorkerGroup"]]]
"""Starts a run's other processes at the first call, side by side, with their models loaded; returns
the groups of each role. Each engine is a group: one may die and leave the others."""
Launch = Callable[[Role, Mapping[str, Any], int], "Starting"]
"""Starts a group: its role, the arguments of its workers' class, and which engine it is."""
_POSITIONS = 1024
"""The number of positions of a model that does not say how many it has."""


@dataclass(frozen=True)
class Topology:
    """Engine and learner of a run, wherever they are."""

    engine: Engine
    learner: AnyLearner
    tensors: Tensors
    publish: Sharing | Sending
    passes: Passes
    machine: Mapping[str, str | int]
    """Facts that the bits of the learning side depend on beside the recipe."""
    devices: int
    """Devices of learning and sampling."""


@contextlib.contextmanager
def other_processes(
    config: Config, policy: Policies, start: str | None
) -> Iterator[WorkerProcesses]:
    """Prepare for the processes that a recipe asks for; they end with the block.

    Args:
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: there is no room for them.
    """
    roles = Roles(config)
    if not roles:
        yield dict
        return
    from winnow.workers.group import WorkerGroups

    worker_arguments: dict[str, Any] = {
        "config": config,
        "tokenizer": policy.tokenizer_folder,
        "path": policy.path,
        "start": start,
        "vocabulary": policy.vocabulary,
    }
    engine = _engine_arguments(config, policy, start) if "rollout" in roles else {}
    # Who learns comes last.
    starts = sorted(roles, key=lambda role: (role.kind != "engines", role.name == "policy"))
    numbered = [(r, i) for r in starts for i in range(r.count if r.kind == "engines" else 1)]
    trains = "policy" in roles or policy.device.type != "cpu"

    def arguments(role: Role, number: int) -> dict[str, Any]:
        if role.name != "rollout":
            return {name: worker_arguments[name] for name in role.arguments}
        profiler = profiler_of(config, "engine", number)
        return engine if profiler is None else {**engine, "profiler": profiler}

    with (
        contextlib.closing(WorkerGroups()) as groups,
        launcher(config, roles, groups, trains) as launch,
    ):

        @functools.cache
        def started() -> dict[str, list[WorkerGroup]]:
            starting = (launch(role, arguments(role, number), number) for role, number in numbered)
            found = list(zip(numbered, groups.start(*starting), strict=True))
            return {role.name: [group for (of, _), group in found if of is role] for role in starts}

        yield started


@contextlib.contextmanager
def launcher(
    config: Config, roles: Roles, groups: WorkerGroups, trains: bool = True
) -> Iterator[Launch]:
    """Prepare this machine or the cluster for a recipe's processes, and yield what starts them.

    Args:
        trains: as for `local_devices`.

    Raises:
        ConfigError: machine or cluster are too small, or Ray is not installed.
        WinnowError: it cannot be reached.
    """
    threads, cluster = config.run.threads, config.cluster
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    stall_timeout_s = config.trainer.stall_timeout_s
    if not isinstance(cluster, RayCluster):
        from winnow.workers.group import start_local

        devices = local_devices(roles, config.run.device, trains)

        def start_here(role: Role, arguments: Mapping[str, Any], number: int) -> Starting:
            size, own = role.count, devices.get(role.name)
            variables = environment | allocator_variables(role, bool(own), {})
            if role.kind == "engines":
                size, own = 1, own and own[number * role.width : (number + 1) * role.width]
                if own and role.is_vllm:
                    variables, own = environment | visible_devices(own), range(1)
            made = role.group_name(number), role.worker, arguments, size
            return start_local(*made, variables, stall_timeout_s, own)

        yield start_here
        return
    from winnow.workers.ray.group import start_ray
    from winnow.workers.ray.session import offers, ray_session, reserve, write_timeline

    if config.model.cache_dir is not None:  # of each node; processes here inherit it
        environment[MODEL_CACHE] = config.model.cache_dir
    variables = environment | cluster.environment | cluster.runtime_env.env_vars
    with ray_session(
        cluster.address,
        cpus=cluster.init.num_cpus,
        store_bytes=cluster.init.object_store_mb << 20,
        temp_dir=cluster.init.temp_dir,
        runtime_env=runtime_env_of(cluster, Path(config.run.dir)),
        has_timeline=cluster.timeline_file is not None,
    ):
        # Not what this process sees: it may be on a node without, or kept from them.
        has_devices = any(node["GPU"] for node in offers().values())
        has_devices = {"auto": has_devices, "cpu": False, "cuda": True}[config.run.device]
        reserved = groups.wait(reserve(pools_of(roles, cluster, has_devices)))

        def start_there(role: Role, arguments: Mapping[str, Any], number: int) -> Starting:
            place = reserved.placement(role.name, number if role.kind == "engines" else None)
            made = role.group_name(number), role.worker, arguments, place
            on_device = place.share.get("GPU", 0) > 0
            own = variables | allocator_variables(role, on_device, variables)
            return start_ray(*made, own, stall_timeout_s, nsight_of(config, role.name))

        try:
            yield start_there
        finally:
            if cluster.timeline_file is not None:  # what is killed tells nothing any more
                write_timeline(Path(cluster.timeline_file))
            groups.close()  # before Ray, which would take the actors for dead
            reserved.release()


def check_engine(config: Config) -> None:
    """Refuse an engine that is not installed, before anything begins; nodes of Ray may differ.

    Raises:
        ConfigError: vLLM is absent, or too old.
    """
    if not isinstance(config.cluster, LocalCluster):
        return
    if isinstance(config.rollout.engine, VllmEngineConfig):
        from winnow.rollout.vllm_start import check_installed

        check_installed()
    if isinstance(engines_of(config.reward.judge), VllmEngineConfig):
        from winnow.runs.judge_engines import check_judge_engine

        check_judge_engine()


def placed_rewards(
    config: Config, policy: Policies, others: WorkerProcesses, training: bool = True
) -> Rewards:
    """Make what scores, in processes of its own where it has any; close it.

    Args:
        training: as for `make_rewards`.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
        WinnowError: a process cannot be started.
    """
    if not config.reward.processes:  # what is wrong with them is told before others start
        roles = Roles(config)
        (ranks,) = others()["reward_model"] if "reward_model" in roles else (None,)
        judges = (lambda: others()["judge"]) if "judge" in roles else None
        return make_rewards(config, policy.device, policy.decode, training, ranks, judges)
    from winnow.rewards.remote_pipeline import RemotePipeline

    (group,) = others()["reward"]
    return Rewards(config.reward, RemotePipeline(group), asked_models(config.reward))


def placed_models(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses
) -> Topology:
    """Build engine and learner, in processes of their own where they have any.

    Args:
        start: as for `other_processes`.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    groups = others()
    placed = _placed(config, policy, start, groups)
    if "critic" in groups:
        from winnow.runs.critic_ranks import WithCritic

        (ranks,) = groups["critic"]
        both = WithCritic(placed.learner, placed.tensors, ranks)
        machine = {**placed.machine, "ranks of the critic": ranks.size}
        passes = replace(placed.passes, **ranks.ask("passes")[0])
        placed = replace(placed, learner=both, tensors=both, machine=machine, passes=passes)
    if "reference" not in groups:
        return placed
    from winnow.runs.reference_ranks import WithReference

    (ranks,) = groups["reference"]
    machine = {**placed.machine, "ranks of the reference": ranks.size}
    return replace(placed, learner=WithReference(placed.learner, ranks), machine=machine)


def _placed(
    config: Config,
    policy: Policies,
    start: str | None,
    groups: Mapping[str, Sequence[WorkerGroup]],
) -> Topology:
    """Build engine and learner, without what the learner is given from elsewhere."""
    is_apart, engine = has_engines_apart(config), engine_of(config, policy, groups)
    if "policy" not in groups:
        return _learning_here(config, policy, start, engine, is_apart)
    from winnow.runs.remote_learner import RemoteLearner

    (ranks,) = groups["policy"]
    learner = RemoteLearner(ranks)
    weights = learner.weights if is_apart else learner.trained
    if is_apart and adapter_alone(config) is not None:
        weights = learner.adapter
    return Topology(
        engine=engine,
        learner=learner,
        tensors=learner,
        publish=Sending(
            engine, weights, canary_of(config, policy), learner.canary, _sleeps(config)
        ),
        passes=learner.facts.passes,
        machine={**learner.facts.machine, "ranks": ranks.size, **_layout_facts(config)},
        devices=devices_of(Roles(config), config.cluster, ranks.size),
    )


def _layout_facts(config: Config) -> dict[str, str | int]:
    """Return what bits depend on of how the ranks hold the models."""
    strategy = config.trainer.strategy
    if isinstance(strategy, Megatron):
        return {
            "strategy": strategy.name,
            "tensor-parallel ranks": strategy.tensor,
            "stages": strategy.pipeline,
            "expert-parallel ranks": strategy.expert,
            "sequence_parallel": strategy.sequence_parallel,
        }
    assert isinstance(strategy, Fsdp2)
    return {"strategy": strategy.name, "ranks a sequence": strategy.sequence}


def _learning_here(
    config: Config, policy: Policies, start: str | None, engine: Engine, is_apart: bool
) -> Topology:
    """Build a learner in this process; an engine that is apart has weights of its own."""
    learning = make_learner(config, policy.model, policy.vocabulary, start)
    writer = model_writer
    if has_adapter(policy.model):
        from winnow.models.lora import adapter_writer as writer

    own = learning.policy
    publish: Sharing | Sending = Sharing(engine)
    if is_apart:
        is_alone = adapter_alone(config) is not None
        publish = Sending(
            engine,
            lambda version: WeightUpdate(version, own.export_weights(adapter_only=is_alone)),
            canary_of(config, policy),
            lambda canary: canary.expected(own),
            _sleeps(config),
        )
    return Topology(
        engine=engine,
        learner=learning.learner,
        tensors=LocalTensors(own, learning.others, writer(policy.model, policy.tokenizer)),
        publish=publish,
        passes=learning.passes,
        machine=this_machine(policy.device),
        devices=devices_of(Roles(config), config.cluster, 1),
    )


def adapter_alone(config: Config) -> LoraAdapter | None:
    """Return the adapter that engines apart get alone; None where they get whole weights."""
    adapter = config.model.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.publish == "merged":
        return None
    return adapter


def _sleeps(config: Config) -> bool:
    engine = config.rollout.engine
    return isinstance(engine, VllmEngineConfig) and engine.sleep


def canary_of(config: Config, policy: Policies) -> Canary:
    """Draw the sequences that publications are checked with."""
    from winnow.learning.canary import Canary

    return Canary.drawn(
        policy.vocabulary,
        getattr(policy.model.config, "max_position_embeddings", None) or _POSITIONS,
        policy.model.dtype,
        config.rollout.temperature,
    )


def make_engine(config: Config, policy: Policies) -> Engine:
    """Make the engine of this process: the embedded one over the policy's weights, or a user's.

    Raises:
        ConfigError: a user's engine cannot be made.
    """
    section = config.rollout.engine
    # A stop string may be a special token, such as a chat template's end of a turn.
    decode = decoder(policy.tokenizer, special_tokens=True)
    if isinstance(section, CustomEngine):
        live = not config.run.deterministic
        given = {"vocab_size": policy.vocabulary, "decode": decode, "live_updates": live}
        return load_custom_engine(section.path, section.options, model=policy.model, **given)
    return TorchEngine(policy.model, decode=decode, **_engine_options(config, policy))


def http_engine(config: Config, policy: Policies) -> HttpEngine:
    """Make the engine over a recipe's servers.

    Raises:
        ConfigError: one of them does not answer, or does not offer what is needed.
    """
    from winnow.http.client import token_of
    from winnow.rollout.http_engine import make_http_engine

    section = config.rollout.engine
    assert isinstance(section, HttpEngineConfig)
    folder = section.weights_folder
    return make_http_engine(
        section.url,
        token_of(section.token_env, "rollout.engine.token_env"),
        section.timeout_s,
        policy.vocabulary,
        policy.model.config.vocab_size,
        max(longest_tokens(config), *map(len, canary_of(config, policy).sequences)),
        exact_draws=section.exact_draws,
        slots=section.slots,
        decode=decoder(policy.tokenizer, special_tokens=True),
        live_updates=not config.run.deterministic,
        folder=None if folder is None else Path(folder).expanduser().absolute(),
        reload_timeout_s=section.reload_timeout_s,
        restart_timeout_s=section.restart_timeout_s,
    )


def _engine_options(config: Config, policy: Policies) -> dict[str, Any]:
    engine = config.rollout.engine
    if not isinstance(engine, TorchEngineConfig | VllmEngineConfig):
        engine = TorchEngineConfig()
    return {
        "slots": engine.slots,
        "prefill_tokens": engine.prefill_tokens,
        "vocab_size": policy.vocabulary,
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
        "longest": longest_tokens(config),
        "cache_gib": engine.cache_gib,
        **({"routes": True} if config.rollout.routing_replay else {}),
    }


def _engine_arguments(config: Config, policy: Policies, start: str | None) -> dict[str, Any]:
    """Return the arguments of an engine in a process of its own."""
    from winnow.models.lora import adapter_base, saved_adapter

    base, alone = None, adapter_alone(config)
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
        **_engine_options(config, policy),
        **_vllm_options(config),
    }


def _vllm_options(config: Config) -> dict[str, Any]:
    """Return the arguments that vLLM's worker has beyond the embedded engine's."""
    engine = config.rollout.engine
    if not isinstance(engine, VllmEngineConfig):
        return {}
    names = {"tensor_parallel", "prefix_caching", "chunked_prefill", "sleep", "extra"}
    return engine.model_dump(include=names)


def engine_of(
    config: Config, policy: Policies, others: Mapping[str, Sequence[WorkerGroup]]
) -> Engine:
    """Make the engine over a recipe's processes or servers, or in this process.

    Args:
        others: as `WorkerProcesses` returns them.

    Raises:
        ConfigError: as `make_engine` and `http_engine` raise it.
    """
    if not has_engines_apart(config):
        return make_engine(config, policy)
    groups = others.get("rollout")
    if not groups:
        return http_engine(config, policy)
    from winnow.rollout.engine_group import EngineGroup, quantum_for
    from winnow.rollout.remote_engine import RemoteEngine

    engines = [RemoteEngine(group, group.ask("ask", "")[0]) for group in groups]
    if len(engines) == 1:
        return engines[0]
    quantum = quantum_for(config.rollout.max_response_tokens)
    return EngineGroup(engines, config.run.deterministic, quantum)


def has_engines_apart(config: Config) -> bool:
    """Return whether answers are written with other weights than those of the run's process."""
    is_http = isinstance(config.rollout.engine, HttpEngineConfig)
    return is_http or "rollout" in Roles(config)


def holds_no_weights(config: Config) -> bool:
    """Return whether other processes train the policy and write its answers."""
    return "policy" in Roles(config) and has_engines_apart(config)


def uses_device(config: Config) -> bool:
    """Return whether the run's own process computes with a model where there is a GPU.

    A reward model in it does so on this machine; on Ray, GPUs belong to actors.
    """
    judges = isinstance(config.reward.model, SequenceClassifier) and not config.reward.processes
    judges = judges and sharding_of(config.reward.model) is None
    return not holds_no_weights(config) or (judges and isinstance(config.cluster, LocalCluster))
