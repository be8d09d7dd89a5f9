"""Policy losses whose ratio belongs to a whole sample: GSPO and GMPO.

Both are means over samples: aggregate them with seq-mean-token-mean, no other way.

Shapes: `T` packed tokens and `B` samples of one micro-batch. logp is the current policy, old the
one before the first update of the step, both in nats; sg(x) is x without gradient. A sample's
means are over its counted tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.algorithms.losses.clipped import clip_diagnostics, clip_terms
from winnow.algorithms.losses.tokens import (
    LOG_RATIO_BOUND,
    LossTokens,
    counted,
    drift_diagnostics,
    sample_means,
)

LOG_SEQUENCE_RATIO_MAX = 10.0
"""GSPO's log-ratio is held below 10 nats; beyond it the gradient is 0."""


def gspo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean of logp - old).

    GSPO-token (arXiv 2507.18071, section 4.3): each token carries its sample's s, and its
    gradient goes through its own logp, as exp(logp - sg(logp) + sg(mean)).

    Args:
        logp, old, advantage: [T]; only logp should carry a gradient.
        tokens: of the micro-batch, whose samples are whole.
        clip_low, clip_high: how far the sample's ratio may fall and rise.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    terms = clip_terms(_sequence_ratio(logp, old, tokens), advantage, clip_low, clip_high)
    return torch.maximum(*terms)


def gspo_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> dict[str, Tensor]:
    """Sums over the mask: `clip_share`, tokens of clipped samples; `clip_high_share`; drift."""
    with torch.no_grad():
        logp, old, advantage = counted(tokens, logp, old, advantage)
        s = _sequence_ratio(logp, old, tokens)
        return {
            **clip_diagnostics(s, advantage, clip_low, clip_high),
            **drift_diagnostics(logp, old, advantage, tokens),
        }


def gmpo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """-A rho, rho = exp(mean of d') one ratio a sample, the geometric mean of clipped ratios.

    GMPO (arXiv 2507.20673): d' = s min(s d, s clip(d, -clip_low, clip_high)), d = logp - old.
    A is the sample's mean over its counted tokens, and s = sign(A), so that a sample has one
    advantage as it has one ratio; an outcome advantage is its own mean.

    Args:
        logp, old, advantage: [T]; only logp should carry a gradient.
        tokens: of the micro-batch, whose samples are whole.
        clip_low, clip_high: how far a token's log-ratio may fall and rise, in nats.

    Returns:
        [T] loss, the same on every counted token of a sample.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    mean_advantage_B, d, clipped = _gmpo_terms(logp, old, advantage, tokens, clip_low, clip_high)
    sign = mean_advantage_B.sign()[tokens.sample_index]
    # Written as cases, since a sign of 0 times an infinite d is NaN.
    falling = torch.where(sign < 0, torch.maximum(d, clipped), 0.0)
    held = torch.where(sign > 0, torch.minimum(d, clipped), falling)
    log_rho_B = sample_means(held, tokens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    loss_B = -mean_advantage_B * log_rho_B.exp()
    return torch.where(tokens.mask, loss_B[tokens.sample_index], 0.0)


def gmpo_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> dict[str, Tensor]:
    """Sums over the mask: `clip_share`, log-ratios held; `clip_high_share`, from above; drift."""
    with torch.no_grad():
        logp, old, advantage = counted(tokens, logp, old, advantage)
        mean_advantage_B, d, clipped = _gmpo_terms(
            logp, old, advantage, tokens, clip_low, clip_high
        )
        sign = mean_advantage_B.sign()[tokens.sample_index]
        binds = ((sign > 0) & (clipped < d)) | ((sign < 0) & (clipped > d))
        return {
            "clip_share": binds.sum(),
            "clip_high_share": (binds & (sign > 0)).sum(),
            **drift_diagnostics(logp, old, advantage, tokens),
        }


def _sequence_ratio(logp: Tensor, old: Tensor, tokens: LossTokens) -> Tensor:
    """exp(clamp(logp - sg(logp) + sg(mean of logp - old), max 10)) [T]."""
    mean = sample_means(logp.detach() - old, tokens)[tokens.sample_index]
    return (logp - logp.detach() + mean).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()


def _gmpo_terms(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The samples' mean advantages [B], the log-ratios [T], and these clipped [T]."""
    d = logp - old
    return sample_means(advantage, tokens), d, d.clamp(-clip_low, clip_high)
