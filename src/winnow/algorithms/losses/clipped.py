"""Policy losses that bound what one token's ratio may do: ppo_clip, CISPO, SAPO, DPPO.

Each is called as `loss(logp, old, advantage, tokens, **options)` and returns [T], 0 outside
`tokens.mask`; its diagnostics take the same and return sums over the mask, without gradient.

Shapes: `T` packed tokens. logp is the current policy, old the one before the first update of
the step, both in nats; r = exp(clamp(logp - old, +-20)); sg(x) is x without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.algorithms.losses.tokens import LossTokens, counted, drift_diagnostics, ratio


def ppo_clip(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), for A < 0 at most -A dual_clip.

    PPO (arXiv 1707.06347, eq. 7) with DAPO's clip-higher (arXiv 2503.14476, eq. 8: 0.28) and
    dual clip (arXiv 1912.09729, eq. 5).

    Args:
        logp, old, advantage: [T]; only logp should carry a gradient.
        tokens: of the micro-batch.
        clip_low, clip_high: how far the ratio may fall and rise.
        dual_clip: bound > 1 on the ratio of a negative advantage; None leaves it out.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    loss, clipped = clip_terms(ratio(logp, old), advantage, clip_low, clip_high)
    loss = torch.maximum(loss, clipped)
    if dual_clip is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * dual_clip), loss)


def ppo_clip_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> dict[str, Tensor]:
    """Sums over the mask of: where a clip decides the loss, and old - logp.

    Returns:
        Scalars. `clip_share`: the ratio's clip binds; `clip_high_share`: those of them above
        1 + clip_high; `dual_clip_share`: the dual clip binds; `approx_kl`: old - logp in nats.
    """
    with torch.no_grad():
        logp, old, advantage = counted(tokens, logp, old, advantage)
        r = ratio(logp, old)
        sums = {
            **clip_diagnostics(r, advantage, clip_low, clip_high),
            **drift_diagnostics(logp, old, advantage, tokens),
        }
        if dual_clip is not None:
            loss = torch.maximum(*clip_terms(r, advantage, clip_low, clip_high))
            sums["dual_clip_share"] = ((loss > -advantage * dual_clip) & (advantage < 0)).sum()
    return sums


def clip_terms(
    r: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-A r and -A clip(r, 1 - clip_low, 1 + clip_high), each [T]."""
    return -advantage * r, -advantage * r.clamp(1 - clip_low, 1 + clip_high)


def clip_diagnostics(
    r: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """How many tokens the clip of r decides, and how many of them above; advantage 0 is none."""
    loss, clipped = clip_terms(r, advantage, clip_low, clip_high)
    binds = clipped > loss
    return {"clip_share": binds.sum(), "clip_high_share": (binds & (advantage > 0)).sum()}


def cispo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    r_max: float = 5.0,
    two_sided: tuple[float, float] | None = None,
) -> Tensor:
    """-sg(min(r, r_max)) A logp: the weight is cut, no token loses its gradient.

    CISPO (arXiv 2506.13585, eq. 4 and 5, with only the upper bound in use).

    Args:
        logp, old, advantage: [T].
        tokens: of the micro-batch.
        r_max: the largest weight.
        two_sided: (low, high) holds r in [1 - low, 1 + high] in place of r_max, as verl does.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    low, high = _cispo_bounds(r_max, two_sided)
    return -ratio(logp, old).clamp(low, high).detach() * advantage * logp


def cispo_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    r_max: float = 5.0,
    two_sided: tuple[float, float] | None = None,
) -> dict[str, Tensor]:
    """Sums over the mask: `clip_share`, weights cut; `clip_high_share`, those cut from above."""
    with torch.no_grad():
        logp, old = counted(tokens, logp, old)
        r = ratio(logp, old)
        low, high = _cispo_bounds(r_max, two_sided)
        above = tokens.mask & (r > high)
        below = tokens.mask & (r < low)
        return {
            "clip_share": above.sum() + below.sum(),
            "clip_high_share": above.sum(),
            **drift_diagnostics(logp, old, advantage, tokens),
        }


def sapo(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """-A (4/tau) sigmoid(tau (r - 1)): a soft gate, of slope 1 at r = 1, in place of a clip.

    SAPO (arXiv 2511.20347), a mean over samples of the mean over a sample's tokens.

    Args:
        logp, old, advantage: [T].
        tokens: of the micro-batch.
        tau_positive, tau_negative: sharpness of the gate where A > 0, and elsewhere.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    tau = torch.full_like(logp, tau_negative).masked_fill(advantage > 0, tau_positive)
    return -advantage * (4 / tau) * torch.sigmoid(tau * (ratio(logp, old) - 1))


