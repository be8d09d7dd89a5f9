"""Builds engine, learner and scorers of a run, in the driver or in worker processes.

Learning is in the driver, or sharded over ranks; answers are written by an engine in the driver, or
by several in other processes. If both are elsewhere, the driver holds no weights. Scorers are in
the driver, or whole in each scoring process; a reward model may be sharded over ranks, which the
driver calls. `Roles` says which processes there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from winnow.builders.engines import (
    draw_canary,
    engines_sleep,
    has_separate_weights,
    make_engine,
    published_adapter,
)
from winnow.builders.environments import with_conversations
from winnow.builders.placement import count_devices
from winnow.builders.processes import StartWorkers
from winnow.builders.rewards import make_rewards, scoring_sections
from winnow.checkpoints.checkpoint import describe_machine
from winnow.checkpoints.run_state import LocalModelStates, ModelStates
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron, Strategy
from winnow.learning.learner import AnyLearner
from winnow.models.causal_lm import model_writer
from winnow.models.folders import has_adapter
from winnow.ranks.learner import Learning, make_learner
from winnow.ranks.models import LoadedPolicy
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import Engine
from winnow.rollout.weights import WeightUpdate
from winnow.run.loop import SharedWeightsPublisher, WeightPublisher
from winnow.run.step_metrics import StepFlop

if TYPE_CHECKING:
    from winnow.environments.pool import EnvironmentPool
    from winnow.learning.canary import Canary, CanaryScores
    from winnow.workers.group import WorkerGroup


@dataclass(frozen=True)
class RunModels:
    """Engine and learner of a run, in this process or in others."""

    engine: Engine
    learner: AnyLearner
    model_states: ModelStates
    publish: SharedWeightsPublisher | WeightPublisher
    passes: StepFlop
    machine: Mapping[str, str | int]
    """Facts besides the recipe on which the bits of learning depend."""
    devices: int
    """Number of devices of learning and sampling."""


def build_rewards(
    config: Config,
    roles: Roles,
    policy: LoadedPolicy,
    start_workers: StartWorkers,
    training: bool = True,
) -> Rewards:
    """Make the scorers, in this process or in scoring processes; the caller closes them.

    Args:
        training: as for `make_rewards`.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
        WinnowError: a process cannot be started.
    """
    if not config.reward.processes:  # errors of scorers come before other processes start
        (ranks,) = start_workers()["reward_model"] if "reward_model" in roles else (None,)
        judges = (lambda: start_workers()["judge"]) if "judge" in roles else None
        return make_rewards(config, policy.device, policy.decode, training, ranks, judges)
    from winnow.rewards.remote_pipeline import RemotePipeline

    (group,) = start_workers()["reward"]
    sections, conversations = scoring_sections(config.reward), config.environment.name != "none"
    return Rewards(config.reward, RemotePipeline(group), sections, conversations)


def build_models(
    config: Config,
    roles: Roles,
    policy: LoadedPolicy,
    start: str | None,
    start_workers: StartWorkers,
    environments: EnvironmentPool | None = None,
) -> RunModels:
    """Build engine and learner, in this process or over worker processes.

    Args:
        start: as for `worker_processes`.
        environments: reply to the policy's turns, if answers are conversations.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    groups = start_workers()
    engine = make_engine(config, policy, groups)
    section, adapter = config.rollout.engine, published_adapter(config.model.adapter)
    has_weights = has_separate_weights(section, groups)
    ranks, reference, critic = (
        groups.get(role, (None,))[0] for role in ("policy", "reference", "critic")
    )
    learner: AnyLearner
    states: ModelStates
    if ranks is None:
        learning = make_learner(config, roles, policy.model, policy.vocabulary, start)
        strategy, learner, passes = learning.policy, learning.learner, learning.passes
        states, machine = _local_states(learning, policy), describe_machine(policy.device)

        def scores(canary: Canary) -> CanaryScores:
            return canary.score(strategy)

        def weights(version: int) -> WeightUpdate:
            exported = strategy.export_weights(adapter_only=adapter is not None)
            return WeightUpdate(version, exported)

    else:
        from winnow.ranks.remote import RemoteLearner

        learner = states = remote = RemoteLearner(ranks)
        passes, scores = remote.facts.passes, remote.canary
        machine = {**remote.facts.machine, "ranks": ranks.size}
        machine |= _layout_facts(config.trainer.strategy)
        weights = remote.weights if has_weights else remote.trained
        if has_weights and adapter is not None:
            weights = partial(remote.weights, what="adapter")
    sleeps = engines_sleep(section, config.trainer, config.cluster, roles)
    release = partial(_release_memory, roles, groups) if sleeps else None
    publish: SharedWeightsPublisher | WeightPublisher = SharedWeightsPublisher(engine, release)
    if has_weights or ranks is not None:
        canary = draw_canary(policy, config.rollout.temperature)
        on_checked = getattr(engine, "admit_replacements", dict)
        publish = WeightPublisher(engine, weights, canary, scores, release, on_checked)
    if reference is not None or critic is not None:
        from winnow.ranks.remote import AssistedLearner

        learner = states = AssistedLearner(learner, states, reference, critic)
    for role, group in (("reference", reference), ("critic", critic)):
        machine |= {f"ranks of the {role}": group.size} if group is not None else {}
    if critic is not None:
        passes = replace(passes, **critic.call_blocking("passes")[0])
    devices = count_devices(roles, 1 if ranks is None else ranks.size)
    conversing = with_conversations(config, policy, engine, environments)
    return RunModels(conversing, learner, states, publish, passes, machine, devices)


def _release_memory(roles: Roles, groups: Mapping[str, Sequence[WorkerGroup]]) -> None:
    """Have the policy, and all ranks in the pool of engines, free memory for engines that wake."""
    if "policy" not in roles:
        torch.cuda.empty_cache()  # nothing where this process has no GPU
    pool = roles["rollout"].pool_name
    for role in roles:
        if role.kind == "ranks" and (role.name == "policy" or role.pool_name == pool):
            groups[role.name][0].call_blocking("release_memory")


def _local_states(learning: Learning, policy: LoadedPolicy) -> LocalModelStates:
    """Return the states of models in this process; an adapter is saved without its base."""
    writer = model_writer
    if has_adapter(policy.model):
        from winnow.models.lora import adapter_writer as writer

    save = writer(policy.model, policy.tokenizer)
    return LocalModelStates(learning.policy, learning.others, save)


def _layout_facts(strategy: Strategy) -> dict[str, str | int]:
    """Return facts of the sharding on which bits depend."""
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
