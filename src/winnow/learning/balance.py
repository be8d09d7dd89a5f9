"""Which rank runs which samples of an update, so that all are done at about the same time.

A sample's work is estimated by its tokens and, for attention, their square. Samples go, heaviest
first, each to the rank that has least so far (R. L. Graham, Bounds on multiprocessing timing
anomalies, 1969: never more than 4/3 of the best split, and with many samples next to it). Ranks run
in step, so each gets as many micro-batches as the one that has most; some of them are empty. None
of this changes what an update learns from.

Shapes: `B` samples, `R` ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from winnow.learning.batch import Batch, MicroBatch, cut, idle, update_of

_ATTENTION = 12
"""A layer takes about 12 H^2 products for a token, and 2 H for each token before it (half of a
sample's length in the mean), so that a sample of n tokens costs as n + n^2 / (12 H)."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The micro-batches of each rank, as many for one as for another."""

    ranks: list[list[MicroBatch]]
    """[R]"""
    work: NDArray[np.float64]
    """[R] as `work` tells it."""

    @property
    def spread(self) -> float:
        """The most that a rank has over what each has in the mean: 1 is perfect balance."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def idle_share(self) -> float:
        """The share of all micro-batches that is empty."""
        every = [micro for rank in self.ranks for micro in rank]
        return sum(not micro.lengths for micro in every) / max(1, len(every))


def share(batch: Batch, groups: Iterable[int], max_tokens: int, ranks: int, width: int) -> Shares:
    """Cut an update into micro-batches for each of `ranks`; counts are those of the whole.

    Args:
        groups: ordinals of the update's groups.
        max_tokens: packed tokens of a micro-batch.
        width: of the model (H), which says from what length on attention costs most.

    Raises:
        ValueError: a number below 1.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    update = update_of(batch, groups)
    lengths_B = np.diff(batch.offsets.numpy())[update.samples]
    work_B = work(lengths_B, width)
    parts = split(work_B, ranks)
    found = [cut(batch, update, update.samples[part], max_tokens) for part in parts]
    most = max(map(len, found))
    for own in found:
        own += [idle(batch, update) for _ in range(most - len(own))]
    return Shares(found, np.array([work_B[part].sum() for part in parts]))


def work(lengths: NDArray[np.int64], width: int) -> NDArray[np.float64]:
    """[B] what samples of so many tokens cost, in tokens that attend to nothing.

    Raises:
        ValueError: a width below 1.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    tokens = lengths.astype(np.float64)
    return tokens + tokens**2 / (_ATTENTION * width)


def split(work: NDArray[np.float64], ranks: int) -> Sequence[NDArray[np.int64]]:
    """[R] which items each rank gets, in the items' order."""
    heap = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(work), dtype=np.int64)
    for item in np.argsort(-work, kind="stable").tolist():
        sum_, rank = heap[0]
        rank_of[item] = rank
        heapq.heapreplace(heap, (sum_ + float(work[item]), rank))
    return [np.flatnonzero(rank_of == rank) for rank in range(ranks)]
