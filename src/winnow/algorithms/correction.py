"""Correction for tokens that another policy sampled than the one that is to learn from them.

Three policies meet: `behav` sampled the tokens, `old` is the proximal policy, `logp` the current
one. With l = old - behav a token, w = exp(l) weighs its loss (importance sampling), and tokens or
samples that are too far off are rejected. Where `old` is the current policy itself (fused), give
logp for it; where it is the sampler (bypass), weigh by logp against behav. Nothing here carries a
gradient. Whole samples are needed, no more: results for the micro-batches of a batch are those
for the batch. What does need all of it, the weights' mean, is given as moments that add up.

Shapes: `T` packed tokens, `B` samples. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""w = exp(l) with l, or its sum over a sequence, held within +-20 nats."""

Level = Literal["token", "sequence"]
Over = Literal["sum", "mean", "max"]


@dataclass(frozen=True, eq=False)
class Corrected:
    """What is left to learn from, and by how much."""

    loss_mask: Tensor
    """[T] bool: what of the given loss_mask was not rejected."""
    weights: Tensor | None
    """[T] in old's dtype, what multiplies the loss of each token, never negative; 1 off
    loss_mask. None where the loss is not weighted."""
    moments: Tensor
    """[2] float64: `weight_moments` over loss_mask; zeros without weights."""
    sums: dict[str, Tensor]
    """Scalars that add up: `rejected_tokens` and `rejected_samples`, those that lost their last
    token, of the given loss_mask; with weights and over the new loss_mask `weight`, and
    `weight_bound`, the tokens whose weight was cut or set to 0."""


def correct(
    old: Tensor,
    behav: Tensor,
    gen_mask: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    weight: str | None = None,
    weight_options: Mapping[str, Any] = MappingProxyType({}),
    rejection: str | None = None,
    rejection_options: Mapping[str, Any] = MappingProxyType({}),
) -> Corrected:
    """Rejection, then weights, for whole samples: a batch's or a micro-batch's.

    Args:
        old, behav: [T] the two policies' log-probs; off gen_mask they are not read.
        gen_mask: [T] bool, tokens that the policy wrote; samples' statistics are over these.
        loss_mask: [T] bool, a part of gen_mask.
        offsets: [B+1] int64: sample b is [offsets[b], offsets[b+1]).
        weight: a key of `WEIGHTS`; None for no weights.
        weight_options: `level`, and the bounds of that function.
        rejection: a key of `REJECTIONS`; None rejects nothing.
        rejection_options: of `rejected`, by keyword.

    Raises:
        ValueError: an unknown name.
    """
    l_T = log_ratio(old, behav, gen_mask)
    left = loss_mask
    if rejection is not None:
        left = loss_mask & ~rejected(l_T, gen_mask, offsets, rejection, **rejection_options)
    learning = _learning_samples(loss_mask, offsets)
    sums = {
        "rejected_tokens": (loss_mask & ~left).sum(),
        "rejected_samples": (learning & ~_learning_samples(left, offsets)).sum(),
    }
    if weight is None:
        return Corrected(left, None, torch.zeros(2, dtype=torch.float64, device=old.device), sums)
    if weight not in WEIGHTS:
        raise ValueError(f"weight must be one of {', '.join(WEIGHTS)}, got {weight!r}")
    bounds = dict(weight_options)
    level = bounds.pop("level", "token")
    w = importance_ratio(l_T, offsets, level)
    values = WEIGHTS[weight](w, **bounds)
    sums["weight"] = torch.where(left, values, 0.0).double().sum()
    sums["weight_bound"] = (left & (values != w)).sum()
    moments = weight_moments(values, left, offsets, level)
    # 1, not 0 or NaN, off the mask: 0 times a weight that is not finite would be a NaN gradient.
    return Corrected(left, torch.where(left, values, 1.0), moments, sums)


def log_ratio(old: Tensor, behav: Tensor, gen_mask: Tensor) -> Tensor:
    """l = old - behav [T] without gradient, 0 off gen_mask and where both are equal, be it -inf."""
    old, behav = old.detach(), behav.detach().to(old.dtype)
    return torch.where(gen_mask & (old != behav), old - behav, 0.0)


def truncated(w: Tensor, *, cap: float = 2.0) -> Tensor:
    """min(w, cap): truncated importance sampling (TIS)."""
    return w.clamp(max=cap)


def masked(w: Tensor, *, low: float = 0.5, high: float = 5.0) -> Tensor:
    """w within [low, high], 0 outside: IcePop (Ring-1T, arXiv 2510.18855)."""
    return torch.where((w >= low) & (w <= high), w, 0.0)


WEIGHTS: Mapping[str, Callable[..., Tensor]] = {"truncated": truncated, "masked": masked}


