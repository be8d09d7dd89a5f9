"""What "mean" means: from values a token to one number, over a whole update.

Each aggregation weighs all tokens of a sample alike, so it is a function from counts to one
weight a sample [B]. The counts are the update's, over all its micro-batches and ranks: what
micro-batches return just adds up, and no split, order or packing changes the sum.

Shapes: `T` packed tokens and `B` samples of one micro-batch. A sample without a counted token
is no sample, a group without one no group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Denominators:
    """What there is to divide by."""

    sample_tokens: Tensor
    """[B] counted tokens of each sample."""
    group_tokens: Tensor
    """[B] counted tokens of each sample's group, over the update."""
    tokens: int
    """Of the update."""
    samples: int
    """Of the update, with a counted token."""
    groups: int
    """Of the update, with a counted token."""
    norm_tokens: float | None
    """A constant length in tokens."""


def token_mean(n: Denominators) -> Tensor:
    """[B] 1 / tokens: the mean over all tokens (DAPO, arXiv 2503.14476, section 3.3)."""
    return _ones(n) / max(n.tokens, 1)


def seq_mean_token_mean(n: Denominators) -> Tensor:
    """[B] mean over samples of the mean over a sample's tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    return _ones(n) / (n.sample_tokens.clamp(min=1) * max(n.samples, 1))


def seq_mean_token_sum(n: Denominators) -> Tensor:
    """[B] mean over samples of the sum over a sample's tokens."""
    return _ones(n) / max(n.samples, 1)


def token_sum(n: Denominators) -> Tensor:
    """[B] ones: the sum over all tokens."""
    return _ones(n)


def seq_mean_token_sum_norm(n: Denominators) -> Tensor:
    """[B] seq-mean-token-sum over a constant length (Dr. GRPO, arXiv 2503.20783)."""
    if n.norm_tokens is None or not n.norm_tokens > 0:
        raise ValueError(
            f"seq-mean-token-sum-norm needs norm_tokens above 0, got {n.norm_tokens}; "
            "give the response limit"
        )
    return seq_mean_token_sum(n) / n.norm_tokens


def prompt_mean_token_mean(n: Denominators) -> Tensor:
    """[B] mean over groups of the mean over a group's tokens (ScaleRL, arXiv 2510.13786)."""
    return _ones(n) / (n.group_tokens.clamp(min=1) * max(n.groups, 1))


AGGREGATIONS: Mapping[str, Callable[[Denominators], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "token-sum": token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    "prompt-mean-token-mean": prompt_mean_token_mean,
}


def aggregate(
    values: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    name: str,
    *,
    group_tokens: Tensor,
    tokens: int,
    samples: int,
    groups: int,
    norm_tokens: float | None = None,
) -> Tensor:
    """One micro-batch's share of the update's aggregate of `values`; the shares add up to it.

    Args:
        values: [T]; what stands outside the mask is never read, be it infinite or NaN.
        mask: [T] bool, the counted tokens.
        sample_index: [T] int64, each token's sample in [0, B).
        name: a key of `AGGREGATIONS`.
        group_tokens: [B] int64, counted tokens of each sample's group, over the update.
        tokens, samples, groups: counts of the update.
        norm_tokens: the constant length of seq-mean-token-sum-norm.

    Returns:
        A scalar in the values' dtype; 0 when nothing is counted.

    Raises:
        ValueError: an unknown name, or a norm_tokens that is missing or not above 0.
    """
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {name!r}")
    sample_tokens = torch.zeros_like(group_tokens).index_add_(0, sample_index, mask.long())
    counts = Denominators(sample_tokens, group_tokens, tokens, samples, groups, norm_tokens)
    weights_B = AGGREGATIONS[name](counts).to(values.dtype)
    return (torch.where(mask, values, 0.0) * weights_B[sample_index]).sum()


def _ones(n: Denominators) -> Tensor:
    """[B] in float64, so that integer counts divide exactly."""
    return torch.ones_like(n.group_tokens, dtype=torch.float64)
