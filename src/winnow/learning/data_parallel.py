"""Collectives over the data-parallel shares of a step's batch.

A share of a batch belongs to one rank, or with sequence parallelism to a group of ranks, which hold
the same tokens. A rank has the tokens of its local samples, and numbers [B] of all samples:

    all_reduce      sums over shares: counts, and numbers [B] of which each share has some
    all_gather      a small value of each share
    all_to_all      tokens of samples, from the shares that hold them to those that need them
    reduce_figures  sums of named figures

Shapes: `T` tokens of the samples at hand, `B` samples of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from winnow.types import FloatArray, IntArray

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


class DataParallel:
    """The shares of a batch; all their ranks call each method together, in the same order.

    Args:
        mesh: of one axis, or of two; None for a single process, which holds everything: each
            method then returns its input.
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
            rank = int(np.ravel_multi_index(coordinate, mesh.shape))
            self.share, self._place = (int(at[0]) for at in np.nonzero(together == rank))

    @property
    def is_first(self) -> bool:
        """True on the first rank of a share."""
        return self._place == 0

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of each share's values, on the CPU; the same bits on every rank."""
        if self.mesh is None:
            return values
        reduced = values.to(device_of(self.mesh), copy=True)
        if self._place:  # the share's first rank contributes them
            reduced.zero_()
        dist.all_reduce(reduced, group=self._group)
        return reduced.cpu()

    def all_gather(self, value: _T) -> list[_T]:
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

    def reduce_figures(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of each figure over the shares, added up in their order."""
        first, *rest = self.all_gather(dict(figures))
        for each in rest:
            first = {name: total + each[name] for name, total in first.items()}
        return first

    def all_to_all(
        self, tensors: Sequence[Tensor], lengths: IntArray, source: IntArray, target: IntArray
    ) -> list[Tensor]:
        """Send tokens of samples to the shares that need them.

        Args:
            tensors: [T, …] each on the CPU: tokens of the local samples, in the step's order.
            lengths: [B] tokens of each sample.
            source: [B] the share that has a sample's tokens.
            target: [B] the share that needs them; -1 for none.

        Returns:
            Of each tensor the tokens of the samples that this share receives, in the step's order.
        """
        if self.mesh is None or np.array_equal(source, target):
            return list(tensors)
        local = np.flatnonzero(source == self.share)
        send = local[np.argsort(target[local], kind="stable")]
        send = send[target[send] >= 0]
        place = np.cumsum(lengths * (source == self.share)) - lengths
        rows = torch.from_numpy(token_places(place[send], lengths[send]))
        outgoing = torch.cat([_bytes(each[rows]) for each in tensors], 1)
        recv = np.flatnonzero(target == self.share)
        recv = recv[np.argsort(source[recv], kind="stable")]
        counts = self._split(target[send], lengths[send]), self._split(source[recv], lengths[recv])
        incoming = self._exchanged(outgoing, *counts)
        # From the order of their senders to that of the step.
        start, order = np.cumsum(lengths[recv]) - lengths[recv], np.argsort(recv)
        rows = torch.from_numpy(token_places(start[order], lengths[recv][order]))
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

    def _exchanged(self, outgoing: Tensor, sent: list[int], received: list[int]) -> Tensor:
        assert self.mesh is not None
        device = device_of(self.mesh)
        incoming = torch.empty(sum(received), outgoing.shape[1], dtype=torch.uint8, device=device)
        dist.all_to_all_single(incoming, outgoing.to(device), received, sent, group=self._group)
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


SINGLE_PROCESS = DataParallel()


@dataclass(frozen=True, eq=False)
class TokenColumn:
    """Numbers [T] about a step's tokens that lie in parts."""

    holders: IntArray
    """[B] the part that each sample is in."""
    parts: Sequence[ArrayLike]
    """Each those of its samples, in the step's order; read on demand."""

    def of(self, samples: IntArray, lengths: IntArray) -> FloatArray:
        """Return the numbers of some samples, from the parts that have them.

        Args:
            samples: in the step's order.
            lengths: [B] tokens of each sample of the step.
        """
        numbers = np.zeros(lengths[samples].sum(), dtype=np.float32)
        starts = np.cumsum(lengths[samples]) - lengths[samples]
        for share in np.unique(self.holders[samples]).tolist():
            stored, selected = np.flatnonzero(self.holders == share), self.holders[samples] == share
            places = np.cumsum(lengths[stored]) - lengths[stored]
            places = places[np.searchsorted(stored, samples[selected])]
            counts = lengths[samples[selected]]
            part = np.asarray(self.parts[share])
            numbers[token_places(starts[selected], counts)] = part[token_places(places, counts)]
        return numbers


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
