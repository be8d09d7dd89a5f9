"""How a call travels to an actor: pickled by the standard library, arrays and references beside it.

Ray pickles in Python what it is given, object by object, which for a step's thousands of answers
takes longer than all else that the driver does. So a call is pickled here, in C, and Ray sees
bytes, large arrays, and the references that the call holds, which it must count.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.workers.ray.handle import collecting, giving

_BESIDE_BYTES = 1 << 14
"""From which on an array travels beside the pickle; Ray takes time for each."""


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

    with collecting() as references:
        data = pickle.dumps(value, protocol=5, buffer_callback=take)
    return Parcel(data, b"".join(small), arrays, order, references)


def unpack(parcel: Parcel) -> Any:
    """The value; its arrays are views of the parcel's, and read-only."""
    with giving(parcel.references):
        return pickle.loads(parcel.data, buffers=_buffers(parcel))


def _buffers(parcel: Parcel) -> Iterator[memoryview | NDArray[np.uint8]]:
    small, start, large = memoryview(parcel.small), 0, iter(parcel.arrays)
    for length in parcel.order:
        if length < 0:
            yield next(large)
        else:
            yield small[start : start + length]
            start += length
