"""References to arrays that stay on the node that made them; only their lengths are at hand.

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
    """A picklable reference to a value that a `Store` of another process holds."""

    def prefetch(self) -> None:
        """Start fetching the value, so that `get` waits for less."""

    def get(self) -> Any:
        """Return the value, fetched if need be; its arrays are read-only.

        Raises:
            WorkerError: the value is lost.
        """


class Store(Protocol):
    """Storage of a worker's values, such as arrays, for the other workers of its run."""

    def put(self, value: Any) -> Handle:
        """Store a copy of a value that can be pickled; it may contain handles."""

    def clear(self) -> None:
        """Drop all values, unless each is dropped with the last of its handles."""


class ArrayBlock:
    """Several arrays that are stored and fetched together.

    Args:
        arrays: the arrays, if they are in this process.
        handle: else the handle of their tuple.
    """

    def __init__(self, arrays: Arrays | None = None, handle: Handle | None = None) -> None:
        self._arrays, self.handle = arrays, handle

    def __reduce__(self) -> tuple[Any, ...]:
        # Fetched arrays are not pickled: the receiver fetches them itself.
        return ArrayBlock, (None if self.handle else self._arrays, self.handle)

    @property
    def is_fetched(self) -> bool:
        """True if the arrays are in this process."""
        return self._arrays is not None

    def pop_arrays(self) -> Arrays | None:
        """Return the arrays and drop them here, to send them separately from their references."""
        arrays, self._arrays = self._arrays, None
        return arrays

    def array(self, index: int) -> NDArray[Any]:
        """Return one of the arrays; the first call fetches all.

        Raises:
            WorkerError: the arrays are lost.
        """
        if self._arrays is None:
            assert self.handle is not None
            self._arrays = self.handle.get()
        assert self._arrays is not None
        return self._arrays[index]


class ArrayRef:
    """A slice of an array of a block, which is fetched when it is read; its length is known.

    It replaces a numpy array for code that takes its length, pickles it or gives it to numpy. It is
    unpickled as an array if the block's arrays were pickled with it.

    Args:
        index: position of the array in the block.
        start, stop: bounds of the slice.
        dtype: dtype of the result.
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
            raise ValueError(f"stored as {piece.dtype}: {requested} needs a copy")
        return piece.astype(requested, copy=bool(copy))


def _rebuild_ref(block: ArrayBlock, index: int, start: int, stop: int, dtype: DTypeLike) -> Any:
    """Unpickle a reference: an array if the block's arrays were pickled with it."""
    ref = ArrayRef(block, index, start, stop, dtype)
    return np.asarray(ref) if block.is_fetched else ref


@dataclass(frozen=True, eq=False)
class SplitResult:
    """A worker's result whose arrays may stay on the worker's node.

    On a cluster only `inline` is sent to the caller, with references to the blocks, which stay in
    the store of the worker's node and outlive the worker.
    """

    inline: Any
    block: ArrayBlock
    extras: ArrayBlock | None = None
    """Arrays that fewer receivers read; fetched separately."""


def make_refs(*arrays: NDArray[Any]) -> tuple[tuple[ArrayRef, ...], ArrayBlock]:
    """Put arrays into a new block; return a reference to each, and the block."""
    block = ArrayBlock(arrays)
    refs = (ArrayRef(block, i, 0, len(each), each.dtype) for i, each in enumerate(arrays))
    return tuple(refs), block


def prefetch_arrays(trajectories: Iterable[Trajectory]) -> list[ArrayBlock]:
    """Start fetching all arrays that these answers refer to; return their blocks."""
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
    """Fetch all arrays that these answers refer to, concurrently.

    Raises:
        WorkerError: an array is lost.
    """
    for block in prefetch_arrays(trajectories):
        block.array(0)
