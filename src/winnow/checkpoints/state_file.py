"""The state of a run as data: a tree of values in JSON, its arrays and tensors in safetensors.

    state.json          the tree; {"!array": …} and the like stand for what JSON has no word for
    state.safetensors   each tensor by its number; the bytes of all arrays, end to end

Reading it builds values of the kinds below and of the dataclasses that the reader names, and runs
no other code: a stranger's checkpoint can be read. Everything comes back to the bit, and of the
same type: tuples, integers of any size, keys that are no strings, NaN. That is more than libraries
for dataclasses keep (msgspec and pydantic give lists for tuples in fields of type Any, such as a
row's ground truth, and msgpack has no integer beyond 64 bit).
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import math
import pickle
import shutil
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from winnow.errors import CheckpointError
from winnow.observe.files import one_line
from winnow.types import Score
from winnow.workers.array_refs import ArrayRef

TREE, TENSORS = "state.json", "state.safetensors"
_ARRAYS = "!arrays"
"""Name of the tensor that holds the bytes of all arrays."""
SHARD_INDEX = ".metadata"
"""Name of the index in a folder of shards."""
_DCP = "torch.distributed.checkpoint"
_INDEX_NAMES: dict[str, set[str]] = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("TensorProperties", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""Names that an index of shards may hold, by module, beside types of numbers."""
_BASES: tuple[Any, ...] = (str, int, float, list, tuple)
_SEQUENCES: dict[str, type[Any]] = {
    **{"!tuple": tuple, "!set": set, "!frozenset": frozenset, "!deque": deque}
}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    # Columns of a data set may hold these. A datetime is a date, too: it stands first.
    "!datetime": (datetime.datetime, lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    "!date": (datetime.date, lambda v: v.isoformat(), datetime.date.fromisoformat),
    "!time": (datetime.time, lambda v: v.isoformat(), datetime.time.fromisoformat),
    "!decimal": (Decimal, str, Decimal),
    "!fraction": (Fraction, str, lambda text: Fraction(*map(int, text.split("/")))),
    "!complex": (complex, repr, complex),
    # What JSON has no word for: NaN and infinities.
    "!float": (
        float,
        lambda v: struct.pack(">d", v).hex(),
        lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    ),
    "!bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
}


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a state into a folder.

    Raises:
        CheckpointError: it holds an object of a kind that has no place here.
        OSError, SafetensorError: the disk refuses.
    """
    writer = _StateWriter()
    tree = writer.encode(dict(state), "state")
    writer.tensors[_ARRAYS] = torch.frombuffer(
        bytearray(b"".join(writer.arrays)) or bytearray(1), dtype=torch.uint8
    )
    save_file(writer.tensors, folder / TENSORS)
    (folder / TREE).write_text(json.dumps(tree, allow_nan=False), encoding="utf-8")
    shutil.copymode(folder / TREE, folder / TENSORS)  # safetensors leaves it to its owner alone


def read_state(folder: Path, classes: Iterable[type]) -> dict[str, Any]:
    """Read the state that `write_state` wrote.

    Args:
        classes: dataclasses that may be in it.

    Raises:
        CheckpointError: it is no such state.
    """
    with _explaining_damage(folder / TREE):
        tree = json.loads((folder / TREE).read_text(encoding="utf-8"))
        with safe_open(str(folder / TENSORS), framework="pt") as file:
            state = _StateReader(file, {each.__name__: each for each in classes}).decode(tree)
        if not isinstance(state, dict):
            raise TypeError("not a state")
        return state


def check_shards(folder: Path) -> None:
    """Check the index of what ranks saved, which torch keeps as a pickle and unpickles itself.

    Raises:
        CheckpointError: the index names anything but tensors in files beside it.
    """
    with _explaining_damage(folder / SHARD_INDEX):
        with (folder / SHARD_INDEX).open("rb") as file:
            index = _IndexUnpickler(file).load()
        # An entry that is no tensor would be unpickled without a check.
        entries = index.state_dict_metadata.values()
        names = {each.relative_path for each in index.storage_data.values()}
        if any(type(each).__name__ != "TensorStorageMetadata" for each in entries):
            raise ValueError("it contains entries that are not tensors")
        if any(name != PurePosixPath(name).name for name in names):
            raise ValueError("it references files outside its folder")


@contextlib.contextmanager
def _explaining_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file may fail in any way
        raise CheckpointError(
            f"{path} cannot be read: {one_line(error)}; use another checkpoint"
        ) from error


class _IndexUnpickler(pickle.Unpickler):
    """Builds the classes of an index of `torch.distributed.checkpoint`, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Find a class that the pickle names."""
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _INDEX_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(f"it references {module}.{name}")


class _StateWriter:
    """Encodes values for JSON, and collects tensors and the bytes of arrays."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.arrays: list[bytes] = []
        self._bytes = 0
        self._storages: set[int] = set()
        self._known: dict[int, tuple[Any, list[Any]]] = {}

    def encode(self, value: Any, place: str) -> Any:
        """Encode a value; `place` names it in messages."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is list:
            return [self.encode(each, f"{place}.{i}") for i, each in enumerate(value)]
        if isinstance(value, Mapping):
            return self._mapping(value, place)
        if isinstance(value, Tensor):
            tensor, name = value.detach().to("cpu").contiguous(), str(len(self.tensors))
            storage = tensor.untyped_storage().data_ptr()
            # Two views of one storage would be refused.
            self.tensors[name] = tensor.clone() if storage in self._storages else tensor
            self._storages.add(storage)
            return {"!tensor": name}
        if isinstance(value, np.ndarray | ArrayRef):
            if id(value) not in self._known:  # answers may share one
                self._known[id(value)] = value, self._array(np.asarray(value), place)
            return {"!array": self._known[id(value)][1]}
        if isinstance(value, np.generic):
            return {"!scalar": self._array(np.asarray(value), place)}
        if is_dataclass(value) and not isinstance(value, type):
            entries = {
                each.name: self.encode(getattr(value, each.name), f"{place}.{each.name}")
                for each in fields(value)
                if each.init and not (kind is Score and each.name == "extra")
            }
            if isinstance(value, Score):
                extra = [[name, self._encode_extra(each)] for name, each in value.extra.items()]
                entries["extra"] = {"!dict": extra}
            return {"!object": [kind.__name__, entries]}
        for tag, make in _SEQUENCES.items():
            if kind is make:
                return {tag: [self.encode(each, f"{place}.{i}") for i, each in enumerate(value)]}
        for tag, (exact, write, _) in _TEXTS.items():
            if kind is exact:
                return {tag: write(value)}
        for base in _BASES:  # of a class of its own, which is not kept
            if isinstance(value, base):
                return self.encode(base(value), place)
        raise CheckpointError(
            f"{place} holds a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
            "store; use numbers, strings, lists and dicts in data columns and in results of your "
            "functions"
        )

    def _encode_extra(self, value: Any) -> Any:
        """Encode a scorer's extra value; objects of unknown classes become their text."""
        try:
            return self.encode(value, "score")
        except (CheckpointError, RecursionError):
            return str(value)

    def _mapping(self, value: Mapping[Any, Any], place: str) -> Any:
        if all(type(key) is str and key[:1] != "!" for key in value):
            return {key: self.encode(each, f"{place}.{key}") for key, each in value.items()}
        return {
            "!dict": [
                [self.encode(key, place), self.encode(each, f"{place}.{key}")]
                for key, each in value.items()
            ]
        }

    def _array(self, array: np.ndarray[Any, Any], place: str) -> list[Any]:
        if array.dtype.hasobject:
            return ["O", list(array.shape), [self.encode(v, place) for v in array.ravel().tolist()]]
        content = array.tobytes()
        self.arrays.append(content)
        self._bytes += len(content)
        return [array.dtype.str, list(array.shape), self._bytes - len(content)]


