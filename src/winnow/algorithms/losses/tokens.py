"""What every policy loss is given besides its three columns, and the pieces that losses share.

Shapes: `T` packed tokens and `B` samples of one micro-batch. Log-probs are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within +-20 nats: exp stays finite, and beyond it the gradient is 0."""

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, eq=False)
class LossTokens:
    """Which tokens of a micro-batch count, and whose they are. Samples are always whole.

    Example: two samples of 3 and 2 tokens, each behind a prompt of one, have `mask`
    [F T T F T], `sample_index` [0 0 0 1 1] and `n_samples` 2.
    """

    mask: Tensor
    """[T] bool: the counted tokens. What stands elsewhere is never read."""
    sample_index: Tensor
    """[T] int64, each token's sample in [0, n_samples)."""
    n_samples: int
    """B."""
    selected: Tensor | None = None
    """[T] bool, what the loss's `select` chose for the update; None for a loss without one."""
    draws: Tensor | None = None
    """[T] float64 in [0, 1), of `keyed_draws`: for `selection: microbatch` alone."""


def counted(tokens: LossTokens, *values: Tensor) -> tuple[Tensor, ...]:
    """The values [T] with 0 outside the mask, where they may be infinite or NaN.

    It stands before any arithmetic: masking a result instead would leave NaN in its gradient.
    """
    return tuple(torch.where(tokens.mask, value, 0.0) for value in values)


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """exp(logp - old) [T], the log-ratio held within +-`LOG_RATIO_BOUND`."""
    return (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sample_means(values: Tensor, tokens: LossTokens) -> Tensor:
    """[B] each sample's mean over its counted tokens, summed in float64; 0 where none counts.

    Args:
        values: [T], 0 outside the mask.
    """
    sums = torch.zeros(tokens.n_samples, dtype=torch.float64, device=values.device)
    counts = torch.zeros_like(sums).index_add_(0, tokens.sample_index, tokens.mask.double())
    sums = sums.index_add(0, tokens.sample_index, values.double())
    return (sums / counts.clamp(min=1)).to(values.dtype)


def drift_diagnostics(
    logp: Tensor, old: Tensor, advantage: Tensor, tokens: LossTokens, **options: Any
) -> dict[str, Tensor]:
    """Sum over the mask of old - logp (`approx_kl`, nats), which any loss has.

    Args:
        logp, old, advantage: [T].
        options: the loss's own; they do not matter here.
    """
    with torch.no_grad():
        logp, old = counted(tokens, logp, old)
        return {"approx_kl": (old - logp).sum()}


def keyed_draws(seed: int, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1), float64 [T], that depend on (seed, sample, position) alone.

    So neither the order of the samples nor their split into micro-batches or ranks changes the
    number of a token. The finaliser of SplitMix64 (Steele, Lea, Flood 2014), once for each key.

    Args:
        seed: any integer; another one for each update.
        sample_keys: [T] int64, what names the token's sample in the update.
        positions: [T] int64, position of the token in its sample.
    """
    start = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    state = _mixed(_mixed(torch.full_like(sample_keys, start)) + (sample_keys + 1) * _GOLDEN)
    bits = _mixed(state + (positions + 1) * _GOLDEN)
    return _shifted(bits, 11).to(torch.float64) * 2.0**-53


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
