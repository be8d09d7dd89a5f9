"""Tokens that another policy sampled than the one that learns from them: how far, and what to do.

Three policies meet: `behav` sampled the tokens, `old` is the proximal policy, `logp` the current
one. With l = old - behav a token, w = exp(l) weighs its loss (importance sampling), and tokens or
samples that are too far off are rejected. Where `old` is the current policy itself (fused), give
logp for it; where it is the sampler (bypass), weigh by logp against behav. Nothing here carries a
gradient. Whole samples are needed, no more: results for the micro-batches of a batch are those
for the batch, but for weights that are divided by their mean.

`mismatch_sums` measures the distance, as sums that add up over micro-batches and ranks, and how it
grows with the number of updates between the two policies.

Shapes: `T` packed tokens, `B` samples. Log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.kl import LOG_RATIO_BOUND
from winnow.algorithms.losses import variance

OUTSIDE = (0.5, 2.0)
"""Ratios beyond these are counted as outside in the mismatch."""


@dataclass(frozen=True, eq=False)
class Corrected:
    """The tokens that are left to learn from, and the weight of each."""

    loss_mask: Tensor
    """[T] bool: the tokens of the given loss_mask that were not rejected."""
    weights: Tensor | None
    """[T] in old's dtype, the factor of each token's loss, never negative; 1 off loss_mask.
    None where the loss is not weighted."""
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
    weight: Mapping[str, Any] | None = None,
    rejection: Mapping[str, Any] | None = None,
    all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Corrected:
    """Reject, then weigh whole samples: a batch's or a micro-batch's.

    Args:
        old, behav: [T] the two policies' log-probs; off gen_mask they are not read.
        gen_mask: [T] bool, tokens that the policy wrote; samples' statistics are over these.
        loss_mask: [T] bool, a part of gen_mask.
        offsets: [B+1] int64: sample b is [offsets[b], offsets[b+1]).
        weight: `name`, one of `WEIGHTS`: min(w, `cap`), or w within [`low`, `high`] and 0 outside;
            the `level` of w; with `normalize`, weights are divided by their mean over these
            samples. None for no weights.
        rejection: `name`, one of `REJECTIONS`, and further arguments of `rejected`; None rejects
            nothing.
        all_reduce: brings sums of that mean together where other processes have the rest of it.
    """
    l_T = log_ratio(old, behav, gen_mask)
    accepted = loss_mask
    if rejection is not None:
        accepted = loss_mask & ~rejected(l_T, gen_mask, offsets, **rejection)
    samples = _Samples(offsets, len(old))
    sums = {
        "rejected_tokens": (loss_mask & ~accepted).sum(),
        "rejected_samples": ((samples.sums(loss_mask) > 0) & ~(samples.sums(accepted) > 0)).sum(),
    }
    if weight is None:
        return Corrected(accepted, None, sums)
    level = weight["level"]
    w = importance_ratio(l_T, offsets, level)
    if weight["name"] == "truncated":  # truncated importance sampling (TIS)
        values = w.clamp(max=weight["cap"])
    else:  # IcePop (Ring-1T, arXiv 2510.18855)
        is_within = (w >= weight["low"]) & (w <= weight["high"])
        values = torch.where(is_within, w, 0.0)
    sums["weight"] = torch.where(accepted, values, 0.0).double().sum()
    sums["weight_bound"] = (accepted & (values != w)).sum()
    # 1, not 0 or NaN, off the mask: 0 times a weight that is not finite would be a NaN gradient.
    weights = torch.where(accepted, values, 1.0)
    if weight.get("normalize"):
        weights = divided_by_mean(weights, accepted, offsets, level, all_reduce)
    return Corrected(accepted, weights, sums)


def log_ratio(old: Tensor, behav: Tensor, gen_mask: Tensor) -> Tensor:
    """l = old - behav [T] without gradient, 0 off gen_mask and where both are equal, be it -inf."""
    old, behav = old.detach(), behav.detach().to(old.dtype)
    return torch.where(gen_mask & (old != behav), old - behav, 0.0)


WEIGHTS = ("truncated", "masked")


def importance_ratio(log_ratio: Tensor, offsets: Tensor, level: str) -> Tensor:
    """w [T]: exp(clamp(l, +-20)) of each token, or at level "sequence" of its sample's sum of l.

    Args:
        log_ratio: [T] from `log_ratio`, 0 off gen_mask.
        offsets: [B+1] int64.
        level: "token" or "sequence".
    """
    l_T = log_ratio
    if level == "sequence":
        samples = _Samples(offsets, len(log_ratio))
        l_T = samples.sums(log_ratio)[samples.index_T].to(log_ratio.dtype)
    return l_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def divided_by_mean(
    weights: Tensor,
    mask: Tensor,
    offsets: Tensor,
    level: str,
    all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """Return `weights` [T] over their mean; as they are where the mean is 0 or nothing counts.

    The mean is over the tokens in `mask` [T], or at level "sequence", where a sample's weights
    are one number, over the samples with such a token.
    """
    weights_T = torch.where(mask, weights, 0.0).double()
    sums = weights_T.sum(), mask.sum().double()
    if level == "sequence":
        samples = _Samples(offsets, len(mask))
        tokens_B = samples.sums(mask)
        of_samples = (samples.sums(weights_T) / tokens_B.clamp(min=1)).sum()
        sums = of_samples, (tokens_B > 0).sum().double()
    whole, count = all_reduce(torch.stack(sums))
    return weights * torch.where(whole > 0, count / whole, 1.0).to(weights.dtype)


REJECTIONS = ("k1", "k2", "k3")


def rejected(
    log_ratio: Tensor,
    gen_mask: Tensor,
    offsets: Tensor,
    name: str,
    *,
    level: str,
    over: str,
    **bounds: float,
) -> Tensor:
    """Return the tokens [T] bool that are too far from `old` to learn from.

    Args:
        log_ratio: [T] from `log_ratio`.
        gen_mask: [T] bool; a sample's statistic is over all that the policy wrote of it.
        offsets: [B+1] int64.
        name: one of `REJECTIONS`: "k1" rejects where behav / old leaves [low, high], "k2" where
            l^2 / 2 and "k3" where e^l - 1 - l exceeds `bound`.
        level: "token" or "sample", single tokens or whole samples.
        over: "sum", "mean" or "max" of a sample's tokens; without use for tokens. Of k1, sum bounds
            the ratio of the sequences, mean the geometric mean of the tokens' ratios, and max each
            of these.
        bounds: `low` and `high`, or `bound`.

    Returns:
        True within gen_mask only. A statistic that is NaN is rejected.
    """
    samples = _Samples(offsets, len(log_ratio))
    count_B = samples.sums(gen_mask)

    def fold(values: Tensor) -> Tensor:
        """[B] sum, mean or max of the written tokens' values [T]; 0 for a sample without one."""
        if level == "token":
            return values
        if over == "max":
            shut = values.masked_fill(~gen_mask, -torch.inf)
            top = torch.full_like(count_B, -torch.inf)
            top.scatter_reduce_(0, samples.index_T, shut, "amax")
            return top.masked_fill(count_B == 0, 0.0)
        total = samples.sums(values.masked_fill(~gen_mask, 0.0))
        return total / count_B.clamp(min=1) if over == "mean" else total

    l_T = log_ratio.double()
    # A comparison with NaN is false: it stays outside.
    if name == "k1":
        low, high = l_T.new_tensor([bounds["low"], bounds["high"]], dtype=torch.float64).log()
        # The largest of l = -k1 is the smallest of k1.
        inside = (-fold(l_T) >= low) & (fold(-l_T) <= high)
    elif name == "k2":
        inside = fold(l_T.square() / 2) <= bounds["bound"]
    else:
        inside = fold(l_T.expm1() - l_T) <= bounds["bound"]
    inside_T: Tensor = inside if level == "token" else inside[samples.index_T]
    return gen_mask & ~inside_T


