"""Messages between the pool and its workers: a length, then a pickle.

Both ends are this package's; what travels back is numbers, texts and plain containers only
(`portable`), so that the run never needs the classes of a user's file.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from winnow.config.reward import UserFunction
from winnow.rewards.task import Arguments
from winnow.types import Score

_LENGTH = struct.Struct("!Q")
_ATOMS = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class Job:
    """What a worker is for: the first message to it."""

    function: UserFunction | None
    """None: the built-in scorers."""
    timeout_s: float
    memory_bytes: int
    python_path: tuple[str, ...]
    """Of the run: the user's file finds the same modules."""
    batched: bool = False
    """The function takes many answers in a call."""


class Item(NamedTuple):
    """An answer to be scored."""

    id: int
    scorer: str
    """A built-in one; ignored where the user's function scores."""
    seed: int
    """Of random numbers that the scorer may draw."""
    arguments: Arguments


class BatchItem(NamedTuple):
    """Answers to be scored in one call of the user's function."""

    id: int
    seed: int
    """Of random numbers that the call may draw."""
    batch: tuple[Arguments, ...]


class Reply(NamedTuple):
    """What a worker says.

    | kind | id | value |
    |---|---|---|
    | ready | | whether the function is asynchronous |
    | refused | | why the user's file cannot be used, for the user |
    | done | of the item | `Score` or `Failure`; of a batch a tuple of them, or one `Failure` |
    | again | of the item | its time was up, but others had blocked the worker |
    | retiring | | none: it takes no more, what it has not answered is to be sent elsewhere |
    """

    kind: Literal["ready", "refused", "done", "again", "retiring"]
    id: int = -1
    value: Any = None


def pack(message: object) -> bytes:
    """A message as it travels."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Messages out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`."""
        self._rest += data
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            stop = start + _LENGTH.size + length
            if stop > len(self._rest):
                break
            body = bytes(self._rest[start + _LENGTH.size : stop])
            start = stop
            yield pickle.loads(body)
        del self._rest[:start]


def portable(score: Score) -> Score:
    """The score with texts in place of objects that only a worker knows."""
    extra = {name: v if _is_plain(v) else _as_text(v) for name, v in score.extra.items()}
    return replace(score, extra=extra)


def _is_plain(value: Any, depth: int = 20) -> bool:
    """Whether it holds nothing but what any process can read; nested endlessly it does not."""
    kind = type(value)
    if depth and kind in (list, tuple, set, frozenset):
        return all(_is_plain(each, depth - 1) for each in value)
    if depth and kind is dict:
        return all(_is_plain(each, depth - 1) for pair in value.items() for each in pair)
    if kind is np.ndarray:
        return bool(value.dtype != object)
    return kind in _ATOMS or isinstance(value, np.generic)


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's class
        return f"({type(value).__name__}: {type(error).__name__} in its __str__)"
