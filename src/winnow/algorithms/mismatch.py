"""How far the policy that sampled the tokens is from the one that learns from them.

Given as sums, so that micro-batches and ranks add up; `mismatch_figures` reads them.

Shapes: `T` packed tokens. Log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
OUTSIDE = (0.5, 2.0)
FLAT_TOLERANCE = 1e-12
"""A variance below this share of the mean square is float noise."""


def mismatch_sums(old: Tensor, behav: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over `mask` [T] in float64 and without gradient, for `mismatch_figures`.

    Args:
        old: [T] the policy that learns: before the step, or in its first update the current one.
        behav: [T] the policy that sampled.
        mask: [T] bool, tokens that the policy wrote.
    """
    with torch.no_grad():
        old, behav = old[mask].double(), behav.to(old.device)[mask].double()
        delta = old - behav
        log_w = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        w = log_w.exp()
        p_old, p_behav = old.exp(), behav.exp()
        return {
            "tokens": mask.sum().double(),
            "old": old.sum(),
            "behav": behav.sum(),
            "abs_delta": delta.abs().sum(),
            "log_w": log_w.sum(),
            "k3": (w - 1 - log_w).sum(),
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


def max_delta(old: Tensor, behav: Tensor, mask: Tensor) -> Tensor:
    """The largest |old - behav| over `mask` [T], a scalar; 0 where it is empty."""
    with torch.no_grad():
        delta = (old - behav.to(old.device))[mask].double().abs()
        return delta.max() if delta.numel() else delta.new_zeros(())


def mismatch_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """The means that `mismatch_sums` is for, over all tokens together; none for no tokens.

    With l = old - behav and w = exp(l), l held within +-20: `k1` = mean -l and `k3` = mean of
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
        _variance(mean["p_old"], mean["p_old_square"]),
        _variance(mean["p_behav"], mean["p_behav_square"]),
    )
    if not x or not y:
        return 1.0 if mean["p_difference_square"] == 0.0 else math.nan
    covariance = mean["p_product"] - mean["p_old"] * mean["p_behav"]
    return min(max(covariance / math.sqrt(x * y), -1.0), 1.0)


def _variance(mean: float, mean_square: float) -> float:
    variance = mean_square - mean**2
    return variance if variance > FLAT_TOLERANCE * mean_square else 0.0


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
