"""Rules about estimators, losses and the critic; `winnow.config.checks` applies them."""

from __future__ import annotations

from winnow.config.advantage import (
    GaeAdvantage,
    GdpoAdvantage,
    GrpoPasskAdvantage,
    OptimalTokenBaselineAdvantage,
)
from winnow.config.kl import NoKl
from winnow.config.policy_loss import ClipCovLoss, KlCovLoss
from winnow.config.root import Config


def loss_aggregation(c: Config) -> str | None:
    """A loss with one ratio a sample is a mean over samples."""
    loss, given = c.algorithm.policy_loss, c.algorithm.aggregation
    if not loss.aggregations or given in loss.aggregations:
        return None
    needed = " or ".join(loss.aggregations)
    return (
        f"algorithm/policy_loss={loss.name} is a mean over samples, which "
        f"algorithm.aggregation={given} is not; set algorithm.aggregation={needed}"
    )


def group_size(c: Config) -> str | None:
    """Some estimators compare answers whatever the filter lets through."""
    advantage = c.algorithm.advantage
    if c.rollout.n > 1 or not isinstance(
        advantage, GrpoPasskAdvantage | OptimalTokenBaselineAdvantage
    ):
        return None
    return (
        f"algorithm/advantage={advantage.name} compares the answers to a prompt, and rollout.n=1 "
        "gives one; set rollout.n to 2 or more"
    )


def pass_before_updates(c: Config) -> str | None:
    """Fused and bypass mode have no log-probs, or none of the trained policy, before updates."""
    a = c.algorithm
    mode = a.correction.mode
    if mode == "recompute":
        return None
    if isinstance(a.advantage, OptimalTokenBaselineAdvantage):
        what = f"algorithm/advantage={a.advantage.name} needs squared probabilities"
    elif mode == "fused" and not isinstance(a.kl.reward, NoKl):
        what = f"algorithm/kl/reward={a.kl.reward.name} needs the policy's log-probs"
    elif mode == "fused" and isinstance(a.policy_loss, ClipCovLoss | KlCovLoss):
        what = f"algorithm/policy_loss={a.policy_loss.name} chooses tokens by log-probs"
    else:
        return None
    return (
        f"{what} before the updates, which algorithm.correction.mode={mode} does not compute; "
        "set algorithm.correction.mode=recompute"
    )


def component_kl(c: Config) -> str | None:
    """Each component is divided by its own spread, so a KL among them would lose its weight."""
    kl = c.algorithm.kl.reward
    if not isinstance(c.algorithm.advantage, GdpoAdvantage) or isinstance(kl, NoKl):
        return None
    return (
        f"algorithm/kl/reward={kl.name} has no place in algorithm/advantage=gdpo, which looks at "
        "the parts of the score one by one; set algorithm/kl/reward=none and "
        "algorithm/kl/loss=fixed"
    )


def critic_warmup(c: Config) -> str | None:
    """The policy must come to learn."""
    warmup, steps = c.critic.warmup_steps, c.trainer.steps
    if not isinstance(c.algorithm.advantage, GaeAdvantage) or warmup < steps:
        return None
    return (
        f"critic.warmup_steps={warmup} leaves none of trainer.steps={steps} for the policy; "
        f"set critic.warmup_steps below {steps}"
    )


def critic_lr_warmup(c: Config) -> str | None:
    """As for the policy's optimizer."""
    warmup, steps = c.critic.optim.warmup_steps, c.trainer.steps
    if not isinstance(c.algorithm.advantage, GaeAdvantage) or warmup <= steps:
        return None
    return (
        f"critic.optim.warmup_steps={warmup} is more than trainer.steps={steps}, so the learning "
        f"rate would never reach its peak; set critic.optim.warmup_steps to {steps} or less"
    )


ALGORITHM_RULES = (
    loss_aggregation,
    group_size,
    pass_before_updates,
    component_kl,
    critic_warmup,
    critic_lr_warmup,
)
