"""The learning side of a run, built from its recipe: roles, their models, what a step computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.algorithm import (
    AdaptiveRewardKl,
    Advantage,
    AlgorithmConfig,
    CorrectionConfig,
    CustomAdvantage,
    CustomPolicyLoss,
    LossKl,
    NoKl,
    NoRejection,
    NoWeight,
)
from winnow.config.data import Demonstrations
from winnow.config.model import ModelConfig, NoAdapter
from winnow.config.roles import Roles, needs_reference
from winnow.config.rollout import RolloutConfig
from winnow.config.root import Config
from winnow.config.rules import reuse_faults
from winnow.config.trainer import Fsdp2, Megatron, OptimConfig, TrainerConfig, WholeModels
from winnow.learning.advantage import AdvantageStage, KlPenalty
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.imitation import Imitator
from winnow.learning.learner import Learner, LearnerSettings, lr_at
from winnow.learning.policy import KlTerm, OldSource, Policy, PolicyObjective
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.models.folders import torch_dtype
from winnow.ranks.models import is_adapter
from winnow.run.step_metrics import AttentionFlop, StepFlop

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from winnow.models.sharded_loading import Hollow


@dataclass(frozen=True)
class Learning:
    """A learner with the strategies it steps."""

    learner: Learner | Imitator
    policy: Strategy
    passes: StepFlop
    """The passes that a step computes."""
    others: dict[str, Strategy] = field(default_factory=dict)
    """By role: what learns beside the policy, and is saved with it."""
    reference: Strategy | None = None
    """The model that KL terms measure from; the policy itself where its adapter is switched off."""


def needs_of(advantage: Advantage) -> frozenset[str]:
    """Return what an estimator asks for beyond rewards; a user's own gets no more."""
    if isinstance(advantage, CustomAdvantage):
        return frozenset()
    return ESTIMATORS[advantage.name].needs


def needs_start(config: Config) -> bool:
    """Return whether a resumed run needs the model that the run began from."""
    return (
        not isinstance(config.model.adapter, NoAdapter)
        or (needs_reference(config.algorithm) and config.reference.path is None)
        or ("values" in needs_of(config.algorithm.advantage) and config.critic.path is None)
    )


def make_learner(
    config: Config,
    roles: Roles,
    model: nn.Module,
    vocabulary: int,
    start: str | None,
    mesh: DeviceMesh | None = None,
    planned: Callable[..., Strategy] | None = None,
) -> Learning:
    """Make all that learns, and the reference: in this process, or this rank's part of it.

    Args:
        model: the policy's, which an engine may share; with a mesh a hollow one.
        vocabulary: ids that the tokenizer has.
        start: folder of the model that the run began with; None where `needs_start` is not.
        mesh: the ranks' devices, over which all models are sharded; each rank reads its own rows
            of their folders.
        planned: makes the strategies of a plan, whose models have shapes and no weights; with a
            mesh.

    Raises:
        ModelError: a model of the recipe cannot be loaded.
    """
    optim, trainer, algorithm = config.optim, config.trainer, config.algorithm
    hold = _hold(trainer, mesh, planned)
    hollow: Hollow = "shapes" if planned else mesh is not None
    readout = readout_options(config.rollout, trainer, config.model, vocabulary)
    stepped = policy_options(config, vocabulary)
    imitates = isinstance(config.sft, Demonstrations)
    if imitates:  # what the data has, no sampler has shaped
        stepped["temperature"] = 1.0
    if config.rollout.routing_replay and not (imitates or planned):
        stepped["replays_routes"] = True
    policy = hold(model, **stepped)
    if imitates:
        rate, skips = _rate(optim, trainer.steps), optim.max_skipped_updates
        imitator = Imitator(policy, trainer.token_budget, rate, skips)
        return Learning(
            imitator, policy, StepFlop(policy.n_active_parameters, epochs=1, forwards=0)
        )
    critic = None
    if "values" in needs_of(algorithm.advantage) and "critic" not in roles:
        critic = make_critic(config, start, policy.device, hollow, hold)
    reference = None
    if needs_reference(algorithm) and "reference" not in roles:
        # With a new adapter, unless another folder is named, the policy's own model without it.
        reference, path = policy, config.reference.path
        if path is not None or isinstance(config.model.adapter, NoAdapter) or is_adapter(start):
            frozen = load_role(load_causal_lm, config, "reference", start, policy.device, hollow)
            reference = hold(frozen.requires_grad_(False), **readout)
    objective = make_objective(config)
    learner = Learner(
        Policy(policy, objective),
        _advantage_stage(algorithm, config.reward.weights.environment),
        make_settings(config),
        reference=reference,
        critic=critic,
        correction=_correction_options(algorithm.correction, recomputed=True),
    )
    passes = StepFlop(
        policy.n_active_parameters,
        trainer.epochs,
        forwards=(objective.old == "pass") + (reference is not None),
        attention=AttentionFlop.of(model.config),
        **(critic_passes(critic.strategy) if critic is not None else {}),
    )
    trained = {} if critic is None else {"critic": critic.strategy}
    return Learning(learner, policy, passes, trained, reference)


