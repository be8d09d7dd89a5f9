"""How a call travels to an actor: pickled by the standard library, arrays and references beside it.

Ray pickles in Python what it is given, object by object, which for a step's thousands of answers
takes longer than all else that the driver does. So a call is pickled here, in C, and Ray sees
bytes, large arrays, and the references that the call holds, which it must count.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winnow.cluster.ray_handle import collecting, giving

_BESIDE_BYTES = 1 << 14
"""From which on an array travels beside the pickle; Ray takes time for each."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """A value ready to travel. Example: `unpack(pack(call))` is the call."""

    data: bytes
    arrays: Sequence[NDArray[np.uint8]]
    references: Sequence[Any]
    """Ray's, in the order in which the handles that hold them come."""


def pack(value: Any) -> Parcel:
    """Pickle a value.

    Raises:
        Exception: whatever pickle raises for a value that it cannot take.
    """
    arrays: list[NDArray[np.uint8]] = []

    def stays_within(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _BESIDE_BYTES:
            return True
        arrays.append(np.frombuffer(raw, np.uint8))
        return False

    with collecting() as references:
        data = pickle.dumps(value, protocol=5, buffer_callback=stays_within)
    return Parcel(data, arrays, references)


def unpack(parcel: Parcel) -> Any:
    """The value; its large arrays are views of the parcel's, and read-only as they are."""
    with giving(parcel.references):
        return pickle.loads(parcel.data, buffers=parcel.arrays)
