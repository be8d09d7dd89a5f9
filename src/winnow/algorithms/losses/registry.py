"""Policy losses by name, each with what the metrics say about it and what it asks of others.

A loss is called as `function(logp, old, advantage, tokens, **options)` and returns [T], 0 outside
`tokens.mask`; `aggregation` turns that into a number. Its diagnostics take the same and return
sums over the mask without gradient, to be divided by the update's count of tokens.

Shapes: `T` packed tokens. logp is the current policy, old the one before the first update of
the step, both in nats. What stands outside the mask is never read; a log-prob in it that is NaN
is a fault of the model and shows as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from winnow.algorithms.losses.clipped import (
    cispo,
    cispo_diagnostics,
    dppo_kl,
    dppo_kl_diagnostics,
    dppo_tv,
    dppo_tv_diagnostics,
    ppo_clip,
    ppo_clip_diagnostics,
    sapo,
)
from winnow.algorithms.losses.covariance import (
    clip_cov,
    clip_cov_diagnostics,
    clip_cov_select,
    kl_cov,
    kl_cov_diagnostics,
    kl_cov_select,
)
from winnow.algorithms.losses.sequence import gmpo, gmpo_diagnostics, gspo, gspo_diagnostics
from winnow.algorithms.losses.tokens import LossTokens, counted, drift_diagnostics, keyed_draws

__all__ = ["POLICY_LOSSES", "LossTokens", "PolicyLoss", "dro", "keyed_draws", "reinforce"]

SEQUENCE_MEAN = ("seq-mean-token-mean",)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what belongs to it."""

    function: Callable[..., Tensor]
    """(logp, old, advantage, tokens, **options) -> [T]."""
    diagnostics: Callable[..., dict[str, Tensor]]
    """The same arguments -> scalars, sums over the mask without gradient."""
    aggregations: tuple[str, ...] = ()
    """The keys of `AGGREGATIONS` that it may be aggregated with; empty stands for all."""
    select: Callable[..., Tensor] | None = None
    """(old, advantage, mask, draws, **options) -> [T] bool, over the whole mini-batch, once an
    update; for `LossTokens.selected` where the option `selection` is "update"."""
    uses_old: bool = True
    """Whether `old` enters the loss; the diagnostics' `approx_kl` reads it in any case."""


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens) -> Tensor:
    """-A logp [T]: the plain policy gradient (Williams, 1992); `old` does not enter.

    It is the loss of GPG (arXiv 2504.02546, eq. 4) too, which differs in its advantage.
    """
    logp, advantage = counted(tokens, logp, advantage)
    return -advantage * logp


def dro(
    logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens, *, beta: float = 0.05
) -> Tensor:
    """-(A logp - beta/2 (logp - old)^2) [T]: a quadratic pull towards old in place of a ratio.

    DRO (arXiv 2405.19107); the log-ratio is not held, since its gradient is what pulls back.

    Args:
        logp, old, advantage: [T].
        tokens: of the micro-batch.
        beta: > 0, strength of the pull.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    return -(advantage * logp - 0.5 * beta * (logp - old).square())


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo_clip": PolicyLoss(ppo_clip, ppo_clip_diagnostics),
    "gspo": PolicyLoss(gspo, gspo_diagnostics, SEQUENCE_MEAN),
    "cispo": PolicyLoss(cispo, cispo_diagnostics),
    "sapo": PolicyLoss(sapo, drift_diagnostics, SEQUENCE_MEAN),
    "gmpo": PolicyLoss(gmpo, gmpo_diagnostics, SEQUENCE_MEAN),
    "clip_cov": PolicyLoss(clip_cov, clip_cov_diagnostics, select=clip_cov_select),
    "kl_cov": PolicyLoss(kl_cov, kl_cov_diagnostics, select=kl_cov_select),
    "dppo_tv": PolicyLoss(dppo_tv, dppo_tv_diagnostics),
    "dppo_kl": PolicyLoss(dppo_kl, dppo_kl_diagnostics),
    "dro": PolicyLoss(dro, drift_diagnostics),
    "gpg": PolicyLoss(reinforce, drift_diagnostics, uses_old=False),
    "reinforce": PolicyLoss(reinforce, drift_diagnostics, uses_old=False),
}
