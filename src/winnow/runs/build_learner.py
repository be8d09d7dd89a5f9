"""The learning side of a run, built from its recipe: roles, their models, what a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.algorithm import (
    AdaptiveRewardKl,
    CorrectionConfig,
    CustomAdvantage,
    CustomPolicyLoss,
    LossKl,
    NoKl,
    NoRejection,
    NoWeight,
)
from winnow.config.model import NoAdapter
from winnow.config.root import Config
from winnow.config.trainer import OptimConfig
from winnow.learning.advantage import AdvantageStage, KlPenalty
from winnow.learning.critic import Critic, ValueObjective
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import KlTerm, OldSource, Policy, PolicyObjective
from winnow.learning.strategy import Strategy, lr_at
from winnow.runs.metrics import Passes
from winnow.runs.model_factory import ModelFactory


@dataclass(frozen=True)
class Learning:
    """A learner with the strategies it steps."""

    learner: Learner
    policy: Strategy
    passes: Passes
    """The passes that a step computes."""
    others: dict[str, Strategy] = field(default_factory=dict)
    """By role: what learns beside the policy, and is saved with it."""
    notes: tuple[str, ...] = ()
    """Lines for the user before the run starts."""


def needs_of(config: Config) -> frozenset[str]:
    """Return what the recipe's estimator asks for beyond rewards; a user's own gets no more."""
    advantage = config.algorithm.advantage
    if isinstance(advantage, CustomAdvantage):
        return frozenset()
    return ESTIMATORS[advantage.name].needs


def needs_start(config: Config) -> bool:
    """Return whether a resumed run needs the model that the run began from."""
    return (
        not isinstance(config.model.adapter, NoAdapter)
        or (_needs_reference(config) and config.reference.path is None)
        or ("values" in needs_of(config) and config.critic.path is None)
    )


def make_learner(config: Config, holder: ModelFactory, start: str | None) -> Learning:
    """Everything that learns, and the reference.

    Args:
        holder: of the models.
        start: folder of the model that the run began with; None where `needs_start` is not.

    Raises:
        ModelError: a model of the recipe cannot be loaded.
    """
    policy = holder.policy()
    critic, others = None, {}
    if "values" in needs_of(config):
        path = config.critic.path or start
        assert path is not None, "the caller was to give the start"
        others["critic"] = holder.critic(path)
        loss = config.critic.value_loss
        limit = config.rollout.max_response_tokens
        objective = ValueObjective(loss.clip, loss.aggregation, limit)
        critic = Critic(others["critic"], objective)
    reference = _reference(config, start, policy, holder) if _needs_reference(config) else None
    trainer, algorithm = config.trainer, config.algorithm
    settings = LearnerSettings(
        groups_per_update=trainer.mini_batch_groups or config.sampling.groups_per_step,
        epochs=trainer.epochs,
        microbatch_tokens=trainer.microbatch_tokens,
        overlong_filtering=algorithm.overlong_filtering,
        max_skipped_updates=config.optim.max_skipped_updates,
        seed=config.run.seed,
        lr=_rate(config, config.optim),
        critic_lr=_rate(config, config.critic.optim),
        critic_microbatch_tokens=config.critic.microbatch_tokens,
        critic_max_skipped_updates=config.critic.optim.max_skipped_updates,
        critic_warmup_steps=min(config.critic.warmup_steps, trainer.steps - 1) if critic else 0,
    )
    learner = Learner(
        Policy(policy, make_objective(config)),
        _advantage_stage(config),
        settings,
        reference=reference,
        critic=critic,
        correction=_correction_options(algorithm.correction, recomputed=True),
    )
    passes = Passes(
        policy.parameters,
        trainer.epochs,
        forwards=(old_source(config) == "pass") + (reference is not None),
        critic_parameters=sum(strategy.parameters for strategy in others.values()),
    )
    return Learning(learner, policy, passes, others, tuple(_kl_notes(config)))


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
    if algorithm.correction.mode == "bypass":
        return "behav"
    if algorithm.correction.mode == "fused":
        return "current"
    loss, kl = POLICY_LOSSES.get(algorithm.policy_loss.name), algorithm.kl
    groups = config.sampling.groups_per_step
    one_update = trainer.epochs == 1 and (trainer.mini_batch_groups or groups) == groups
    weighs_kl = isinstance(kl.loss, LossKl) and kl.loss.importance_weight
    in_updates = not one_update and (loss is None or loss.uses_old or weighs_kl)
    before_updates = (
        _corrects(algorithm.correction)
        or not isinstance(kl.reward, NoKl)
        or "prob" in needs_of(config)
        or (loss is not None and loss.select is not None)
    )
    return "pass" if in_updates or before_updates else "current"


def _rate(config: Config, optim: OptimConfig) -> Any:
    return partial(
        lr_at,
        total_steps=config.trainer.steps,
        lr=optim.lr,
        warmup_steps=min(optim.warmup_steps, config.trainer.steps),
        schedule=optim.schedule,
        final_lr_ratio=optim.final_lr_ratio,
    )


def _needs_reference(config: Config) -> bool:
    kl = config.algorithm.kl
    return not (isinstance(kl.reward, NoKl) and isinstance(kl.loss, NoKl))


def _reference(
    config: Config, start: str | None, policy: Strategy, holder: ModelFactory
) -> Strategy:
    """A frozen copy; with an adapter, unless another folder is named, the policy's own model."""
    own = config.reference
    if own.path is None and not isinstance(config.model.adapter, NoAdapter):
        return policy
    path = own.path or start
    assert path is not None, "the caller was to give the start"
    return holder.reference(path)


