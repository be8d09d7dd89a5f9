"""Values between a solution and its tests: plain data over pipes, a line of JSON each.

What these modules import is most of the time that a run takes: no typing, no re, and of json
the core in C. Any Python from 3.8 on must run them.
"""

from __future__ import annotations

import itertools
import os

try:
    from _json import encode_basestring_ascii as quoted
    from _json import make_scanner
except ImportError:  # a Python without the core in C
    from json.encoder import encode_basestring_ascii as quoted
    from json.scanner import make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

READ_BYTES = 1 << 16
_LONGEST_ITERATION = 1_000_000
_VIEWS = ("dict_keys", "dict_values", "dict_items", "deque")


class Opaque:
    """Stands for an object of the solution's that is no plain data; equal to nothing else."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class _Plain:
    """Settings that the scanner of JSON asks for."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = float  # NaN, Infinity, -Infinity
    memo: dict[str, str] = {}  # noqa: RUF012  the scanner's own


_SEQUENCES: tuple[tuple[str, Any], ...] = (("t", tuple), ("s", set), ("z", frozenset))
_scan: Any = make_scanner(_Plain())  # type: ignore[arg-type]


def encode(value: Any) -> str:
    """Plain data as JSON, tagged where JSON has no such kind; subclasses become their base."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return _items(list.__iter__(value))
    for tag, kind in _SEQUENCES:
        if isinstance(value, kind):
            return _tagged(tag, _items(kind.__iter__(value)))
    if isinstance(value, dict):
        return _tagged("d", _items(map(list, dict.items(value))))
    if isinstance(value, (bytes, bytearray)):
        return _tagged("b", quoted(bytes(value).hex()))
    if isinstance(value, complex):
        return _tagged("c", _items((value.real, value.imag)))
    if isinstance(value, range):
        return _tagged("r", _items((value.start, value.stop, value.step)))
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist())
    if hasattr(value, "__next__") or type(value).__name__ in _VIEWS:
        some = list(itertools.islice(value, _LONGEST_ITERATION + 1))
        if len(some) <= _LONGEST_ITERATION:
            return _tagged("i" if hasattr(value, "__next__") else "l", _items(some))
    return _tagged("o", quoted(str(type(value).__name__)))


def _items(values: Iterable[Any]) -> str:
    return "[" + ",".join([encode(each) for each in values]) + "]"


def _tagged(tag: str, text: str) -> str:
    return '{"' + tag + '":' + text + "}"


def scan(text: str) -> Any:
    """JSON as it stands."""
    try:
        return _scan(text, 0)[0]
    except StopIteration:
        raise ValueError("no JSON") from None


def decode(value: Any) -> Any:
    """Restore encoded values from scanned JSON: plain data and nothing else."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, rest),) = value.items()
    if tag == "d":
        return {decode(key): decode(each) for key, each in rest}
    if tag == "b":
        return bytes.fromhex(rest)
    if tag == "c":
        return complex(*rest)
    if tag == "r":
        return range(*rest)
    if tag == "o":
        return Opaque(rest)
    items = [decode(each) for each in rest]
    kinds: dict[str, Callable[[Iterable[Any]], Any]]
    kinds = {"t": tuple, "s": set, "z": frozenset, "i": iter, "l": list}
    return kinds[tag](items)


def send(descriptor: int, message: Any) -> None:
    """Write a message."""
    write(descriptor, encode(message))


def write(descriptor: int, text: str) -> None:
    """Write an encoded message and its end."""
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def reader(descriptor: int, wait: Callable[[], None] | None = None) -> Iterator[Any]:
    """Messages as they come, to the end of the pipe."""
    rest = bytearray()
    while True:
        if wait is not None:
            wait()
        data = os.read(descriptor, READ_BYTES)
        if not data:
            return
        start = len(rest)
        rest += data
        while (end := rest.find(b"\n", start)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            start = 0
            yield decode(scan(line.decode()))
