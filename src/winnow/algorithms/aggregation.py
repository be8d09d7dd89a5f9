"""Aggregation of one number a token to one number an update, by the names of a recipe.

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
    """The counts that an aggregation may divide by."""

    ones: Tensor
    """[B] in float64, so that integer counts divide exactly."""
    sample_tokens: Tensor
    """[B] counted tokens of each sample."""
    group_tokens: Tensor
    """[B] counted tokens of each sample's group, over the update."""
    tokens: int
    """Counted tokens of the update."""
    samples: int
    """Samples of the update with a counted token."""
    groups: int
    """Groups of the update with a counted token."""
    norm_tokens: float | None
    """A constant length in tokens."""


def seq_mean_token_sum_norm(n: Denominators) -> Tensor:
    """Weigh as seq-mean-token-sum over a constant length [B] (Dr. GRPO, arXiv 2503.20783)."""
    if n.norm_tokens is None or not n.norm_tokens > 0:
        raise ValueError(
            f"seq-mean-token-sum-norm needs norm_tokens above 0, got {n.norm_tokens}; "
            "give the response limit"
        )
    return n.ones / max(n.samples, 1) / n.norm_tokens


AGGREGATIONS: Mapping[str, Callable[[Denominators], Tensor]] = {
    # The mean over all tokens (DAPO, arXiv 2503.14476, section 3.3).
    "token-mean": lambda n: n.ones / max(n.tokens, 1),
    # The mean over samples of the mean over a sample's tokens (GRPO, arXiv 2402.03300, eq. 3).
    "seq-mean-token-mean": lambda n: n.ones / (n.sample_tokens.clamp(min=1) * max(n.samples, 1)),
    "seq-mean-token-sum": lambda n: n.ones / max(n.samples, 1),
    "token-sum": lambda n: n.ones,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
    # The mean over groups of the mean over a group's tokens (ScaleRL, arXiv 2510.13786).
    "prompt-mean-token-mean": lambda n: n.ones / (n.group_tokens.clamp(min=1) * max(n.groups, 1)),
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
    """Return one micro-batch's share of the update's aggregate of `values`; shares add up to it.

    Args:
        values: [T]; tokens outside the mask are never read, be they infinite or NaN.
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
    ones = torch.ones_like(group_tokens, dtype=torch.float64)
    counts = Denominators(ones, sample_tokens, group_tokens, tokens, samples, groups, norm_tokens)
    weights_B = AGGREGATIONS[name](counts).to(values.dtype)
    return (torch.where(mask, values, 0.0) * weights_B[sample_index]).sum()