class _StateReader:
    """Builds the values that a `_StateWriter` encoded."""

    def __init__(self, file: Any, classes: Mapping[str, type]) -> None:
        self._file, self._classes = file, classes
        self._arrays = file.get_tensor(_ARRAYS).numpy()
        self._known: dict[str, np.ndarray[Any, Any]] = {}

    def decode(self, value: Any) -> Any:
        """Decode one value of the tree."""
        if isinstance(value, list):
            return [self.decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        tag: str
        content: Any
        tag, content = next(iter(value.items()), ("", None))
        if tag[:1] != "!":
            return {key: self.decode(each) for key, each in value.items()}
        match tag:
            case "!dict":
                return {self.decode(key): self.decode(each) for key, each in content}
            case "!tensor":
                return self._file.get_tensor(content)
            case "!array":
                # What was one array is one again; of an empty one the place says nothing.
                array = self._array(*content)
                return self._known.setdefault(str(content), array) if array.size else array
            case "!scalar":
                return self._array(*content)[()]
            case "!object":
                return self._classes[content[0]](**self.decode(content[1]))
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](map(self.decode, content))
        return _TEXTS[tag][2](content)

    def _array(self, kind: str, shape: list[int], content: Any) -> np.ndarray[Any, Any]:
        if kind == "O":
            array = np.empty(len(content), object)
            for i, each in enumerate(content):
                array[i] = self.decode(each)
            return array.reshape(shape)
        dtype = np.dtype(kind)
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= content <= content + size <= len(self._arrays):
            raise ValueError(f"an array of {size} bytes exceeds {TENSORS}")
        piece = self._arrays[content : content + size].tobytes()
        return np.frombuffer(piece, dtype).reshape(shape).copy()
