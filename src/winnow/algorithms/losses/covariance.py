"""Losses that treat the few tokens apart whose log-prob and advantage vary together most.

These tokens drive the entropy's collapse (arXiv 2505.22617). With `selection: update` they are
chosen once an update, over the whole mini-batch and before its first backward pass, from old and
A (`clip_cov_select`, `kl_cov_select`), and come with `LossTokens.selected`; micro-batches and
order change nothing. `selection: microbatch` chooses within each micro-batch from the current
log-probs, as verl does, and so depends on the split.

Shapes: `T` packed tokens. logp is the current policy, old the one before the first update of
the step, both in nats; cov = (A - mean A)(logp - mean logp), means over the mask;
r = exp(clamp(logp - old, +-20)).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from winnow.algorithms.losses.clipped import clip_terms, ppo_clip, ppo_clip_diagnostics
from winnow.algorithms.losses.tokens import LossTokens, counted, drift_diagnostics, ratio

Selection = Literal["update", "microbatch"]

KL_COV_NOISE = 1e-4
"""Nats. A log-prob that is no further from `old` has not moved: it is the rounding of two passes,
and in a step's first update its sign, which is the penalty's gradient, would be the split's."""


def clip_cov(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    selection: Selection = "update",
) -> Tensor:
    """ppo_clip without dual clip, 0 on the tokens that were selected.

    Clip-Cov (arXiv 2505.22617, eq. 11 and 12).

    Args:
        logp, old, advantage: [T]; only logp should carry a gradient.
        tokens: with `selected`, or with `draws` where `selection` is "microbatch".
        clip_low, clip_high: how far the ratio may fall and rise.
        share: of the counted tokens, how many are selected, at least one.
        cov_low, cov_high: selected tokens have a cov strictly between these.
        selection: once an update, or in each micro-batch.

    Returns:
        [T] loss.
    """
    loss = ppo_clip(
        logp, old, advantage, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    selected = _clip_cov_selected(
        logp, old, advantage, tokens, clip_low, clip_high, share, cov_low, cov_high, selection
    )
    return torch.where(selected, 0.0, loss)


def clip_cov_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    selection: Selection = "update",
) -> dict[str, Tensor]:
    """Those of ppo_clip, and `selected_share`: tokens of the mask that were selected."""
    sums = ppo_clip_diagnostics(
        logp, old, advantage, tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=None
    )
    selected = _clip_cov_selected(
        logp, old, advantage, tokens, clip_low, clip_high, share, cov_low, cov_high, selection
    )
    return {**sums, "selected_share": (selected & tokens.mask).sum()}


def clip_cov_select(
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    draws: Tensor,
    *,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    **options: Any,
) -> Tensor:
    """Draw max(int(share N), 1) of the N counted tokens, among those of cov within the bounds.

    Fewer where fewer lie within. Before the first update no ratio has moved, so none is clipped.

    Args:
        old, advantage: [T] of the whole mini-batch.
        mask: [T] bool.
        draws: [T] of `keyed_draws`; the tokens with the smallest are taken.
        share, cov_low, cov_high: as in `clip_cov`.
        options: the loss's others; they do not matter here.

    Returns:
        [T] bool.
    """
    cov = covariance(old, advantage, mask)
    within = mask & (cov > cov_low) & (cov < cov_high)
    return _first(within, draws, _how_many(mask, share))


def kl_cov(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    coef: float = 1.0,
    share: float = 2e-4,
    selection: Selection = "update",
) -> Tensor:
    """-A r, plus coef |logp - old| on the tokens that were selected.

    KL-Cov (arXiv 2505.22617, eq. 13 and 14). Up to `KL_COV_NOISE` the distance counts as 0.

    Args:
        logp, old, advantage: [T]; only logp should carry a gradient.
        tokens: with `selected`, or with `draws` where `selection` is "microbatch".
        coef: weight of the penalty.
        share: of the counted tokens, how many are selected, at least one.
        selection: once an update, or in each micro-batch.

    Returns:
        [T] loss.
    """
    selected = _kl_cov_selected(logp, advantage, tokens, share, selection)
    logp, old, advantage = counted(tokens, logp, old, advantage)
    loss = -advantage * ratio(logp, old)
    distance = (logp - old).abs()
    return torch.where(selected & ~(distance <= KL_COV_NOISE), loss + coef * distance, loss)


