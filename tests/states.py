"""States of a run written to disk and read back, and compared to the bit."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from winnow.checkpoints.checkpoint import STATE_CLASSES
from winnow.checkpoints.state_file import read_state, write_state


def read_back(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint gives it back."""
    with tempfile.TemporaryDirectory() as folder:
        write_state(Path(folder), state)
        return read_state(Path(folder), STATE_CLASSES)


def same(a: Any, b: Any) -> bool:
    """True if both are equal to the bit and of the same types, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if a.dtype.hasobject:
            return a.shape == b.shape and same(a.tolist(), b.tolist())
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])
    if isinstance(a, list | tuple) or type(a).__name__ == "deque":
        return len(a) == len(b) and all(map(same, a, b))
    if is_dataclass(a):
        names = [each.name for each in fields(a) if each.init]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    return bool(a == b)
