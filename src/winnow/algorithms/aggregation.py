"""Aggregation of one number a token to one number an update, by the names of a recipe.

Each aggregation weighs all tokens of a sample alike, so it is one weight a sample [B], made of
counts. The counts are the update's, over all its micro-batches and ranks: what micro-batches return
just adds up, and no split, order or packing changes the sum.

Shapes: `T` packed tokens and `B` samples of one micro-batch. A sample without a counted token
is no sample, a group without one no group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
)


@dataclass(frozen=True)
class UpdateCounts:
    """The divisors of an update's losses: integers over all its micro-batches and ranks."""

    tokens: int
    """Tokens in loss_mask."""
    samples: int
    """Samples with such a token."""
    groups: int
    """Groups with such a token."""


def aggregate(
    values: Tensor,
    mask: Tensor,
    sample_index: Tensor,
    name: str,
    *,
    group_tokens: Tensor,
    counts: UpdateCounts,
    norm_tokens: float | None = None,
) -> Tensor:
    """Return one micro-batch's share of the update's aggregate of `values`; shares add up to it.

    Args:
        values: [T]; tokens outside the mask are never read, be they infinite or NaN.
        mask: [T] bool, the counted tokens.
        sample_index: [T] int64, each token's sample in [0, B).
        name: one of `AGGREGATIONS`.
        group_tokens: [B] int64, counted tokens of each sample's group, over the update.
        norm_tokens: the constant length of seq-mean-token-sum-norm.

    Returns:
        A scalar in the values' dtype; 0 when nothing is counted.
    """
    ones = torch.ones_like(group_tokens, dtype=torch.float64)  # integer counts divide exactly
    match name:
        case "token-mean":  # DAPO, arXiv 2503.14476, section 3.3
            weights_B = ones / max(counts.tokens, 1)
        case "seq-mean-token-mean":  # GRPO, arXiv 2402.03300, eq. 3
            tokens_B = torch.zeros_like(group_tokens).index_add_(0, sample_index, mask.long())
            weights_B = ones / (tokens_B.clamp(min=1) * max(counts.samples, 1))
        case "seq-mean-token-sum":
            weights_B = ones / max(counts.samples, 1)
        case "token-sum":
            weights_B = ones
        case "seq-mean-token-sum-norm":  # over a constant length: Dr. GRPO, arXiv 2503.20783
            assert norm_tokens, "the caller gives the response limit"
            weights_B = ones / max(counts.samples, 1) / norm_tokens
        case _:  # "prompt-mean-token-mean": ScaleRL, arXiv 2510.13786
            assert name in AGGREGATIONS, name
            weights_B = ones / (group_tokens.clamp(min=1) * max(counts.groups, 1))
    weights_B = weights_B.to(values.dtype)
    return (torch.where(mask, values, 0.0) * weights_B[sample_index]).sum()
