"""Split a batch's samples over data-parallel ranks by estimated work, and gather the results.

Every rank has the whole batch on its host. What is computed of all of it (advantages, selections,
corrections) is computed alike everywhere without communication; what a model computes is shared
out, and its values [T] are brought together again. The split changes nothing in what is learnt.

A sample's work is estimated by its tokens and, for attention, their square. Samples go, heaviest
first, each to the rank that has least so far (R. L. Graham, Bounds on multiprocessing timing
anomalies, 1969: never more than 4/3 of the best split, and with many samples next to it). Ranks run
in step, so each gets as many micro-batches as the one that has most; some of them are empty.

Shapes: `T` packed tokens of the batch, `B` its samples, `R` ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from winnow.learning.batch import (
    Batch,
    MicroBatch,
    cut,
    gather_tokens,
    idle,
    pack_sequences,
    update_of,
)
from winnow.observe.metrics import Metrics
from winnow.types import IntArray

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from winnow.learning.strategy import Output, Strategy

_ATTENTION = 12
"""A layer takes about 12 H^2 products for a token, and 2 H for each token before it (half of a
sample's length in the mean), so that a sample of n tokens costs as n + n^2 / (12 H)."""


class MicroBatchSharder:
    """Cut a batch's micro-batches, and gather what was computed of them.

    On a mesh each rank gets its share of the samples, and all ranks call all methods but `figures`;
    without one this process gets everything.

    Args:
        mesh: of one axis, or of two; None for a process on its own.
        width: of the model (H), which says from what length on attention costs most.
    """

    def __init__(self, mesh: DeviceMesh | None = None, width: int = 1) -> None:
        self._mesh, self._width = mesh, width
        self._ranks = 1 if mesh is None else mesh.size()
        self._rank = 0
        if mesh is not None:
            self._rank = int((mesh.mesh == dist.get_rank()).flatten().nonzero())
        self._figures = Metrics()

    def update(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
        """Cut this process's micro-batches of an update; counts are those of the whole update."""
        shares = share(batch, groups, max_tokens, self._ranks, self._width)
        if self._mesh is not None:
            self._figures.mean("ranks/spread", shares.spread)
            self._figures.mean("ranks/idle", shares.idle_share)
        return shares.ranks[self._rank]

    def everything(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """Cut this process's micro-batches of the whole batch, for passes that learn nothing."""
        every = range(batch.n_groups)
        return share(batch, every, max_tokens, self._ranks, self._width).ranks[self._rank]

    def gather(
        self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> Tensor:
        """Return [T] on the CPU: the values of every process's micro-batches in batch order."""
        own = gather_tokens(batch, microbatches, values)
        if self._mesh is None or not microbatches:  # nor has any other rank one
            return own
        # As sums of one number and zeros, which are exact: the same bits on every rank.
        meeting = own.to(device_of(self._mesh))
        for axis in range(self._mesh.ndim):
            dist.all_reduce(meeting, group=self._mesh.get_group(axis))
        return meeting.cpu()

    def figures(self) -> Metrics:
        """Report how even the shares of the updates were since the last call.

        `ranks/spread` is the heaviest rank's work over the mean, `ranks/idle` the share of empty
        micro-batches; neither is there without a mesh.
        """
        found, self._figures = self._figures, Metrics()
        return found


NO_SHARDING = MicroBatchSharder()


def run_pass(
    strategy: Strategy,
    batch: Batch,
    outputs: frozenset[Output],
    max_tokens: int,
) -> dict[Output, Tensor]:
    """Run a model on the whole batch without gradients; each output is [T] on the CPU.

    All ranks that hold the model call it.
    """
    sharder = strategy.sharder
    micro = sharder.everything(batch, max_tokens)
    found = strategy.forward(micro, outputs)
    return {n: sharder.gather(batch, micro, [values[n] for values in found]) for n in outputs}


def score_sequences(strategy: Strategy, sequences: Sequence[IntArray], max_tokens: int) -> Tensor:
    """Return [B] fp32 on the CPU: a reward model's number for the token ids of each sequence.

    Raises:
        ValueError: a sequence without a token.
    """
    batch = pack_sequences(sequences)
    scores = run_pass(strategy, batch, frozenset({"score"}), max_tokens)["score"]
    return scores[batch.offsets[1:] - 1].to(torch.float32)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank of a mesh computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@dataclass(frozen=True, eq=False)
class Shares:
    """The micro-batches of each rank, as many for one as for another."""

    ranks: list[list[MicroBatch]]
    """[R]"""
    work: NDArray[np.float64]
    """[R] as `work` estimates it."""

    @property
    def spread(self) -> float:
        """The heaviest rank's work over the mean; 1 is perfect balance."""
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
    """
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
    """Estimate the work [B] of samples of so many tokens, in tokens that attend to nothing."""
    tokens = lengths.astype(np.float64)
    return tokens + tokens**2 / (_ATTENTION * width)


def split(work: NDArray[np.float64], ranks: int) -> Sequence[NDArray[np.int64]]:
    """Return which items each rank [R] gets, in the items' order."""
    heap = [(0.0, rank) for rank in range(ranks)]
    rank_of = np.empty(len(work), dtype=np.int64)
    for item in np.argsort(-work, kind="stable").tolist():
        sum_, rank = heap[0]
        rank_of[item] = rank
        heapq.heapreplace(heap, (sum_ + float(work[item]), rank))
    return [np.flatnonzero(rank_of == rank) for rank in range(ranks)]