class _Samples:
    """The samples of packed tokens; `index_T` is each token's sample."""

    def __init__(self, offsets: Tensor, n_tokens: int) -> None:
        self._n = len(offsets) - 1
        numbers = torch.arange(self._n, device=offsets.device)
        self.index_T = numbers.repeat_interleave(offsets.diff(), output_size=n_tokens)

    def sums(self, values: Tensor) -> Tensor:
        """[B] sums of values [T] by sample, in float64."""
        total = torch.zeros(self._n, dtype=torch.float64, device=values.device)
        return total.index_add_(0, self.index_T, values.double())


OLDEST_AGE = 8
"""The mismatch is reported by age up to this one, which stands for all above it."""


def mismatch_sums(
    old: Tensor, behav: Tensor, mask: Tensor, age: Tensor | None = None
) -> dict[str, Tensor]:
    """Return sums over `mask` [T] in float64 and without gradient, for `mismatch_figures`.

    Args:
        old: [T] the policy that learns: before the step, or in its first update the current one.
        behav: [T] the policy that sampled.
        mask: [T] bool, tokens that the policy wrote.
        age: [T] integers, weight versions between the policy that sampled the token and the one
            that learns: adds `tokens`, `abs_delta` and `k3` of each as `age_K/NAME`; those above
            `OLDEST_AGE` count as that.
    """
    with torch.no_grad():
        old, behav = old[mask].double(), behav.to(old.device)[mask].double()
        delta = old - behav
        log_w = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        w = log_w.exp()
        p_old, p_behav = old.exp(), behav.exp()
        by_age = {
            "tokens": torch.ones_like(delta),
            "abs_delta": delta.abs(),
            "k3": w - 1 - log_w,
        }
        sums = {
            **{name: values.sum() for name, values in by_age.items()},
            "old": old.sum(),
            "behav": behav.sum(),
            "log_w": log_w.sum(),
            "w": w.sum(),
            "w_square": w.square().sum(),
            "outside": ((w < OUTSIDE[0]) | (w > OUTSIDE[1])).sum().double(),
            "p_old": p_old.sum(),
            "p_behav": p_behav.sum(),
            "p_old_square": p_old.square().sum(),
            "p_behav_square": p_behav.square().sum(),
            "p_product": (p_old * p_behav).sum(),
            "p_difference_square": (p_old - p_behav).square().sum(),
        }
        if age is not None:
            age, none = age.to(old.device)[mask].clamp(0, OLDEST_AGE), old.new_zeros(OLDEST_AGE + 1)
            for name, values in by_age.items():
                of_age = none.index_add(0, age, values)
                sums |= {f"age_{k}/{name}": of_age[k] for k in range(OLDEST_AGE + 1)}
        return sums


