"""Engine, learner and scoring of a run, placed in its own process or in others.

The learning side is in the run's process, or sharded over ranks; answers are written by an engine
in the run's process, or by several in processes of their own. Where neither is in the run's
process, it holds no weights. What scores is in the run's process, or whole in each of several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winnow.config.judge import SequenceClassifier
from winnow.config.rollout import CustomEngine, TorchEngineConfig
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.trainer import LocalCluster
from winnow.data.tokenizer import decoder
from winnow.learning.learner import AnyLearner
from winnow.models.causal_lm import has_adapter, model_writer
from winnow.rewards.pipeline import Rewards
from winnow.rollout.engine import Engine, WeightUpdate, load_custom_engine
from winnow.rollout.torch_engine import TorchEngine
from winnow.runs.build_learner import make_learner
from winnow.runs.checkpoint import this_machine
from winnow.runs.loading import Policies
from winnow.runs.loop import Publish, Sharing
from winnow.runs.metrics import Passes
from winnow.runs.model_factory import LocalModels
from winnow.runs.rewarding import asked_models, make_rewards
from winnow.runs.state import LocalTensors, Tensors

if TYPE_CHECKING:
    from winnow.learning.canary import Canary
    from winnow.runs.launch import Launch
    from winnow.workers.group import ThreadsafeGroup, WorkerGroups


@dataclass(frozen=True)
class Topology:
    """Engine and learner of a run, wherever they are."""

    engine: Engine
    learner: AnyLearner
    tensors: Tensors
    publish: Publish
    passes: Passes
    device: torch.device
    """This process's."""
    machine: Mapping[str, str | int]
    """Facts that the bits of the learning side depend on beside the recipe."""
    ranks: int
    notes: tuple[str, ...]
    """Lines for the user before it starts."""


class WorkerProcesses:
    """Processes of a run beside its own, all started side by side when one is wanted.

    Args:
        groups: the loop that serves them.
        launch: starts a group.
    """

    rewards: ThreadsafeGroup | None = None
    ranks: ThreadsafeGroup | None = None
    engines: Sequence[ThreadsafeGroup] = ()
    """Each a group: one may die and leave the others."""

    def __init__(self, groups: WorkerGroups, launch: Launch) -> None:
        self._groups, self._launch = groups, launch
        self._is_started = False

    def start(self, config: Config, policy: Policies, start: str | None) -> None:
        """Start those of a recipe and load their models; a second time does nothing.

        Raises:
            WinnowError: one cannot be started.
        """
        if self._is_started:
            return
        self._is_started = True
        common = {"config": config, "tokenizer": policy.tokenizer_folder}
        rank = {**common, "path": policy.path, "start": start, "vocabulary": policy.vocabulary}
        roles = ["rollout"] * config.rollout.engine.processes
        roles += ["reward"] * bool(config.reward.processes) + ["policy"] * bool(ranks_of(config))
        engine = _engine_arguments(config, policy, start) if "rollout" in roles else {}
        made = {"rollout": engine, "reward": common, "policy": rank}
        found = self._groups.start(
            *(self._launch(role, made[role], number) for number, role in enumerate(roles))
        )
        self.engines = found[: config.rollout.engine.processes]
        others = dict(zip(roles, found, strict=True))
        self.rewards, self.ranks = others.get("reward"), others.get("policy")


@contextlib.contextmanager
def other_processes(config: Config) -> Iterator[WorkerProcesses | None]:
    """Prepare for the processes that a recipe asks for, if it does; they end with the block.

    Raises:
        WinnowError: there is no room for them.
    """
    if not any(workers_of(config).values()):
        yield None
        return
    from winnow.runs.launch import launcher
    from winnow.workers.group import WorkerGroups

    with contextlib.closing(WorkerGroups()) as groups, launcher(config, groups) as launch:
        yield WorkerProcesses(groups, launch)


def placed_rewards(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses | None
) -> Rewards:
    """Make what scores, in processes of its own where it has any; close it.

    Args:
        start: as for `placed_models`.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
        WinnowError: a process cannot be started.
    """
    if others is None or not config.reward.processes:
        return make_rewards(config, policy.device, policy.decode)
    from winnow.rewards.remote_pipeline import RemotePipeline

    others.start(config, policy, start)
    assert others.rewards is not None
    return Rewards(config.reward, RemotePipeline(others.rewards), asked_models(config.reward))