def make_critic(
    config: Config,
    start: str | None,
    device: torch.device,
    hollow: Hollow,
    hold: Callable[..., Strategy],
) -> Critic:
    """Make a recipe's critic.

    Args:
        start: as for `make_learner`.
        hold: makes a strategy of its model and options.
    """
    from winnow.models.value import load_value_model

    model = load_role(load_value_model, config, "critic", start, device, hollow)
    return Critic(hold(model, **critic_options(config)), make_value_objective(config))


def policy_options(config: Config, vocabulary: int) -> dict[str, Any]:
    """Return what a policy's strategy is made with besides its model.

    Args:
        vocabulary: ids that the tokenizer has.
    """
    readout = readout_options(config.rollout, config.trainer, config.model, vocabulary)
    recomputes = config.model.model_dump(include={"gradient_checkpointing", "recompute_attention"})
    return {**readout, **recomputes, **_adamw_options(config.optim)}


def critic_options(config: Config) -> dict[str, Any]:
    """Return what a critic's strategy is made with besides its model."""
    checkpointing = config.critic.gradient_checkpointing
    return {"gradient_checkpointing": checkpointing, **_adamw_options(config.critic.optim)}


def critic_passes(strategy: Strategy) -> dict[str, Any]:
    """Return the fields of `StepFlop` that are a critic's."""
    attention = AttentionFlop.of(strategy.model.config)
    return {"critic_parameters": strategy.n_active_parameters, "critic_attention": attention}


def make_settings(config: Config) -> LearnerSettings:
    """Make the cut of a recipe's steps into updates."""
    trainer, algorithm = config.trainer, config.algorithm
    has_critic = "values" in needs_of(algorithm.advantage)
    return LearnerSettings(
        groups_per_update=trainer.groups_per_update(config.sampling.groups_per_step),
        epochs=trainer.epochs,
        microbatch_tokens=trainer.token_budget,
        overlong_filtering=algorithm.overlong_filtering,
        max_skipped_updates=config.optim.max_skipped_updates,
        seed=config.run.seed,
        lr=_rate(config.optim, trainer.steps),
        critic_lr=_rate(config.critic.optim, trainer.steps),
        critic_microbatch_tokens=config.critic.microbatch_tokens,
        critic_max_skipped_updates=config.critic.optim.max_skipped_updates,
        critic_warmup_steps=min(config.critic.warmup_steps, trainer.steps - 1) if has_critic else 0,
    )


def make_value_objective(config: Config) -> ValueObjective:
    """Make the loss that an update of the critic minimizes."""
    loss = config.critic.value_loss
    return ValueObjective(loss.clip, loss.aggregation, config.rollout.max_response_tokens)


def make_objective(config: Config) -> PolicyObjective:
    """Make the loss that an update of the policy minimizes."""
    algorithm = config.algorithm
    kl = algorithm.kl.loss
    section = algorithm.policy_loss
    if isinstance(section, CustomPolicyLoss):
        from winnow.learning.custom import load_policy_loss

        loss, options = load_policy_loss(section), section.options
    else:
        loss, options = POLICY_LOSSES[section.name], section.model_dump(exclude={"name"})
    return PolicyObjective(
        loss=loss,
        options=options,
        aggregation=algorithm.aggregation,
        norm_tokens=algorithm.aggregation_norm_tokens or config.rollout.max_response_tokens,
        entropy_coef=algorithm.entropy_coef,
        kl=KlTerm(kl.coef, kl.estimator, kl.importance_weight) if isinstance(kl, LossKl) else None,
        old=old_source(config),
        correction=_correction_options(algorithm.correction, recomputed=False),
    )


def old_source(config: Config) -> OldSource:
    """Choose the source of `old`; a pass of its own only where something needs one.

    With one update a step the weights of the update's own forward pass are those before the
    step, so that pass gives `old` exactly, whatever sampled the tokens.
    """
    algorithm, trainer = config.algorithm, config.trainer
    groups_per_step, needs = config.sampling.groups_per_step, needs_of(algorithm.advantage)
    if algorithm.correction.mode == "bypass":
        return "behav"
    if algorithm.correction.mode == "fused":
        return "current"
    loss, kl = POLICY_LOSSES.get(algorithm.policy_loss.name), algorithm.kl
    is_whole_step = trainer.groups_per_update(groups_per_step) == groups_per_step
    one_update = trainer.epochs == 1 and is_whole_step
    weighs_kl = isinstance(kl.loss, LossKl) and kl.loss.importance_weight
    in_updates = not one_update and (loss is None or loss.uses_old or weighs_kl)
    before_updates = (
        _corrects(algorithm.correction)
        or not isinstance(kl.reward, NoKl)
        or "prob" in needs
        or (loss is not None and loss.select is not None)
    )
    if not (in_updates or before_updates):
        return "current"
    reuses = algorithm.correction.mode in ("auto", "reuse") and "prob" not in needs
    return "reuse" if reuses and not reuse_faults(config) else "pass"


