"""Policy losses a token, and apart from them what the metrics say about each.

A loss takes logp, old and advantage [T] first, its options by keyword, and returns [T];
`aggregation` turns that into a number. Its diagnostics take the same and a mask, and return
sums over the mask without gradient, to be divided by the update's count of tokens.

Shapes: `T` packed tokens. logp is the current policy, old the one before the first update of
the step, both in nats; r = exp(logp - old).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within +-20 nats: exp stays finite, and beyond it the gradient is 0."""


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """exp(logp - old) [T], the log-ratio held within +-`LOG_RATIO_BOUND`."""
    return (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def ppo_clip(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
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
        clip_low, clip_high: how far the ratio may fall and rise.
        dual_clip: bound > 1 on the ratio of a negative advantage; None leaves it out.

    Returns:
        [T] loss.
    """
    loss, clipped, bound = _ppo_terms(logp, old, advantage, clip_low, clip_high, dual_clip)
    loss = torch.maximum(loss, clipped)
    if bound is None:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, bound), loss)


def reinforce(logp: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """-A logp [T]: the plain policy gradient (Williams, 1992); `old` does not enter."""
    return -advantage * logp


def ppo_clip_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> dict[str, Tensor]:
    """Sums over `mask` [T] of: where a clip decides the loss, and old - logp.

    Returns:
        Scalars. `clip_share`: the ratio's clip binds; `clip_high_share`: those of them above
        1 + clip_high; `dual_clip_share`: the dual clip binds; `approx_kl`: old - logp in nats.
    """
    with torch.no_grad():
        loss, clipped, bound = _ppo_terms(logp, old, advantage, clip_low, clip_high, dual_clip)
        binds = mask & (clipped > loss)
        sums = {
            "clip_share": binds.sum(),
            "clip_high_share": (binds & (advantage > 0)).sum(),
            **drift_diagnostics(logp, old, advantage, mask),
        }
        if bound is not None:
            beyond = torch.maximum(loss, clipped) > bound
            sums["dual_clip_share"] = (mask & beyond & (advantage < 0)).sum()
    return sums


def drift_diagnostics(
    logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Sum over `mask` [T] of old - logp (`approx_kl`, nats), which any loss has."""
    with torch.no_grad():
        return {"approx_kl": torch.where(mask, old - logp, 0.0).sum()}


POLICY_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}
POLICY_DIAGNOSTICS: Mapping[str, Callable[..., dict[str, Tensor]]] = {
    "ppo_clip": ppo_clip_diagnostics,
    "reinforce": drift_diagnostics,
}


def _ppo_terms(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """-A r, -A clip(r) and -A dual_clip, each [T]."""
    r = ratio(logp, old)
    clipped = -advantage * r.clamp(1 - clip_low, 1 + clip_high)
    return -advantage * r, clipped, None if dual_clip is None else -advantage * dual_clip
