"""Where the parts of a run live that compute: in its own process, or in others.

The learning side is in the run's process, or sharded over ranks; answers are written by an engine
in the run's process, or by several in processes of their own. Where neither is in the run's
process, it holds no weights. What scores is in the run's process, or whole in each of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from winnow.config.judge import SequenceClassifier
from winnow.config.rollout import TorchEngineConfig
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.trainer import LocalCluster
from winnow.data.text import decoder
from winnow.learning.canary import Canary
from winnow.learning.learner import AnyLearner
from winnow.models.causal_lm import model_writer
from winnow.models.lora import adapter_base, adapter_writer, has_adapter
from winnow.rewards.remote_panel import RemotePipeline
from winnow.rewards.service import Rewards
from winnow.rollout.engine import Engine, WeightUpdate
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.router import quantum_for
from winnow.rollout.torch_engine import TorchEngine
from winnow.runs.build_learner import make_learner
from winnow.runs.checkpoint import this_machine
from winnow.runs.launch import Launcher, ranks_of, starter_of
from winnow.runs.loading import Policies
from winnow.runs.loop import Publish
from winnow.runs.metrics import Passes
from winnow.runs.model_factory import LocalModels
from winnow.runs.publishing import Sending, Sharing
from winnow.runs.remote_learner import RemoteLearner, RemoteSnapshots
from winnow.runs.rewarding import asked_models, make_rewards
from winnow.runs.state import LocalTensors, Tensors
from winnow.runs.worker_groups import WorkerGroups
from winnow.workers.protocol import WorkerGroup


@dataclass(frozen=True)
class Topology:
    """What holds models."""

    engine: Engine
    learner: AnyLearner
    tensors: Tensors
    publish: Publish
    passes: Passes
    device: torch.device
    """Of this process."""
    machine: Mapping[str, str | int]
    """What the bits of the learning side depend on beside the recipe."""
    ranks: int
    notes: tuple[str, ...]
    """What the user should know before it starts."""


@dataclass(frozen=True)
class Groups:
    """The processes of a run beside its own; what is in its own is missing."""

    rewards: WorkerGroup | None
    engines: Sequence[WorkerGroup]
    """Each a group: one may die and leave the others."""
    ranks: WorkerGroup | None


class WorkerProcesses:
    """What starts the processes of a run beside its own: all side by side, when one is wanted."""

    def __init__(self, crew: WorkerGroups, starter: Launcher) -> None:
        self.crew = crew
        self._starter = starter
        self._groups: Groups | None = None

    def groups(self, config: Config, policy: Policies, start: str | None) -> Groups:
        """Those of a recipe, with its models loaded.

        Raises:
            WinnowError: one cannot be started.
        """
        if self._groups is None:
            scoring = config.reward.processes > 0
            engines = range(config.rollout.engine.processes)
            starting = []
            if scoring:
                made = {"config": config, "tokenizer": policy.tokenizer_folder}
                starting.append(self._starter.rewards(made))
            if engines:
                made = _engine_arguments(config, policy, start)
                starting += [self._starter.engine(number, made) for number in engines]
            if ranks_of(config):
                made = {"config": config, "path": policy.path, "start": start}
                made |= {"vocabulary": policy.vocabulary, "tokenizer": policy.tokenizer_folder}
                starting.append(self._starter.ranks(made))
            found = self.crew.start(*starting)
            self._groups = Groups(
                found[0] if scoring else None,
                found[scoring : scoring + len(engines)],
                found[-1] if ranks_of(config) else None,
            )
        return self._groups


@contextlib.contextmanager
def other_processes(config: Config) -> Iterator[WorkerProcesses | None]:
    """What starts the processes that a recipe asks for, if it does, and ends them after a block.

    Raises:
        WinnowError: there is no room for them.
    """
    if not any(workers_of(config).values()):
        yield None
        return
    with (
        contextlib.closing(WorkerGroups()) as crew,
        starter_of(config, crew) as starter,
    ):
        yield WorkerProcesses(crew, starter)


def placed_models(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses | None
) -> Topology:
    """Build engine and learner, in processes of their own where they have any.

    Args:
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    if others is None or not (ranks_of(config) or config.rollout.engine.processes):
        return _learning_here(config, policy, start, make_engine(config, policy))
    return _apart(config, policy, start, others)


