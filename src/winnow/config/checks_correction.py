"""Rules about correction and KL: each names the fields that contradict each other, and the remedy.

`winnow.config.checks` applies them with the others.
"""

from __future__ import annotations

from winnow.config.correction import K1Rejection, MaskedWeight, NoWeight
from winnow.config.kl import AdaptiveRewardKl
from winnow.config.root import Config

BYPASS_WEIGHTED = ("reinforce", "gpg")
"""Losses without a ratio of their own to the sampler."""


def fused_updates(c: Config) -> str | None:
    """Fused mode takes `old` from the update's own forward pass, which is the step's only one."""
    if c.algorithm.correction.mode != "fused":
        return None
    mini, groups, epochs = c.trainer.mini_batch_groups, c.sampling.groups_per_step, c.trainer.epochs
    if epochs == 1 and mini in (None, groups):
        return None
    return (
        f"algorithm.correction.mode=fused needs one update a step, got trainer.epochs={epochs} and "
        f"trainer.mini_batch_groups={'null' if mini is None else mini} of "
        f"sampling.groups_per_step={groups}; set trainer.epochs=1 and "
        "trainer.mini_batch_groups=null, or algorithm.correction.mode=recompute"
    )


def normalized_weights(c: Config) -> str | None:
    """The mean over the step is known before its updates in recompute mode only."""
    correction = c.algorithm.correction
    weight = correction.weight
    if isinstance(weight, NoWeight) or not weight.normalize or correction.mode == "recompute":
        return None
    return (
        "algorithm.correction.weight.normalize=true needs all weights of a step before its first "
        f"update, which algorithm.correction.mode={correction.mode} does not have; set "
        "normalize=false, or mode=recompute"
    )


def bypass_weights(c: Config) -> str | None:
    """In bypass mode a loss with a ratio to `old` corrects by itself."""
    a = c.algorithm
    weight, loss = a.correction.weight.name, a.policy_loss.name
    if a.correction.mode != "bypass" or weight == "none" or loss in BYPASS_WEIGHTED:
        return None
    return (
        f"algorithm/correction/weight={weight} weighs twice in algorithm.correction.mode=bypass, "
        f"where the ratio of algorithm/policy_loss={loss} is to the sampler already; set "
        f"algorithm/correction/weight=none, or policy_loss to {' or '.join(BYPASS_WEIGHTED)}"
    )


def weight_range(c: Config) -> str | None:
    """Of masked weights."""
    weight = c.algorithm.correction.weight
    if not isinstance(weight, MaskedWeight) or weight.low < weight.high:
        return None
    return _empty_range("algorithm.correction.weight", weight.low, weight.high, "weight")


def rejection_range(c: Config) -> str | None:
    """Of k1."""
    rejection = c.algorithm.correction.rejection
    if not isinstance(rejection, K1Rejection) or rejection.low < rejection.high:
        return None
    return _empty_range("algorithm.correction.rejection", rejection.low, rejection.high, "ratio")


def adaptive_horizon(c: Config) -> str | None:
    """Else a step could turn the KL's weight negative."""
    kl = c.algorithm.kl.reward
    n = c.sampling.groups_per_step * c.rollout.n
    if not isinstance(kl, AdaptiveRewardKl) or kl.horizon_samples > 0.2 * n:
        return None
    return (
        f"algorithm.kl.reward.horizon_samples={kl.horizon_samples} is too short for "
        f"sampling.groups_per_step={c.sampling.groups_per_step} groups of rollout.n={c.rollout.n} "
        f"answers, which could turn the weight negative; set it to {n // 5 + 1} or more, "
        f"better to several times {n}"
    )


def _empty_range(where: str, low: float, high: float, what: str) -> str:
    return (
        f"{where}.low={low:g} is not below {where}.high={high:g}, so no {what} could pass; "
        "lower the one or raise the other"
    )


CORRECTION_RULES = (
    fused_updates,
    normalized_weights,
    bypass_weights,
    weight_range,
    rejection_range,
    adaptive_horizon,
)