def placed_models(
    config: Config, policy: Policies, start: str | None, others: WorkerProcesses | None
) -> Topology:
    """Build engine and learner, in processes of their own where they have any.

    Args:
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    if others is not None:
        others.start(config, policy, start)
    if others is None or not others.engines:
        engine = make_engine(config, policy)
    else:
        engine = _remote_engines(config, others.engines)
    if others is None or others.ranks is None:
        return _learning_here(config, policy, start, engine)
    from winnow.runs.publishing import Sending
    from winnow.runs.remote_learner import RemoteLearner, RemoteSnapshots

    learner = RemoteLearner(others.ranks)
    weights = learner.weights if others.engines else learner.trained
    return Topology(
        engine=engine,
        learner=learner,
        tensors=RemoteSnapshots(learner),
        publish=Sending(engine, weights, _canary(config, policy), learner.canary),
        passes=learner.facts.passes,
        device=policy.device,
        machine={**learner.facts.machine, "ranks": ranks_of(config)},
        ranks=ranks_of(config),
        notes=learner.facts.notes,
    )


def _learning_here(config: Config, policy: Policies, start: str | None, engine: Engine) -> Topology:
    """Build a learner in this process."""
    learning = make_learner(config, LocalModels(config, policy.model, policy.vocabulary), start)
    writer = model_writer
    if has_adapter(policy.model):
        from winnow.models.lora import adapter_writer as writer

    own = learning.policy
    publish: Publish = Sharing(engine)
    if config.rollout.engine.processes:  # the engine has weights of its own
        from winnow.runs.publishing import Sending

        publish = Sending(
            engine,
            lambda version: WeightUpdate(version, own.export_weights()),
            _canary(config, policy),
            lambda canary: canary.expected(own),
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


def _canary(config: Config, policy: Policies) -> Canary:
    from winnow.learning.canary import Canary

    return Canary.drawn(
        policy.vocabulary,
        getattr(policy.model.config, "max_position_embeddings", None) or _POSITIONS,
        policy.model.dtype,
        config.rollout.temperature,
    )


_POSITIONS = 1024
"""The number of positions of a model that does not say how many it has."""


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


def _engine_options(config: Config, policy: Policies) -> dict[str, Any]:
    engine = config.rollout.engine
    assert isinstance(engine, TorchEngineConfig)
    return {
        "slots": engine.slots,
        "prefill_tokens": engine.prefill_tokens,
        "vocab_size": policy.vocabulary,
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
        "longest": config.data.max_prompt_tokens
        + max(config.rollout.max_response_tokens, config.evaluation.max_response_tokens or 0),
        "cache_gib": engine.cache_gib,
    }


def _engine_arguments(config: Config, policy: Policies, start: str | None) -> dict[str, Any]:
    """Return the arguments of an engine in a process of its own."""
    from winnow.models.lora import adapter_base

    base = adapter_base(Path(policy.path), start or config.model.path)
    return {
        "model": base or policy.path,
        "dtype": config.model.dtype,
        "tokenizer": policy.tokenizer_folder if config.rollout.stop else None,
        "trust_remote_code": config.model.trust_remote_code,
        **_engine_options(config, policy),
    }


def _remote_engines(config: Config, groups: Sequence[ThreadsafeGroup]) -> Engine:
    from winnow.rollout.engine_group import EngineGroup, quantum_for
    from winnow.rollout.remote_engine import RemoteEngine

    engines = [RemoteEngine(group, group.ask("ask", "")[0]) for group in groups]
    if len(engines) == 1:
        return engines[0]
    quantum = quantum_for(config.rollout.max_response_tokens)
    return EngineGroup(engines, config.run.deterministic, quantum)


def ranks_of(config: Config) -> int:
    """Count the processes that train; 0: the run's own does."""
    return workers_of(config)["policy"]


def holds_no_weights(config: Config) -> bool:
    """Return whether other processes train the policy and write its answers."""
    return ranks_of(config) > 0 and config.rollout.engine.processes > 0


def uses_device(config: Config) -> bool:
    """Return whether the run's own process computes with a model where there is a GPU.

    A reward model in it does so on this machine; on Ray, GPUs belong to actors.
    """
    judges = isinstance(config.reward.model, SequenceClassifier) and not config.reward.processes
    return not holds_no_weights(config) or (judges and isinstance(config.cluster, LocalCluster))