def _advantage_stage(config: Config) -> AdvantageStage:
    section = config.algorithm.advantage
    if isinstance(section, CustomAdvantage):
        from winnow.learning.custom import load_estimator

        return AdvantageStage(load_estimator(section), section.options, _kl_penalty(config))
    options = section.model_dump(exclude={"name"})
    return AdvantageStage(ESTIMATORS[section.name], options, _kl_penalty(config))


def _kl_penalty(config: Config) -> KlPenalty | None:
    kl = config.algorithm.kl.reward
    if isinstance(kl, NoKl):
        return None
    if isinstance(kl, AdaptiveRewardKl):
        return KlPenalty(kl.coef, kl.estimator, kl.target, kl.horizon_samples)
    return KlPenalty(kl.coef, kl.estimator)


def _corrects(correction: CorrectionConfig) -> bool:
    return not (
        isinstance(correction.weight, NoWeight) and isinstance(correction.rejection, NoRejection)
    )


def _correction_options(correction: CorrectionConfig, recomputed: bool) -> dict[str, Any] | None:
    """Arguments of `correct` if the mode is recompute, or if it is not; None for no correction."""
    if (correction.mode == "recompute") is not recomputed or not _corrects(correction):
        return None
    options: dict[str, Any] = {}
    if not isinstance(correction.weight, NoWeight):
        options["weight"] = correction.weight.name
        options["normalize"] = correction.weight.normalize
        options["weight_options"] = correction.weight.model_dump(exclude={"name", "normalize"})
    if not isinstance(correction.rejection, NoRejection):
        options["rejection"] = correction.rejection.name
        options["rejection_options"] = correction.rejection.model_dump(exclude={"name"})
    return options


_GRADIENT_FAULTS = {
    "k1": "has no gradient in expectation",
    "abs": "has a biased gradient",
    "k3": "has a biased gradient",
}


def _kl_notes(config: Config) -> list[str]:
    kl = config.algorithm.kl.loss
    if not isinstance(kl, LossKl) or kl.importance_weight or kl.estimator not in _GRADIENT_FAULTS:
        return []
    return [
        f"Warning: algorithm.kl.loss.estimator={kl.estimator} in the loss "
        f"{_GRADIENT_FAULTS[kl.estimator]}; k2 or k3+ have the KL's own"
    ]
