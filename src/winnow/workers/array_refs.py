"""Arrays that stay on the node that made them, and the handles that travel in their stead.

    engine    segments ─► their arrays, end to end ──────► the node's store
    driver    lengths, spans, and a `ArrayRef` each     │
    rank, scorer     np.asarray(segment.token_ids) ◄───────┘ fetched, once a shelf

How something is kept is a handle's affair (Ray's: `winnow.workers.ray.wire`). Between processes
of one machine, and within one, the handle is the thing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from winnow.types import Group, Trajectory


class Handle(Protocol):
    """Stands for something that may lie elsewhere; small, and free to travel."""

    def begin(self) -> None:
        """Have it fetched, so that `get` waits for less."""
        ...

    def get(self) -> Any:
        """What it stands for, fetched if it is not here; arrays in it are read-only.

        Raises:
            WorkerError: it is lost.
        """
        ...


@dataclass(frozen=True, eq=False)
class LocalRef:
    """The handle that is the thing itself."""

    value: Any

    def begin(self) -> None:
        """It is here."""

    def get(self) -> Any:
        """See `Handle.get`."""
        return self.value


@dataclass(frozen=True, eq=False)
class SplitResult:
    """What a worker's method returns of which the caller is to have only a part.

    `told` travels. `kept` is a `LocalRef` where it is returned; the caller gets a handle. On a
    cluster that stays in the store of the worker's node, and outlives the worker.
    """

    told: Any
    kept: Handle


class ArrayBlock:
    """Arrays behind one handle, which is of a tuple of them."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self._found: tuple[NDArray[Any], ...] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayBlock, (self.handle,)

    @property
    def is_fetched(self) -> bool:
        """Whether its arrays are in this process."""
        return self._found is not None

    def array(self, index: int) -> NDArray[Any]:
        """One of them; all are fetched the first time.

        Raises:
            WorkerError: they are lost.
        """
        if self._found is None:
            self._found = self.handle.get()
        return self._found[index]


class ArrayRef:
    """A piece of an array on a shelf: its length is here, the rest is fetched when it is read.

    Takes the place of a numpy array where that is only counted, sent on or given to numpy.

    Args:
        index: which array of the shelf.
        start, stop: which entries of it.
        dtype: as which they are read.
    """

    __slots__ = ("_dtype", "_index", "_start", "_stop", "shelf")

    def __init__(
        self, shelf: ArrayBlock, index: int, start: int, stop: int, dtype: DTypeLike
    ) -> None:
        self.shelf = shelf
        self._index, self._start, self._stop = index, start, stop
        self._dtype = np.dtype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        place = self.shelf, self._index, self._start, self._stop, self._dtype
        return ArrayRef, place

    def __len__(self) -> int:
        return self._stop - self._start

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> NDArray[Any]:
        piece = self.shelf.array(self._index)[self._start : self._stop]
        wanted = self._dtype if dtype is None else np.dtype(dtype)
        if copy is False and piece.dtype != wanted:
            raise ValueError(f"stored as {piece.dtype}: {wanted} is a copy")
        return piece.astype(wanted, copy=bool(copy))


@dataclass(frozen=True)
class Placeholder:
    """Where an array was taken out, to be put on a shelf."""

    length: int
    dtype: str

    @classmethod
    def of(cls, array: NDArray[Any] | ArrayRef, dtype: DTypeLike) -> Any:
        """In the place of an array, which will be read as `dtype`."""
        return cls(len(array), np.dtype(dtype).str)

    def __len__(self) -> int:
        return self.length

    def filled(self, shelf: ArrayBlock, index: int, start: int = 0) -> Any:
        """The array of that length from `start` on: itself where it is here, else stored."""
        stored = ArrayRef(shelf, index, start, start + self.length, self.dtype)
        return np.asarray(stored) if isinstance(shelf.handle, LocalRef) else stored


class PickleAsArray:
    """A stored array that is an array when it is pickled: for a checkpoint, which is to last."""

    def __init__(self, array: ArrayRef) -> None:
        self._array = array

    def __reduce__(self) -> Any:
        return np.asarray(self._array).__reduce__()

    def __array__(self, dtype: DTypeLike = None, copy: bool | None = None) -> NDArray[Any]:
        return self._array.__array__(dtype, copy)


def begin_fetching(trajectories: Iterable[Trajectory]) -> list[ArrayBlock]:
    """Have all that is stored of these answers brought here at once; the shelves that it is on."""
    segments = (segment for trajectory in trajectories for segment in trajectory.segments)
    arrays: Iterable[object] = (segment.token_ids for segment in segments)
    stored = [array for array in arrays if isinstance(array, ArrayRef)]
    shelves = {id(each.shelf): each.shelf for each in stored if not each.shelf.is_fetched}
    for shelf in shelves.values():
        shelf.handle.begin()
    return list(shelves.values())


def fetch(groups: Iterable[Group]) -> None:
    """Have all that is stored of these answers brought here at once, not one by one.

    Raises:
        WorkerError: some of it is lost.
    """
    for shelf in begin_fetching(answer.trajectory for g in groups for answer in g.scored):
        shelf.array(0)
