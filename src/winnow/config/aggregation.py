"""The names of `winnow.algorithms.aggregation`, for each section that has a loss."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean-token-mean",
]
"""What "mean" means in a loss."""
