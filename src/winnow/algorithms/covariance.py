"""Selection of the few tokens whose log-prob and advantage vary together most.

These tokens drive the entropy's collapse (arXiv 2505.22617). With `selection: update` they are
chosen once an update, over the whole mini-batch and before its first backward pass, from old and
A (`clip_cov_select`, `kl_cov_select`), and come with `LossTokens.selected`; micro-batches and
order change nothing. `selection: microbatch` chooses within each micro-batch from the current
log-probs, as verl does, and so depends on the split.

Shapes: `T` packed tokens. cov = (A - mean A)(logp - mean logp), means over the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


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
    within = bounded_covariance(old, advantage, mask, cov_low, cov_high)
    return smallest_draws(within, draws, selection_size(mask, share))


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
    selected[at[by_cov[: selection_size(mask, share)]]] = True
    return selected


def covariance(logp: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return cov [T] in float64, -inf outside the mask and where it is not defined.

    The sums run over sorted values, so that the order of the tokens does not touch a bit.
    """
    x, y = logp[mask].double(), advantage[mask].double()
    cov_T = torch.full(mask.shape, -torch.inf, dtype=torch.float64, device=mask.device)
    cov = (y - y.sort().values.mean()) * (x - x.sort().values.mean())
    cov_T[mask] = torch.where(cov.isnan(), -torch.inf, cov)
    return cov_T


def keyed_draws(update_seed: int, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Draw random numbers in [0, 1), float64 [T], that depend on (seed, sample, position) alone.

    So neither the order of the samples nor their split into micro-batches or ranks changes the
    number of a token. The finaliser of SplitMix64 (Steele, Lea, Flood 2014), once for each key.

    Args:
        seed: any integer; another one for each update.
        sample_keys: [T] int64, a key of the token's sample, unique within the update.
        positions: [T] int64, position of the token in its sample.
    """
    start = (update_seed + (1 << 63)) % (1 << 64) - (1 << 63)
    state = _mix_bits(_mix_bits(torch.full_like(sample_keys, start)) + (sample_keys + 1) * _GOLDEN)
    bits = _mix_bits(state + (positions + 1) * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def bounded_covariance(
    logp: Tensor, advantage: Tensor, mask: Tensor, cov_low: float, cov_high: float
) -> Tensor:
    """Return the tokens [T] bool of the mask whose cov lies between the bounds."""
    cov = covariance(logp, advantage, mask)
    return mask & (cov > cov_low) & (cov < cov_high)


def selection_size(mask: Tensor, share: float) -> int:
    """Return max(int(share N), 1) of the N counted tokens; 0 of none."""
    n = int(mask.sum())
    return max(int(share * n), 1) if n else 0


def smallest_draws(candidates: Tensor, draws: Tensor, n: int) -> Tensor:
    """[T] bool: the n candidates with the smallest draws."""
    at = candidates.nonzero().squeeze(1)
    selected = torch.zeros_like(candidates)
    selected[at[draws[at].argsort(stable=True)[:n]]] = True
    return selected


def _mix_bits(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
