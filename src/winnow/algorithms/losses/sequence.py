"""Policy losses whose ratio belongs to a whole sample: GSPO and GMPO.

Both are means over samples: aggregate them with seq-mean-token-mean, no other way. Signature,
shapes and notation are those of `winnow.algorithms.losses`; a sample's means are over its counted
tokens. Options are those of the loss's section in `config/algorithm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.algorithms.losses import (
    LOG_RATIO_BOUND,
    Loss,
    LossTokens,
    clip_figures,
    clip_terms,
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
    clip_low: float,
    clip_high: float,
) -> Loss:
    """max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean of logp - old).

    GSPO-token (arXiv 2507.18071, section 4.3): each token carries its sample's s, and its
    gradient goes through its own logp, as exp(logp - sg(logp) + sg(mean)). The figures count the
    tokens of clipped samples.
    """
    mean = sample_means(logp.detach() - old, tokens)[tokens.sample_index]
    s = (logp - logp.detach() + mean).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()
    plain, clipped = clip_terms(s, advantage, clip_low, clip_high)
    loss = torch.maximum(plain, clipped)
    if not tokens.with_figures:
        return loss, {}
    return loss, clip_figures(clipped > plain, advantage > 0, logp, old, tokens)


def gmpo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """-A rho, rho = exp(mean over the sample of s min(s d, s clip(d, -clip_low, clip_high))).

    GMPO (arXiv 2507.20673), d = logp - old and s the sign of A: the geometric mean of ratios
    that are clipped in log space. A sample has one advantage as it has one ratio: the mean of its
    tokens', which an outcome advantage is anyway. The loss is the same on all counted tokens of
    a sample; the figures count the tokens whose log-ratio is held.
    """
    advantage_B = sample_means(advantage, tokens)
    sign = advantage_B.sign()[tokens.sample_index]
    d = logp - old
    clipped = d.clamp(-clip_low, clip_high)
    # Written as cases, since a sign of 0 times an infinite d is NaN.
    falling = torch.where(sign < 0, torch.maximum(d, clipped), 0.0)
    held = torch.where(sign > 0, torch.minimum(d, clipped), falling)
    log_rho_B = sample_means(held, tokens).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    loss_B = -advantage_B * log_rho_B.exp()
    loss = torch.where(tokens.mask, loss_B[tokens.sample_index], 0.0)
    if not tokens.with_figures:
        return loss, {}
    binds = ((sign > 0) & (clipped < d)) | ((sign < 0) & (clipped > d))
    return loss, clip_figures(binds, sign > 0, logp, old, tokens)