def _rate(optim: OptimConfig, steps: int) -> Any:
    options = optim.model_dump(include={"lr", "schedule", "final_lr_ratio"})
    return partial(lr_at, total_steps=steps, warmup_steps=min(optim.warmup_steps, steps), **options)


def load_role(
    load: Callable[..., nn.Module],
    config: Config,
    role: str,
    start: str | None,
    device: torch.device,
    hollow: Hollow,
) -> nn.Module:
    """Load the model that a role names, or the one that the run began with."""
    section, model = getattr(config, role), config.model
    path = section.path or start
    assert path is not None, "the caller was to give the start"
    field = "model.path" if section.path is None else f"{role}.path"
    target = torch.device("cpu") if hollow else device
    dtype = torch_dtype(section.dtype or model.dtype)
    return load(path, dtype, target, model.trust_remote_code, field, hollow)


def _hold(
    trainer: TrainerConfig, mesh: DeviceMesh | None, planned: Callable[..., Strategy] | None
) -> Callable[..., Strategy]:
    """Return what holds a model whole, or in parts on the ranks of a mesh."""
    chosen = trainer.strategy
    if mesh is None:
        assert isinstance(chosen, WholeModels)
        return partial(Strategy, compiles=chosen.compile)
    if isinstance(chosen, Megatron):
        from winnow.learning.data_parallel import device_of
        from winnow.models.megatron.mcore_import import import_megatron

        import_megatron(device_of(mesh))
        from winnow.learning.megatron import MegatronStrategy, RankLayout

        split = chosen.sequence_parallel
        layout = RankLayout(chosen.tensor, chosen.pipeline, chosen.expert, split)
        return partial(planned or MegatronStrategy, mesh=mesh, layout=layout)
    from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
    from winnow.learning.sequence import sequence_group

    assert isinstance(chosen, Fsdp2)
    return partial(
        planned or FSDP2Strategy,
        compiles=chosen.compile if planned is None else False,
        mesh=mesh,
        sharding=Sharding(chosen.reshard_after_forward, chosen.offload, chosen.prefetch),
        sequence=sequence_group(chosen.sequence),
    )


def readout_options(
    rollout: RolloutConfig, trainer: TrainerConfig, model: ModelConfig, vocabulary: int
) -> dict[str, Any]:
    """Return how log-probs are read off a policy's or a reference's states."""
    return {
        "temperature": rollout.temperature,
        "vocab_size": vocabulary,
        "logprob_chunk_tokens": trainer.logprob_chunk_tokens,
        "fp32_head": model.fp32_head,
    }


def _adamw_options(optim: OptimConfig) -> dict[str, Any]:
    return optim.model_dump(include={"betas", "eps", "weight_decay", "grad_clip"})


def _advantage_stage(algorithm: AlgorithmConfig, turn_weight: float) -> AdvantageStage:
    section, kl = algorithm.advantage, algorithm.kl.reward
    penalty = None if isinstance(kl, NoKl) else KlPenalty(kl.coef, kl.estimator)
    if isinstance(kl, AdaptiveRewardKl):
        penalty = KlPenalty(kl.coef, kl.estimator, kl.target, kl.horizon_samples)
    if isinstance(section, CustomAdvantage):
        from winnow.learning.custom import load_estimator

        return AdvantageStage(load_estimator(section), section.options, penalty, turn_weight)
    options = section.model_dump(exclude={"name"})
    return AdvantageStage(ESTIMATORS[section.name], options, penalty, turn_weight)


def _corrects(correction: CorrectionConfig) -> bool:
    return not (
        isinstance(correction.weight, NoWeight) and isinstance(correction.rejection, NoRejection)
    )


def _correction_options(correction: CorrectionConfig, recomputed: bool) -> dict[str, Any] | None:
    """Arguments of `correct` if the mode has a pass, or if it has none; None for no correction."""
    has_pass = correction.mode in ("recompute", "auto")
    if has_pass is not recomputed or not _corrects(correction):
        return None
    options: dict[str, Any] = {}
    if not isinstance(correction.weight, NoWeight):
        options["weight"] = correction.weight.model_dump()
    if not isinstance(correction.rejection, NoRejection):
        options["rejection"] = correction.rejection.model_dump()
    return options


_GRADIENT_FAULTS = {
    "k1": "has no gradient in expectation",
    "abs": "has a biased gradient",
    "k3": "has a biased gradient",
}


def kl_notes(algorithm: AlgorithmConfig) -> list[str]:
    """Return a line for the user where the loss has a KL whose gradient is not the KL's."""
    kl = algorithm.kl.loss
    if not isinstance(kl, LossKl) or kl.importance_weight or kl.estimator not in _GRADIENT_FAULTS:
        return []
    return [
        f"Warning: algorithm.kl.loss.estimator={kl.estimator} in the loss "
        f"{_GRADIENT_FAULTS[kl.estimator]}; k2 or k3+ have the KL's own"
    ]
