"""Who runs which samples of a batch: one process all of them, or each rank a share by work.

Every rank has the whole batch on its host, so that what is computed of all of it (advantages,
selections, corrections) is computed alike everywhere and asks nobody; what a model computes is
shared out, and its values [T] are brought together again. What is learnt does not depend on how
samples were dealt.

Shapes: `T` packed tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from winnow.learning.balance import share
from winnow.learning.batch import Batch, MicroBatch, gather_tokens, micro_batches
from winnow.learning.units import device_of
from winnow.observe.metrics import Metrics


class MicroBatchSharder(Protocol):
    """Cuts micro-batches for this process, and gathers what all processes found."""

    def update(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
        """This process's micro-batches of an update; counts are those of the whole update."""
        ...

    def everything(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """This process's micro-batches of the whole batch, for passes that learn nothing."""
        ...

    def gather(
        self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> Tensor:
        """[T] on the CPU: values of each micro-batch of every process, in the batch's order."""
        ...

    def figures(self) -> Metrics:
        """How even the shares were since the last call."""
        ...


class NoSharding:
    """One process runs everything."""

    def update(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
        """See `MicroBatchSharder.update`."""
        return micro_batches(batch, groups, max_tokens)

    def everything(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """See `MicroBatchSharder.everything`."""
        return micro_batches(batch, range(batch.n_groups), max_tokens)

    def gather(
        self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> Tensor:
        """See `MicroBatchSharder.gather`."""
        return gather_tokens(batch, microbatches, values)

    def figures(self) -> Metrics:
        """None: there is nobody to be uneven with."""
        return Metrics()


class RankSharding:
    """Each rank of a mesh runs its share. All methods but `figures` are called by all ranks.

    Args:
        mesh: of one axis, or of two.
        width: of the model (H), which says from what length on attention costs most.
    """

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        self._mesh, self._width = mesh, width
        self._rank = int((mesh.mesh == dist.get_rank()).flatten().nonzero())
        self._figures = Metrics()

    def update(self, batch: Batch, groups: Iterable[int], max_tokens: int) -> list[MicroBatch]:
        """See `MicroBatchSharder.update`."""
        shares = share(batch, groups, max_tokens, self._mesh.size(), self._width)
        self._figures.mean("ranks/spread", shares.spread)
        self._figures.mean("ranks/idle", shares.idle_share)
        return shares.ranks[self._rank]

    def everything(self, batch: Batch, max_tokens: int) -> list[MicroBatch]:
        """See `MicroBatchSharder.everything`."""
        every = range(batch.n_groups)
        return share(batch, every, max_tokens, self._mesh.size(), self._width).ranks[self._rank]

    def gather(
        self, batch: Batch, microbatches: Sequence[MicroBatch], values: Sequence[Tensor]
    ) -> Tensor:
        """Gather values over the ranks: the same bits on each, as no two have the same token."""
        own = gather_tokens(batch, microbatches, values)
        if not microbatches:  # nor has any other rank one
            return own
        # As sums of one number and zeros, which are exact.
        meeting = own.to(device_of(self._mesh))
        for axis in range(self._mesh.ndim):
            dist.all_reduce(meeting, group=self._mesh.get_group(axis))
        return meeting.cpu()

    def figures(self) -> Metrics:
        """`ranks/spread`: the heaviest rank's work over the mean, of the updates; `ranks/idle`: the
        share of empty micro-batches."""
        found, self._figures = self._figures, Metrics()
        return found


NO_SHARDING = NoSharding()
