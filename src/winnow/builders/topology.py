"""Engine, learner and scoring of a run, placed in its own process or in others.

The learning side is in the run's process, or sharded over ranks; answers are written by an engine
in the run's process, or by several in processes of their own. Where neither is in the run's
process, it holds no weights. What scores is in the run's process, or whole in each of several; a
reward model may be sharded over ranks of its own, which the run's process asks.
Processes are started on this machine or on a Ray cluster, as `Roles` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from winnow.builders.engines import (
    _sleeps,
    adapter_alone,
    canary_of,
    engine_of,
    has_own_weights,
)
from winnow.builders.placement import (
    devices_of,
)
from winnow.builders.processes import StartWorkers
from winnow.builders.rewards import make_rewards, scoring_models
from winnow.checkpoints.checkpoint import this_machine
from winnow.checkpoints.run_state import LocalModelStates, ModelStates
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron
from winnow.learning.learner import AnyLearner
from winnow.models.causal_lm import model_writer
from winnow.models.folders import has_adapter
from winnow.ranks.learner import make_learner
from winnow.ranks.models import LoadedPolicy
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import Engine
from winnow.rollout.weights import WeightUpdate
from winnow.run.loop import PublishedWeights, SharedWeights
from winnow.run.step_metrics import Passes

if TYPE_CHECKING:
    from winnow.workers.group import WorkerGroup


@dataclass(frozen=True)
class Topology:
    """Engine and learner of a run, wherever they are."""

    engine: Engine
    learner: AnyLearner
    tensors: ModelStates
    publish: SharedWeights | PublishedWeights
    passes: Passes
    machine: Mapping[str, str | int]
    """Facts that the bits of the learning side depend on beside the recipe."""
    devices: int
    """Devices of learning and sampling."""


def placed_rewards(
    config: Config,
    roles: Roles,
    policy: LoadedPolicy,
    start_workers: StartWorkers,
    training: bool = True,
) -> Rewards:
    """Make what scores, in processes of its own where it has any; close it.

    Args:
        training: as for `make_rewards`.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
        WinnowError: a process cannot be started.
    """
    if not config.reward.processes:  # what is wrong with them is told before others start
        (ranks,) = start_workers()["reward_model"] if "reward_model" in roles else (None,)
        judges = (lambda: start_workers()["judge"]) if "judge" in roles else None
        return make_rewards(config, policy.device, policy.decode, training, ranks, judges)
    from winnow.rewards.remote_pipeline import RemotePipeline

    (group,) = start_workers()["reward"]
    return Rewards(config.reward, RemotePipeline(group), scoring_models(config.reward))


def placed_models(
    config: Config,
    roles: Roles,
    policy: LoadedPolicy,
    start: str | None,
    start_workers: StartWorkers,
) -> Topology:
    """Build engine and learner, in processes of their own where they have any.

    Args:
        start: as for `worker_processes`.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a process cannot be started.
    """
    groups = start_workers()
    placed = _placed(config, roles, policy, start, groups)
    reference, critic = (groups.get(role, (None,))[0] for role in ("reference", "critic"))
    if reference is None and critic is None:
        return placed
    from winnow.ranks.remote import AssistedLearner

    both = AssistedLearner(placed.learner, placed.tensors, reference, critic)
    placed = replace(placed, learner=both, tensors=both)
    for role, ranks in (("reference", reference), ("critic", critic)):
        if ranks is not None:
            placed = replace(placed, machine={**placed.machine, f"ranks of the {role}": ranks.size})
    if critic is None:
        return placed
    return replace(placed, passes=replace(placed.passes, **critic.ask("passes")[0]))


def _placed(
    config: Config,
    roles: Roles,
    policy: LoadedPolicy,
    start: str | None,
    groups: Mapping[str, Sequence[WorkerGroup]],
) -> Topology:
    """Build engine and learner, without what the learner is given from elsewhere."""
    has_weights, engine = has_own_weights(config, groups), engine_of(config, policy, groups)
    if "policy" not in groups:
        return _local_learning(config, roles, policy, start, engine)
    from winnow.ranks.remote import RemoteLearner

    (ranks,) = groups["policy"]
    learner = RemoteLearner(ranks)
    weights = learner.weights if has_weights else learner.trained
    if has_weights and adapter_alone(config) is not None:
        weights = learner.adapter
    return Topology(
        engine=engine,
        learner=learner,
        tensors=learner,
        publish=PublishedWeights(
            engine, weights, canary_of(config, policy), learner.canary, _sleeps(config)
        ),
        passes=learner.facts.passes,
        machine={**learner.facts.machine, "ranks": ranks.size, **_layout_facts(config)},
        devices=devices_of(roles, config.cluster, ranks.size),
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


def _local_learning(
    config: Config, roles: Roles, policy: LoadedPolicy, start: str | None, engine: Engine
) -> Topology:
    """Build a learner in this process; an engine that is apart has weights of its own."""
    learning = make_learner(config, policy.model, policy.vocabulary, start)
    writer = model_writer
    if has_adapter(policy.model):
        from winnow.models.lora import adapter_writer as writer

    strategy = learning.policy
    publish: SharedWeights | PublishedWeights = SharedWeights(engine)
    if has_own_weights(config, roles):
        is_alone = adapter_alone(config) is not None
        publish = PublishedWeights(
            engine,
            lambda version: WeightUpdate(version, strategy.export_weights(adapter_only=is_alone)),
            canary_of(config, policy),
            lambda canary: canary.score(strategy),
            _sleeps(config),
        )
    return Topology(
        engine=engine,
        learner=learning.learner,
        tensors=LocalModelStates(strategy, learning.others, writer(policy.model, policy.tokenizer)),
        publish=publish,
        passes=learning.passes,
        machine=this_machine(policy.device),
        devices=devices_of(roles, config.cluster, 1),
    )
