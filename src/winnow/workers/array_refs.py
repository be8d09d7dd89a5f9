"""References to arrays that stay on the node that made them, for those who need only their length.

    engine    segments ─► their arrays end to end, an `ArrayBlock` ───► the node's store
    driver    lengths, spans, and an `ArrayRef` each                          │
    rank, scorer     np.asarray(segment.token_ids) ◄──────────────────────────┘ fetched once a block

Ray keeps a block in the store of the worker's node (`winnow.workers.ray.actors`). Between processes
of one machine the arrays travel with the block, and its references arrive as arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from winnow.types import Trajectory

Arrays = tuple[NDArray[Any], ...]


class Handle(Protocol):
    """A small stand-in for something that lies elsewhere; it may travel freely."""

    def prefetch(self) -> None:
        """Start fetching it, so that `get` waits for less."""

    def get(self) -> Any:
        """Return what it stands for, fetched if it is not here; arrays in it are read-only.

        Raises:
            WorkerError: it is lost.
        """


class Store(Protocol):
    """Holds what a worker has, such as arrays, where other workers of its run can fetch it."""

    def put(self, value: Any) -> Handle:
        """Take in a copy of something that can be pickled; handles may be in it."""

    def clear(self) -> None:
        """Drop all that was put, unless it is dropped with the last of its handles."""


class ArrayBlock:
    """Several arrays that are stored and fetched together.

    Args:
        arrays: the arrays themselves, where they are in this process.
        handle: else a handle of the tuple of them.
    """

    def __init__(self, arrays: Arrays | None = None, handle: Handle | None = None) -> None:
        self._arrays, self.handle = arrays, handle

    def __reduce__(self) -> tuple[Any, ...]:
        # What was fetched stays behind: the receiver fetches for itself.
        return ArrayBlock, (None if self.handle else self._arrays, self.handle)

    @property
    def is_fetched(self) -> bool:
        """True if the arrays are in this process."""
        return self._arrays is not None

    def pop_arrays(self) -> Arrays | None:
        """Return the arrays and forget them, so that they can travel separately from references."""
        arrays, self._arrays = self._arrays, None
        return arrays

    def array(self, index: int) -> NDArray[Any]:
        """Return one of the arrays; the first call fetches all.

        Raises:
            WorkerError: they are lost.
        """
        if self._arrays is None:
            assert self.handle is not None
            self._arrays = self.handle.get()
        assert self._arrays is not None
        return self._arrays[index]


class ArrayRef:
    """A slice of an array of a block: its length is here, the rest is fetched when it is read.

    It takes the place of a numpy array that is only counted, sent on or given to numpy. Where the
    block's arrays travel with it, the slice itself arrives.

    Args:
        index: position of the array in the block.
        start, stop: the entries of it.
        dtype: the type as which they are read.
    """

    __slots__ = ("_dtype", "_index", "_start", "_stop", "block")

    def __init__(
        self, block: ArrayBlock, index: int, start: int, stop: int, dtype: DTypeLike
    ) -> None:
        self.block = block
        self._index, self._start, self._stop = index, start, stop
        self._dtype = np.dtype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_ref, (self.block, self._index, self._start, self._stop, self._dtype)

    def __len__(self) -> int:
        return self._stop - self._start

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> NDArray[Any]:
        piece = self.block.array(self._index)[self._start : self._stop]
        requested = self._dtype if dtype is None else np.dtype(dtype)
        if copy is False and piece.dtype != requested:
            raise ValueError(f"stored as {piece.dtype}: {requested} is a copy")
        return piece.astype(requested, copy=bool(copy))


def _rebuild_ref(block: ArrayBlock, index: int, start: int, stop: int, dtype: DTypeLike) -> Any:
    """Rebuild a reference in another process: an array where the block's arrays came along."""
    ref = ArrayRef(block, index, start, stop, dtype)
    return np.asarray(ref) if block.is_fetched else ref


@dataclass(frozen=True, eq=False)
class SplitResult:
    """A worker's result of which the arrays may stay on the worker's node.

    On a cluster only `inline` travels to the caller, with references to the blocks, which stay in
    the store of the worker's node and outlive the worker.
    """

    inline: Any
    block: ArrayBlock
    extras: ArrayBlock | None = None
    """Arrays that fewer receivers read, and that are fetched separately."""


def make_refs(*arrays: NDArray[Any]) -> tuple[tuple[ArrayRef, ...], ArrayBlock]:
    """Put arrays into a new block; returns references to them whole, and the block."""
    block = ArrayBlock(arrays)
    refs = (ArrayRef(block, i, 0, len(each), each.dtype) for i, each in enumerate(arrays))
    return tuple(refs), block


def prefetch_arrays(trajectories: Iterable[Trajectory]) -> list[ArrayBlock]:
    """Start fetching all that is stored of these answers; returns the blocks it is in."""
    arrays: list[object] = []
    for trajectory in trajectories:
        arrays += (segment.token_ids for segment in trajectory.segments)
        arrays += trajectory.extras.values()
    stored = [array for array in arrays if isinstance(array, ArrayRef)]
    blocks = {id(each.block): each.block for each in stored if not each.block.is_fetched}
    for block in blocks.values():
        if block.handle is not None:
            block.handle.prefetch()
    return list(blocks.values())


def fetch_arrays(trajectories: Iterable[Trajectory]) -> None:
    """Fetch all that is stored of these answers, side by side.

    Raises:
        WorkerError: some of it is lost.
    """
    for block in prefetch_arrays(trajectories):
        block.array(0)
