"""Losses that treat the few tokens apart whose log-prob and advantage vary together most.

These tokens drive the entropy's collapse (arXiv 2505.22617). With `selection: update` they are
chosen once an update, over the whole mini-batch and before its first backward pass, from old and
A (`clip_cov_select`, `kl_cov_select`), and come with `LossTokens.selected`; micro-batches and
order change nothing. `selection: microbatch` chooses within each micro-batch from the current
log-probs, as verl does, and so depends on the split.

Signature, shapes and notation are those of `winnow.algorithms.losses`;
cov = (A - mean A)(logp - mean logp), means over the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.losses import Loss, LossTokens, clip_figures, clip_terms, drift, ratio

KL_COV_NOISE = 1e-4
"""Nats. A log-prob that is no further from `old` has not moved: it is the rounding of two passes,
and in a step's first update its sign, which is the penalty's gradient, would be the split's."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def clip_cov(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    share: float,
    cov_low: float,
    cov_high: float,
    selection: str,
) -> Loss:
    """ppo_clip without dual clip, 0 on the tokens that were selected.

    Clip-Cov (arXiv 2505.22617, eq. 11 and 12). Its figures are ppo_clip's, whatever is selected,
    and `selected_share`.
    """
    plain, clipped = clip_terms(ratio(logp, old), advantage, clip_low, clip_high)
    binds = clipped > plain
    selected = tokens.selected
    if selection == "microbatch":
        assert tokens.draws is not None, "selection within a micro-batch needs draws"
        within = _within(logp.detach(), advantage, tokens.mask, cov_low, cov_high) & ~binds
        selected = _first(within, tokens.draws, _how_many(tokens.mask, share))
    assert selected is not None, "the loss's `select` runs before the first backward pass"
    loss = torch.where(selected, 0.0, torch.maximum(plain, clipped))
    if not tokens.with_figures:
        return loss, {}
    figures = clip_figures(binds, advantage > 0, logp, old, tokens)
    return loss, {**figures, "selected_share": (selected & tokens.mask).sum()}


def clip_cov_select(
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    draws: Tensor,
    *,
    share: float,
    cov_low: float,
    cov_high: float,
    **options: Any,
) -> Tensor:
    """Draw max(int(share N), 1) of the N counted tokens, among those of cov within the bounds.

    Fewer where fewer lie within. Before the first update no ratio has moved, so none is clipped.

    Args:
        old, advantage: [T] of the whole mini-batch.
        mask: [T] bool.
        draws: [T] of `keyed_draws`; the tokens with the smallest are taken.
        options: the loss's others; they do not matter here.

    Returns:
        [T] bool.
    """
    within = _within(old, advantage, mask, cov_low, cov_high)
    return _first(within, draws, _how_many(mask, share))


def kl_cov(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    tokens: LossTokens,
    *,
    coef: float,
    share: float,
    selection: str,
) -> Loss:
    """-A r, plus coef |logp - old| on the tokens that were selected.

    KL-Cov (arXiv 2505.22617, eq. 13 and 14). Up to `KL_COV_NOISE` the distance counts as 0.
    """
    selected = tokens.selected
    if selection == "microbatch":
        assert tokens.draws is not None, "selection within a micro-batch needs draws"
        selected = kl_cov_select(logp.detach(), advantage, tokens.mask, tokens.draws, share=share)
    assert selected is not None, "the loss's `select` runs before the first backward pass"
    loss = -advantage * ratio(logp, old)
    distance = (logp - old).abs()
    loss = torch.where(selected & ~(distance <= KL_COV_NOISE), loss + coef * distance, loss)
    if not tokens.with_figures:
        return loss, {}
    selected_share = (selected & tokens.mask).sum()
    return loss, {"selected_share": selected_share, **drift(logp, old, tokens)}


def kl_cov_select(
    old: Tensor, advantage: Tensor, mask: Tensor, draws: Tensor, *, share: float, **options: Any
) -> Tensor:
    """Select the max(int(share N), 1) of the N counted tokens of highest cov; draws settle ties.

    Args and the result are those of `clip_cov_select`.
    """
    at = mask.nonzero().squeeze(1)
    at = at[draws[at].argsort(stable=True)]
    by_cov = covariance(old, advantage, mask)[at].argsort(descending=True, stable=True)
    selected = torch.zeros_like(mask)
    selected[at[by_cov[: _how_many(mask, share)]]] = True
    return selected


def covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return cov [T] in float64, -inf outside the mask and where it is not defined.

    The sums run over sorted values, so that the order of the tokens does not touch a bit.
    """
    x, y = logp[mask].double(), advantage[mask].double()
    found = torch.full(mask.shape, -torch.inf, dtype=torch.float64, device=mask.device)
    cov = (y - y.sort().values.mean()) * (x - x.sort().values.mean())
    found[mask] = torch.where(cov.isnan(), -torch.inf, cov)
    return found


def keyed_draws(seed: int, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Draw random numbers in [0, 1), float64 [T], that depend on (seed, sample, position) alone.

    So neither the order of the samples nor their split into micro-batches or ranks changes the
    number of a token. The finaliser of SplitMix64 (Steele, Lea, Flood 2014), once for each key.

    Args:
        seed: any integer; another one for each update.
        sample_keys: [T] int64, a key of the token's sample, unique within the update.
        positions: [T] int64, position of the token in its sample.
    """
    start = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    state = _mixed(_mixed(torch.full_like(sample_keys, start)) + (sample_keys + 1) * _GOLDEN)
    bits = _mixed(state + (positions + 1) * _GOLDEN)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _within(
    logp: Tensor, advantage: Tensor, mask: Tensor, cov_low: float, cov_high: float
) -> Tensor:
    cov = covariance(logp, advantage, mask)
    return mask & (cov > cov_low) & (cov < cov_high)


def _how_many(mask: Tensor, share: float) -> int:
    n = int(mask.sum())
    return max(int(share * n), 1) if n else 0


def _first(candidates: Tensor, draws: Tensor, n: int) -> Tensor:
    """[T] bool: the n candidates with the smallest draws."""
    at = candidates.nonzero().squeeze(1)
    selected = torch.zeros_like(candidates)
    selected[at[draws[at].argsort(stable=True)[:n]]] = True
    return selected


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