def kl_cov_diagnostics(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    coef: float = 1.0,
    share: float = 2e-4,
    selection: Selection = "update",
) -> dict[str, Tensor]:
    """`selected_share`: tokens of the mask that were selected; and the drift."""
    selected = _kl_cov_selected(logp, advantage, tokens, share, selection)
    return {
        "selected_share": (selected & tokens.mask).sum(),
        **drift_diagnostics(logp, old, advantage, tokens),
    }


def kl_cov_select(
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    draws: Tensor,
    *,
    share: float = 2e-4,
    **options: Any,
) -> Tensor:
    """The max(int(share N), 1) of the N counted tokens of highest cov; draws settle ties.

    Args:
        old, advantage: [T] of the whole mini-batch.
        mask: [T] bool.
        draws: [T] of `keyed_draws`.
        share: as in `kl_cov`.
        options: the loss's others; they do not matter here.

    Returns:
        [T] bool.
    """
    at = mask.nonzero().squeeze(1)
    at = at[draws[at].argsort(stable=True)]
    by_cov = covariance(old, advantage, mask)[at].argsort(descending=True, stable=True)
    selected = torch.zeros_like(mask)
    selected[at[by_cov[: _how_many(mask, share)]]] = True
    return selected


def _clip_cov_selected(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    clip_low: float,
    clip_high: float,
    share: float,
    cov_low: float,
    cov_high: float,
    selection: Selection,
) -> Tensor:
    """[T] bool: what was selected for the update, or what is selected here."""
    if selection == "update":
        return _of_update(tokens)
    held_logp, held_old, held_advantage = counted(tokens, logp.detach(), old, advantage)
    loss, clipped = clip_terms(ratio(held_logp, held_old), held_advantage, clip_low, clip_high)
    cov = covariance(held_logp, held_advantage, tokens.mask)
    within = tokens.mask & (clipped <= loss) & (cov > cov_low) & (cov < cov_high)
    return _first(within, _draws(tokens), _how_many(tokens.mask, share))


def _kl_cov_selected(
    logp: Tensor, advantage: Tensor, tokens: LossTokens, share: float, selection: Selection
) -> Tensor:
    if selection == "update":
        return _of_update(tokens)
    return kl_cov_select(logp.detach(), advantage, tokens.mask, _draws(tokens), share=share)


def _of_update(tokens: LossTokens) -> Tensor:
    assert tokens.selected is not None, "the loss's `select` runs before the first backward pass"
    return tokens.selected


def _draws(tokens: LossTokens) -> Tensor:
    assert tokens.draws is not None, "selection within a micro-batch needs draws"
    return tokens.draws


def covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """cov [T] in float64, -inf outside the mask and where it is not defined.

    The sums run over sorted values, so that the order of the tokens does not touch a bit.
    """
    x, y = logp[mask].double(), advantage[mask].double()
    found = torch.full(mask.shape, -torch.inf, dtype=torch.float64, device=mask.device)
    cov = (y - _mean(y)) * (x - _mean(x))
    found[mask] = torch.where(cov.isnan(), -torch.inf, cov)
    return found


def _mean(values: Tensor) -> Tensor:
    return values.sort().values.mean()


def _how_many(mask: Tensor, share: float) -> int:
    n = int(mask.sum())
    return max(int(share * n), 1) if n else 0


def _first(candidates: Tensor, draws: Tensor, n: int) -> Tensor:
    """[T] bool: the n candidates with the smallest draws."""
    at = candidates.nonzero().squeeze(1)
    selected = torch.zeros_like(candidates)
    selected[at[draws[at].argsort(stable=True)[:n]]] = True
    return selected