def importance_ratio(log_ratio: Tensor, offsets: Tensor, level: Level = "token") -> Tensor:
    """w [T]: exp(clamp(l, +-20)) of each token, or exp(clamp(sum of l, +-20)) of its sample.

    Args:
        log_ratio: [T] from `log_ratio`, 0 off gen_mask.
        offsets: [B+1] int64.

    Raises:
        ValueError: an unknown level.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be token or sequence, got {level!r}")
    l_T = log_ratio
    if level == "sequence":
        index = _sample_index(offsets, len(log_ratio))
        l_T = _sums(log_ratio, index, len(offsets) - 1)[index].to(log_ratio.dtype)
    return l_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def weight_moments(
    weights: Tensor, mask: Tensor, offsets: Tensor, level: Level = "token"
) -> Tensor:
    """Sum and count [2] of the weights: of the tokens in `mask`, or of samples with such a token.

    Args:
        weights: [T], at the level of sequences the same on all of a sample's tokens.
        mask: [T] bool: what learns.
        offsets: [B+1] int64.
        level: that of the weights.
    """
    weights_T = torch.where(mask, weights.detach(), 0.0).double()
    if level == "token":
        return torch.stack([weights_T.sum(), mask.sum().double()])
    index, n = _sample_index(offsets, len(mask)), len(offsets) - 1
    tokens_B = _sums(mask, index, n)
    means_B = _sums(weights_T, index, n) / tokens_B.clamp(min=1)
    return torch.stack([means_B.sum(), (tokens_B > 0).sum().double()])


def divided_by_mean(weights: Tensor, moments: Tensor) -> Tensor:
    """`weights` [T] over their mean; as they are where the mean is 0 or nothing was counted.

    Args:
        moments: [2] `weight_moments`, added up over all micro-batches and ranks of the step.
    """
    total, count = moments.to(weights.device).unbind()
    return weights * torch.where(total > 0, count / total, 1.0).to(weights.dtype)


def k1_outside(
    log_ratio: Tensor, fold: Callable[[Tensor], Tensor], *, low: float = 0.5, high: float = 2.0
) -> Tensor:
    """Whether k1 = -l, folded, leaves [log low, log high]: that is, behav / old leaves [low, high].

    At the level of a sample, sum bounds the ratio of the sequences, mean the geometric mean of
    the tokens' ratios, and max each of these.
    """
    bounds = log_ratio.new_tensor([low, high], dtype=torch.float64).log()
    k1 = -log_ratio
    # The largest of -k1 is the smallest of k1. A comparison with NaN is false: it stays outside.
    above, below = fold(k1), -fold(-k1)
    return ~((below >= bounds[0]) & (above <= bounds[1]))


def k2_outside(
    log_ratio: Tensor, fold: Callable[[Tensor], Tensor], *, bound: float = 0.25
) -> Tensor:
    """Whether k2 = l^2 / 2, folded, exceeds a bound."""
    return ~(fold(log_ratio.square() / 2) <= bound)


def k3_outside(
    log_ratio: Tensor, fold: Callable[[Tensor], Tensor], *, bound: float = 0.3
) -> Tensor:
    """Whether k3 = e^l - 1 - l, folded, exceeds a bound."""
    return ~(fold(log_ratio.expm1() - log_ratio) <= bound)


REJECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "k1": k1_outside,
    "k2": k2_outside,
    "k3": k3_outside,
}


def rejected(
    log_ratio: Tensor,
    gen_mask: Tensor,
    offsets: Tensor,
    name: str,
    *,
    level: Literal["token", "sample"] = "token",
    over: Over = "mean",
    **bounds: float,
) -> Tensor:
    """[T] bool: what is too far from `old` to learn from; take it out of loss_mask.

    Args:
        log_ratio: [T] from `log_ratio`.
        gen_mask: [T] bool; a sample's statistic is over all that the policy wrote of it.
        offsets: [B+1] int64.
        name: a key of `REJECTIONS`.
        level: single tokens, or whole samples.
        over: how a sample folds its tokens' statistics; without use for tokens.
        bounds: of the function by that name.

    Returns:
        True within gen_mask only. What is NaN is rejected.

    Raises:
        ValueError: an unknown name, level or fold.
    """
    if name not in REJECTIONS:
        raise ValueError(f"rejection must be one of {', '.join(REJECTIONS)}, got {name!r}")
    l_T = log_ratio.double()
    if level == "token":
        return gen_mask & REJECTIONS[name](l_T, lambda values: values, **bounds)
    if level != "sample":
        raise ValueError(f"level must be token or sample, got {level!r}")
    index, n = _sample_index(offsets, len(l_T)), len(offsets) - 1

    def fold(values: Tensor) -> Tensor:
        return _fold(values, gen_mask, index, n, over)

    return gen_mask & REJECTIONS[name](l_T, fold, **bounds)[index]


def _fold(values: Tensor, gen_mask: Tensor, index: Tensor, n: int, over: Over) -> Tensor:
    """[B] sum, mean or max of the written tokens' values [T]; 0 for a sample without one."""
    count = torch.zeros(n, dtype=values.dtype, device=values.device)
    count.index_add_(0, index, gen_mask.to(values.dtype))
    if over == "max":
        shut = values.masked_fill(~gen_mask, -torch.inf)
        top = torch.full_like(count, -torch.inf).scatter_reduce_(0, index, shut, "amax")
        return top.masked_fill(count == 0, 0.0)
    if over not in ("sum", "mean"):
        raise ValueError(f"over must be sum, mean or max, got {over!r}")
    total = _sums(values.masked_fill(~gen_mask, 0.0), index, n)
    return total / count.clamp(min=1) if over == "mean" else total


def _sums(values: Tensor, index: Tensor, n: int) -> Tensor:
    """[B] sums of values [T] by sample, in float64."""
    total = torch.zeros(n, dtype=torch.float64, device=values.device)
    return total.index_add_(0, index, values.double())


def _learning_samples(mask: Tensor, offsets: Tensor) -> Tensor:
    """[B] bool: samples with a token in `mask` [T]."""
    return _sums(mask, _sample_index(offsets, len(mask)), len(offsets) - 1) > 0


def _sample_index(offsets: Tensor, n_tokens: int) -> Tensor:
    """[T] int64: each token's sample."""
    samples = torch.arange(len(offsets) - 1, device=offsets.device)
    return samples.repeat_interleave(offsets.diff(), output_size=n_tokens)
