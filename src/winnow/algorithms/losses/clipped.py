"""Policy losses that bound what one token's ratio may do, and those without a ratio.

Signature, shapes and notation are those of `winnow.algorithms.losses`; only logp carries a
gradient. Options have the names and meanings of the loss's section in `config/algorithm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.algorithms.losses import Loss, LossTokens, clip_figures, clip_terms, drift, ratio


def ppo_clip(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Loss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A dual_clip.

    PPO (arXiv 1707.06347, eq. 7) with DAPO's clip-higher (arXiv 2503.14476, eq. 8: 0.28) and
    dual clip (arXiv 1912.09729, eq. 5).

    Returns:
        The loss, and `clip_share`, tokens whose loss the ratio's clip decides; `clip_high_share`,
        those of them above 1 + clip_high; `dual_clip_share`; `approx_kl`.
    """
    plain, clipped = clip_terms(ratio(logp, old), advantage, clip_low, clip_high)
    loss = single = torch.maximum(plain, clipped)
    if dual_clip is not None:
        bounded = torch.minimum(single, -advantage * dual_clip)
        loss = torch.where(advantage < 0, bounded, single)
    if not tokens.with_figures:
        return loss, {}
    figures = clip_figures(clipped > plain, advantage > 0, logp, old, tokens)
    if dual_clip is not None:
        binds = (single > -advantage * dual_clip) & (advantage < 0)
        figures["dual_clip_share"] = binds.sum()
    return loss, figures


def cispo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    r_max: float,
    two_sided: tuple[float, float] | None,
) -> Loss:
    """-sg(min(r, r_max)) A logp: the weight is cut, no token loses its gradient.

    CISPO (arXiv 2506.13585, eq. 4 and 5, with only the upper bound in use). `two_sided` (low,
    high) holds r in [1 - low, 1 + high] in place of r_max, as verl does.
    """
    low, high = (0.0, r_max) if two_sided is None else (1 - two_sided[0], 1 + two_sided[1])
    r = ratio(logp, old).detach()
    loss = -r.clamp(low, high) * advantage * logp
    if not tokens.with_figures:
        return loss, {}
    above, below = tokens.mask & (r > high), tokens.mask & (r < low)
    return loss, clip_figures(above | below, above, logp, old, tokens)


def sapo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Loss:
    """-A (4/tau) sigmoid(tau (r - 1)): a soft gate, of slope 1 at r = 1, in place of a clip.

    SAPO (arXiv 2511.20347), a mean over samples of the mean over a sample's tokens.
    """
    tau = torch.full_like(logp, tau_negative).masked_fill(advantage > 0, tau_positive)
    loss = -advantage * (4 / tau) * torch.sigmoid(tau * (ratio(logp, old) - 1))
    return loss, drift(logp, old, tokens)


def dppo_tv(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float,
    divergence_high: float,
    r_max: float,
) -> Loss:
    """-A sg(min(r, r_max)) logp, 0 where the token's probability has moved too far along A.

    DPPO with the binary total variation (arXiv 2602.04879). Thresholds as in verl's script.
    """
    # Rounding may lift a log-prob over 0, and exp must stay finite.
    moved = logp.detach().clamp(max=0).exp() - old.clamp(max=0).exp()
    stopped = torch.where(advantage > 0, moved > divergence_high, moved < -divergence_low)
    return _stopped_loss(logp, old, advantage, tokens, stopped, r_max)


def dppo_kl(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float,
    divergence_high: float,
    r_max: float,
) -> Loss:
    """`dppo_tv` with the binary KL, in nats, in place of the difference of probabilities.

    A token is left out where KL(old || current), between "this token" and "any other", exceeds
    the bound and the probability has moved along A (arXiv 2602.04879).
    """
    far, moved = binary_kl(old, logp), logp.detach() - old
    rising, falling = (far > divergence_high) & (moved > 0), (far > divergence_low) & (moved < 0)
    stopped = torch.where(advantage > 0, rising, falling)
    return _stopped_loss(logp, old, advantage, tokens, stopped, r_max)


def binary_kl(old: Tensor, logp: Tensor) -> Tensor:
    """KL(old || current) [T] in nats between "this token" and "any other", no gradient.

    1e-8 keeps a token of probability 1 finite, as verl does.
    """
    old, logp = old.detach().clamp(max=0), logp.detach().clamp(max=0)
    p_old, rest_old, rest = old.exp(), -old.expm1() + 1e-8, -logp.expm1() + 1e-8
    # An old log-prob of -inf has no weight, and 0 * inf is NaN.
    this = torch.where(p_old > 0, p_old * (old - logp), 0.0)
    return this + (1 - p_old) * (rest_old.log() - rest.log())


def _stopped_loss(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    stopped: Tensor,
    r_max: float,
) -> Loss:
    weight = ratio(logp, old).clamp(max=r_max).detach()
    loss = torch.where(stopped, 0.0, -advantage * weight) * logp
    if not tokens.with_figures:
        return loss, {}
    return loss, clip_figures(stopped & (advantage != 0), advantage > 0, logp, old, tokens)


def dro(logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens, *, beta: float) -> Loss:
    """-(A logp - beta/2 (logp - old)^2): a quadratic pull towards old in place of a ratio.

    DRO (arXiv 2405.19107); the log-ratio is not held, since its gradient is what pulls back.
    """
    loss = -(advantage * logp - 0.5 * beta * (logp - old).square())
    return loss, drift(logp, old, tokens)


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens) -> Loss:
    """-A logp: the plain policy gradient (Williams, 1992); `old` does not enter.

    It is the loss of GPG (arXiv 2504.02546, eq. 4) too, which differs in its advantage.
    """
    return -advantage * logp, drift(logp, old, tokens)