def placed_rewards(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses | None
) -> Rewards:
    """What scores, in processes of its own where it has any; close it.

    Args:
        start: as for `placed_models`.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
        WinnowError: a process cannot be started.
    """
    if others is None or not config.reward.processes:
        return make_rewards(config, policy.device, policy.decode)
    group = others.groups(config, policy, start).rewards
    assert group is not None
    panel = RemotePipeline(others.crew.reached(group))
    return Rewards(config.reward, panel, asked_models(config.reward))


def _apart(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses
) -> Topology:
    """With a learner, or engines, or both in other processes."""
    groups = others.groups(config, policy, start)
    remote = bool(groups.engines)
    engine: Engine
    if remote:
        engine = _engines(config, others.crew, groups.engines)
    else:
        engine = make_engine(config, policy)
    canary = Canary.drawn(
        policy.vocabulary,
        getattr(policy.model.config, "max_position_embeddings", None) or _POSITIONS,
        policy.model.dtype,
        config.rollout.temperature,
    )
    if groups.ranks is None:
        return _learning_here(config, policy, start, engine, canary)
    ranked = RemoteLearner(others.crew, groups.ranks)
    return Topology(
        engine=engine,
        learner=ranked,
        tensors=RemoteSnapshots(ranked),
        publish=Sending(
            engine, ranked.weights if remote else ranked.trained, canary, ranked.canary
        ),
        passes=ranked.facts.passes,
        device=policy.device,
        machine={**ranked.facts.machine, "ranks": ranks_of(config)},
        ranks=ranks_of(config),
        notes=ranked.facts.notes,
    )


def _learning_here(
    config: Config,
    policy: Policies,
    start: str | None,
    engine: Engine,
    canary: Canary | None = None,
) -> Topology:
    """With a learner in this process; a canary where the engine has weights of its own."""
    learning = make_learner(config, LocalModels(config, policy.model, policy.vocabulary), start)
    writer = adapter_writer if has_adapter(policy.model) else model_writer
    own = learning.policy
    publish: Publish = Sharing(engine)
    if canary is not None:
        publish = Sending(
            engine,
            lambda version: WeightUpdate(version, own.export_weights()),
            canary,
            lambda c: c.expected(own),
        )
    return Topology(
        engine=engine,
        learner=learning.learner,
        tensors=LocalTensors(own, learning.others, writer(policy.model, policy.tokenizer)),
        publish=publish,
        passes=learning.passes,
        device=policy.device,
        machine=this_machine(policy.device),
        ranks=1,
        notes=learning.notes,
    )


_POSITIONS = 1024
"""Where a model does not say how many it has."""


def make_engine(config: Config, policy: Policies) -> TorchEngine:
    """The embedded engine over the policy's own weights."""
    # A stop string may be a special token, such as a chat template's end of a turn.
    decode = decoder(policy.tokenizer, special_tokens=True)
    return TorchEngine(policy.model, decode=decode, **_engine_options(config, policy))


def _engine_options(config: Config, policy: Policies) -> dict[str, Any]:
    engine = config.rollout.engine
    assert isinstance(engine, TorchEngineConfig)
    return {
        "slots": engine.slots,
        "prefill_tokens": engine.prefill_tokens,
        "vocab_size": policy.vocabulary,
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
    }


def _engine_arguments(config: Config, policy: Policies, start: str | None) -> dict[str, Any]:
    """Of an engine in a process of its own."""
    base = adapter_base(Path(policy.path), start or config.model.path)
    return {
        "model": base or policy.path,
        "dtype": config.model.dtype,
        "tokenizer": policy.tokenizer_folder if config.rollout.stop else None,
        "trust_remote_code": config.model.trust_remote_code,
        **_engine_options(config, policy),
    }


def _engines(config: Config, crew: WorkerGroups, groups: Sequence[WorkerGroup]) -> Engine:
    engines = [
        RemoteEngine(crew.reached(group), 0, crew.call(group, "ask", "").status) for group in groups
    ]
    if len(engines) == 1:
        return engines[0]
    quantum = quantum_for(config.rollout.max_response_tokens)
    return EngineGroup(engines, config.run.deterministic, quantum)


def holds_no_weights(config: Config) -> bool:
    """Whether other processes train the policy and write its answers."""
    return ranks_of(config) > 0 and config.rollout.engine.processes > 0


def uses_device(config: Config) -> bool:
    """Whether the run's own process computes with a model where there is a GPU.

    A reward model in it does so on this machine; on Ray, GPUs belong to actors.
    """
    judges = isinstance(config.reward.model, SequenceClassifier) and not config.reward.processes
    return not holds_no_weights(config) or (judges and isinstance(config.cluster, LocalCluster))