def max_delta(old: Tensor, behav: Tensor, mask: Tensor) -> Tensor:
    """Return the largest |old - behav| over `mask` [T], a scalar; 0 where it is empty."""
    with torch.no_grad():
        delta = (old - behav.to(old.device))[mask].double().abs()
        return delta.max() if delta.numel() else delta.new_zeros(())


def mismatch_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Turn `mismatch_sums` of all tokens together into figures; none for no tokens.

    With l = old - behav and w = exp(l), l clamped to +-20: `k1` = mean -l and `k3` = mean of
    w - 1 - l estimate KL(behav || old); `chi2` = mean w^2 - 1; `ess` = (sum w)^2 / (n sum w^2),
    the effective share of the tokens; `outside` the share of w beyond `OUTSIDE`; `pearson` the
    correlation of the two probabilities (where one of them does not vary: 1 if they are equal,
    else NaN); `ppl_old`, `ppl_behav` and `ppl_ratio`, the first over the second, perplexities.
    """
    n = sums["tokens"]
    if not n:
        return {}
    mean = {name: total / n for name, total in sums.items()}
    return {
        "abs_delta": mean["abs_delta"],
        "k1": -mean["log_w"],
        "k3": mean["k3"],
        "chi2": mean["w_square"] - 1,
        "ess": mean["w"] ** 2 / mean["w_square"],
        "outside": mean["outside"],
        "pearson": _pearson(mean),
        "ppl_old": _exp(-mean["old"]),
        "ppl_behav": _exp(-mean["behav"]),
        "ppl_ratio": _exp(mean["behav"] - mean["old"]),
    }


def _pearson(mean: Mapping[str, float]) -> float:
    x, y = (
        variance(mean["p_old_square"], mean["p_old"], 1),
        variance(mean["p_behav_square"], mean["p_behav"], 1),
    )
    if not x or not y:
        return 1.0 if mean["p_difference_square"] == 0.0 else math.nan
    covariance = mean["p_product"] - mean["p_old"] * mean["p_behav"]
    return min(max(covariance / math.sqrt(x * y), -1.0), 1.0)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