def dppo_tv(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
    r_max: float = 20.0,
) -> Tensor:
    """-A sg(min(r, r_max)) logp, 0 where the token's probability has moved too far along A.

    DPPO with the binary total variation (arXiv 2602.04879). Thresholds as in verl's script.

    Args:
        logp, old, advantage: [T].
        tokens: of the micro-batch.
        divergence_low, divergence_high: by how much the probability may have fallen where
            A <= 0, and risen where A > 0.
        r_max: the largest weight.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    stopped = _tv_stopped(logp, old, advantage, divergence_low, divergence_high)
    return _stopped_loss(logp, old, advantage, stopped, r_max)


def dppo_tv_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
    r_max: float = 20.0,
) -> dict[str, Tensor]:
    """Sums over the mask: `clip_share`, tokens left out; `clip_high_share`, those of A > 0."""
    with torch.no_grad():
        logp, old, advantage = counted(tokens, logp, old, advantage)
        stopped = _tv_stopped(logp, old, advantage, divergence_low, divergence_high)
        return _stopped_diagnostics(logp, old, advantage, tokens, stopped)


def dppo_kl(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    r_max: float = 20.0,
) -> Tensor:
    """`dppo_tv` with the binary KL, in nats, in place of the difference of probabilities.

    A token is left out where KL(old || current), between "this token" and "any other", exceeds
    the bound and the probability has moved along A (arXiv 2602.04879).

    Args:
        logp, old, advantage: [T].
        tokens: of the micro-batch.
        divergence_low, divergence_high: bounds in nats where A <= 0, and where A > 0.
        r_max: the largest weight.

    Returns:
        [T] loss.
    """
    logp, old, advantage = counted(tokens, logp, old, advantage)
    stopped = _kl_stopped(logp, old, advantage, divergence_low, divergence_high)
    return _stopped_loss(logp, old, advantage, stopped, r_max)


def dppo_kl_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    divergence_low: float = 0.05,
    divergence_high: float = 0.05,
    r_max: float = 20.0,
) -> dict[str, Tensor]:
    """Sums over the mask: `clip_share`, tokens left out; `clip_high_share`, those of A > 0."""
    with torch.no_grad():
        logp, old, advantage = counted(tokens, logp, old, advantage)
        stopped = _kl_stopped(logp, old, advantage, divergence_low, divergence_high)
        return _stopped_diagnostics(logp, old, advantage, tokens, stopped)


def binary_kl(old: Tensor, logp: Tensor) -> Tensor:
    """KL(old || current) [T] in nats between "this token" and "any other", no gradient.

    1e-8 keeps a token of probability 1 finite, as verl does.
    """
    old, logp = old.detach().clamp(max=0), logp.detach().clamp(max=0)
    p_old, rest_old, rest = old.exp(), -old.expm1() + 1e-8, -logp.expm1() + 1e-8
    # An old log-prob of -inf has no weight, and 0 * inf is NaN.
    this = torch.where(p_old > 0, p_old * (old - logp), 0.0)
    return this + (1 - p_old) * (rest_old.log() - rest.log())


def _cispo_bounds(r_max: float, two_sided: tuple[float, float] | None) -> tuple[float, float]:
    return (0.0, r_max) if two_sided is None else (1 - two_sided[0], 1 + two_sided[1])


def _tv_stopped(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """[T] bool; rounding may lift a log-prob over 0, and exp must stay finite."""
    moved = logp.detach().clamp(max=0).exp() - old.clamp(max=0).exp()
    return torch.where(advantage > 0, moved > high, moved < -low)


def _kl_stopped(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """[T] bool; a move against A is never left out."""
    far, moved = binary_kl(old, logp), logp.detach() - old
    return torch.where(advantage > 0, (far > high) & (moved > 0), (far > low) & (moved < 0))


def _stopped_loss(
    logp: Tensor, old: Tensor, advantage: Tensor, stopped: Tensor, r_max: float
) -> Tensor:
    weight = ratio(logp, old).clamp(max=r_max).detach()
    return torch.where(stopped, 0.0, -advantage * weight) * logp


def _stopped_diagnostics(
    logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens, stopped: Tensor
) -> dict[str, Tensor]:
    return {
        "clip_share": (stopped & (advantage != 0)).sum(),
        "clip_high_share": (stopped & (advantage > 0)).sum(),
        **drift_diagnostics(logp, old, advantage, tokens),
    }
