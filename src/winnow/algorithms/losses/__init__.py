"""Policy losses and the value loss: functions from log-probs or values to one loss a token.

A policy loss is called as `loss(logp, old, advantage, tokens, **options)` and returns
`(loss_T, figures)`: the loss of each token, which `aggregation` turns into a number, and sums over
the counted tokens without gradient, such as `clip_share`, which add up over micro-batches. A sum
called `NAME` shows up in the metrics as the mean `actor/NAME`.

Its caller, `registry.PolicyLoss`, has set logp, old and advantage to 0 on the tokens that do not
count, where they may be infinite or NaN: masking the result instead would leave NaN in its
gradient. A log-prob of a counted token that is NaN is a fault of the model and shows as NaN.

Shapes: `T` packed tokens and `B` samples of one micro-batch. logp is the current policy, old the
one before the first update of the step, both in nats; r = exp(clamp(logp - old, +-20)); sg(x) is
x without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are held within +-20 nats: exp stays finite, and beyond it the gradient is 0."""

Loss = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token [T], and figures: scalars, sums over the counted tokens."""


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The tokens of a micro-batch: which of them count, and whose they are. Samples are whole.

    Example: two samples of 3 and 2 tokens, each behind a prompt of one, have `mask`
    [F T T F T], `sample_index` [0 0 0 1 1] and `n_samples` 2.
    """

    mask: Tensor
    """[T] bool: the counted tokens."""
    sample_index: Tensor
    """[T] int64, each token's sample in [0, n_samples)."""
    n_samples: int
    """B."""
    selected: Tensor | None = None
    """[T] bool, what the loss's `select` chose for the update; None for a loss without one."""
    draws: Tensor | None = None
    """[T] float64 in [0, 1), of `keyed_draws`: for `selection: microbatch` alone."""
    with_figures: bool = True
    """False where nobody reads the figures: a built-in loss then leaves them out."""


def ratio(logp: Tensor, old: Tensor) -> Tensor:
    """Return exp(logp - old) [T], the log-ratio held within +-`LOG_RATIO_BOUND`."""
    return (logp - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clip_terms(
    r: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -A r and -A clip(r, 1 - clip_low, 1 + clip_high), each [T]."""
    return -advantage * r, -advantage * r.clamp(1 - clip_low, 1 + clip_high)


def sample_means(values: Tensor, tokens: LossTokens) -> Tensor:
    """Return each sample's mean over its counted tokens [B], summed in float64; 0 for no token.

    Args:
        values: [T], 0 outside the mask.
    """
    sums = torch.zeros(tokens.n_samples, dtype=torch.float64, device=values.device)
    counts = torch.zeros_like(sums).index_add_(0, tokens.sample_index, tokens.mask.double())
    sums = sums.index_add(0, tokens.sample_index, values.double())
    return (sums / counts.clamp(min=1)).to(values.dtype)


def drift(logp: Tensor, old: Tensor, tokens: LossTokens) -> dict[str, Tensor]:
    """Return the figure that every loss has, `approx_kl`: the sum of old - logp in nats."""
    return {"approx_kl": (old - logp.detach()).sum()} if tokens.with_figures else {}


def clip_figures(
    binds: Tensor, above: Tensor, logp: Tensor, old: Tensor, tokens: LossTokens
) -> dict[str, Tensor]:
    """Return `clip_share` and `clip_high_share`, and the drift.

    Args:
        binds: [T] bool, tokens whose loss the clip decides.
        above: [T] bool, those of them that it holds from above where it binds.
    """
    shares = {"clip_share": binds.sum(), "clip_high_share": (binds & above).sum()}
    return {**shares, **drift(logp, old, tokens)}
