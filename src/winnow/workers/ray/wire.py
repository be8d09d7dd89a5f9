"""Calls and results on their way to and from an actor.

Ray pickles in Python what it is given, object by object, which for a step's thousands of answers
takes longer than all else that the driver does. So a call is pickled here, in C, and Ray sees
bytes, large arrays, and the references that the call holds, which it must count. Arrays that a
worker keeps stay in the object store of its node; a `RayHandle` travels in their stead.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.errors import WorkerError
from winnow.workers.ray.session import ray_module

_BESIDE_BYTES = 1 << 14
"""From which on an array travels beside the pickle; Ray takes time for each."""


_beside = threading.local()


@dataclass(frozen=True, eq=False)
class Parcel:
    """A value ready to travel. Example: `unpack(pack(call))` is the call."""

    data: bytes
    small: bytes
    """Small arrays, end to end."""
    arrays: Sequence[NDArray[np.uint8]]
    """Large ones."""
    order: Sequence[int]
    """In the order of the pickle: the bytes of a small array, or -1 for the next large one."""
    references: Sequence[Any]
    """Ray's, in the order in which the handles that hold them come."""


def pack(value: Any) -> Parcel:
    """Pickle a value.

    Raises:
        Exception: whatever pickle raises for a value that it cannot take.
    """
    small: list[memoryview] = []
    arrays: list[NDArray[np.uint8]] = []
    order: list[int] = []

    def take(buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        is_large = raw.nbytes >= _BESIDE_BYTES
        order.append(-1 if is_large else raw.nbytes)
        if is_large:
            arrays.append(np.frombuffer(raw, np.uint8))
        else:
            small.append(raw)

    with _collecting() as references:
        data = pickle.dumps(value, protocol=5, buffer_callback=take)
    return Parcel(data, b"".join(small), arrays, order, references)


def unpack(parcel: Parcel) -> Any:
    """Read a value; its arrays are views of the parcel's, and read-only."""
    with _giving(parcel.references):
        return pickle.loads(parcel.data, buffers=_buffers(parcel))


def _buffers(parcel: Parcel) -> Iterator[memoryview | NDArray[np.uint8]]:
    small, start, large = memoryview(parcel.small), 0, iter(parcel.arrays)
    for length in parcel.order:
        if length < 0:
            yield next(large)
        else:
            yield small[start : start + length]
            start += length


@contextlib.contextmanager
def _collecting() -> Iterator[list[Any]]:
    """Collect the references of handles that are pickled within, which keep their numbers."""
    found: list[Any] = []
    _beside.collected = found
    try:
        yield found
    finally:
        _beside.collected = None


@contextlib.contextmanager
def _giving(references: Sequence[Any]) -> Iterator[None]:
    """Give handles that were pickled so their references back, within the block."""
    _beside.given = references
    try:
        yield
    finally:
        _beside.given = None


class RayHandle:
    """A `Handle` by a reference of Ray's, which frees the memory when the last one is gone.

    The driver owns what it was returned, so that it outlives the worker; not the worker's node.

    Args:
        role, rank: the worker whose it was.
    """

    def __init__(self, reference: Any, role: str, rank: int) -> None:
        self._reference, self._role, self._rank = reference, role, rank
        self._coming: Future[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        collected: list[Any] | None = getattr(_beside, "collected", None)
        if collected is None:
            return RayHandle, (self._reference, self._role, self._rank)
        collected.append(self._reference)
        return _numbered, (len(collected) - 1, self._role, self._rank)

    def begin(self) -> None:
        self._begun()

    def get(self) -> Any:
        coming = self._begun()
        try:
            return coming.result()
        except ray_module().exceptions.RayError as error:
            whose = f"{self._role}[{self._rank}]"
            raise WorkerError(
                f"what {whose} wrote is lost, as its node is gone ({type(error).__name__})",
                self._role,
                self._rank,
            ) from error
        finally:
            self._coming = None  # a future holds what came

    def _begun(self) -> Future[Any]:
        coming = self._coming  # once: another thread may be done with it
        if coming is None:
            self._coming = coming = self._reference.future()
        return coming


def _numbered(number: int, role: str, rank: int) -> RayHandle:
    return RayHandle(_beside.given[number], role, rank)
