"""The ranks that hold a model together, and what they tell each other of a step's batch.

Each share of a batch is of one rank, or with sequence parallelism of a group of them, which hold
the same tokens. A rank has the tokens of its own samples, and numbers [B] of all:

    total   sums over shares: counts, and numbers [B] of which each share knows some
    every   a small value of each share
    moved   tokens of samples, from the shares that hold them to those that are to

Shapes: `T` tokens of the samples at hand, `B` samples of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from winnow.types import IntArray

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


class Peers:
    """The shares of a batch; all their ranks call each method together, in the same order.

    Args:
        mesh: of one axis, or of two; None for a process on its own, which holds everything: there
            all that is given comes back as it is.
        together: how many neighbouring ranks of the mesh have a share together; or the ranks of
            each share, [shares, ranks], in which every column ascends.
    """

    def __init__(self, mesh: DeviceMesh | None = None, together: int | IntArray = 1) -> None:
        self.mesh = mesh
        if isinstance(together, int):
            together = np.arange(together if mesh is None else mesh.size()).reshape(-1, together)
        self._ranks = together
        self.shares = len(together)
        """The number of shares."""
        self.share = self._place = 0
        if mesh is not None:
            coordinate = mesh.get_coordinate()
            assert coordinate is not None, "this rank is on the mesh"
            place = int(np.ravel_multi_index(coordinate, mesh.shape))
            self.share, self._place = (int(at[0]) for at in np.nonzero(together == place))

    @property
    def is_first(self) -> bool:
        """True on the first rank of a share."""
        return self._place == 0

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of each share's values, on the CPU; the same bits on every rank."""
        if self.mesh is None:
            return values
        meeting = values.to(device_of(self.mesh), copy=True)
        if self._place:  # the share's first rank has given them
            meeting.zero_()
        dist.all_reduce(meeting, group=self._group)
        return meeting.cpu()

    def every(self, value: _T) -> list[_T]:
        """Return the values of all shares, in their order."""
        if self.mesh is None:
            return [value]
        values = [value]
        for axis in reversed(range(self.mesh.ndim)):
            group = self.mesh.get_group(axis)
            parts: list[list[_T]] = [[]] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = [each for part in parts for each in part]
        return [values[first] for first in self._ranks[:, 0].tolist()]

    def sums(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of each figure over the shares, added up in their order."""
        first, *others = self.every(dict(figures))
        for each in others:
            first = {name: total + each[name] for name, total in first.items()}
        return first

    def moved(
        self, tensors: Sequence[Tensor], lengths: IntArray, held: IntArray, wanted: IntArray
    ) -> list[Tensor]:
        """Send tokens of samples to the shares that are to have them.

        Args:
            tensors: [T, …] each on the CPU: tokens of the samples held here, in the step's order.
            lengths: [B] tokens of each sample.
            held: [B] the share that has a sample's tokens.
            wanted: [B] the share that is to have them; -1 for none.

        Returns:
            Of each tensor the tokens of the samples wanted here, in the step's order.
        """
        if self.mesh is None or np.array_equal(held, wanted):
            return list(tensors)
        own = np.flatnonzero(held == self.share)
        sent = own[np.argsort(wanted[own], kind="stable")]
        sent = sent[wanted[sent] >= 0]
        place = np.cumsum(lengths * (held == self.share)) - lengths
        rows = torch.from_numpy(token_places(place[sent], lengths[sent]))
        outgoing = torch.cat([_bytes(each[rows]) for each in tensors], 1)
        come = np.flatnonzero(wanted == self.share)
        come = come[np.argsort(held[come], kind="stable")]
        counts = self._split(wanted[sent], lengths[sent]), self._split(held[come], lengths[come])
        incoming = self._exchanged(outgoing, *counts)
        # From the order of their senders to that of the step.
        start, order = np.cumsum(lengths[come]) - lengths[come], np.argsort(come)
        rows = torch.from_numpy(token_places(start[order], lengths[come][order]))
        parts = torch.split(incoming[rows], [_token_bytes(each) for each in tensors], 1)
        return [
            part.flatten().clone().view(each.dtype).view(-1, *each.shape[1:])
            for part, each in zip(parts, tensors, strict=True)
        ]

    def _split(self, shares: IntArray, lengths: IntArray) -> list[int]:
        """Count the tokens for each rank of the mesh, of samples with these shares and lengths."""
        counts = np.zeros(self._ranks.size, dtype=np.int64)
        np.add.at(counts, self._ranks[shares, self._place], lengths)
        return counts.tolist()

    def _exchanged(self, outgoing: Tensor, sent: list[int], come: list[int]) -> Tensor:
        assert self.mesh is not None
        device = device_of(self.mesh)
        incoming = torch.empty(sum(come), outgoing.shape[1], dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing.to(device), come, sent, group=self._group)
        return incoming.cpu()

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        """All ranks of the mesh, in its order."""
        assert self.mesh is not None
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        ranks, group = self.mesh.mesh.flatten().tolist(), dist.group.WORLD
        assert group is not None
        assert ranks == list(range(group.size())), "a mesh of two axes has all ranks"
        return group


ALONE = Peers()


def token_places(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the places of samples' tokens, sample after sample, from where each begins."""
    offsets = np.cumsum(lengths) - lengths
    places: IntArray = np.arange(lengths.sum()) + np.repeat(starts - offsets, lengths)
    return places


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank of a mesh computes on."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _token_bytes(values: Tensor) -> int:
    """Return the bytes of a token's entry in values [T, …]."""
    return values.shape[1:].numel() * values.itemsize


def _bytes(values: Tensor) -> Tensor:
    """[T, bytes of a token's entry]."""
    flat = values.contiguous().flatten().view(torch.uint8)
    return flat.view(len(values), _token_bytes(values))
