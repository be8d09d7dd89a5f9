"""States come back from a checkpoint to the bit, and reading one runs no code of it."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.bombs import Bomb
from tests.examples import examples
from tests.states import read_back, same
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from winnow.checkpoints.state_file import (
    SHARD_INDEX,
    TENSORS,
    TREE,
    check_shards,
    read_state,
    write_state,
)
from winnow.errors import CheckpointError
from winnow.types import Score, VersionSpan

TEXTS = st.text(st.characters(), max_size=8)
KEYS = TEXTS | st.sampled_from(["!tuple", "!", "a.b", "a"]) | st.integers() | st.booleans()
DTYPES = (
    *(npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.floating_dtypes()),
    *(npst.boolean_dtypes(), npst.complex_number_dtypes(), npst.unicode_string_dtypes(max_len=5)),
    npst.datetime64_dtypes(),
)
ARRAYS = npst.arrays(
    st.one_of(*DTYPES), npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)
TENSOR_TYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits as any type: NaNs with payloads, infinities and negative zeros among them."""
    kind = draw(st.sampled_from(TENSOR_TYPES))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    size = torch.empty(shape, dtype=kind).nbytes
    bits = draw(st.binary(min_size=size, max_size=size))
    if kind is torch.bool:
        bits = bytes(each % 2 for each in bits)
    flat = torch.frombuffer(bytearray(bits), dtype=torch.uint8) if size else torch.empty(0)
    return flat.to(torch.uint8).view(kind).reshape(shape)


ATOMS = (
    *(st.none(), st.booleans(), st.floats(), TEXTS, st.binary(max_size=8)),
    *(st.integers(), st.integers(2**62, 2**200), st.integers(-(2**200), -(2**62))),
    *(st.datetimes(), st.dates(), st.times(), st.decimals(allow_nan=False), st.fractions()),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(*ATOMS, ARRAYS, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(KEYS, inner, max_size=3),
        st.frozensets(st.integers() | TEXTS, max_size=3),
    ),
    max_leaves=12,
)


@given(VALUES)
@examples(60)
def test_any_value_comes_back_to_the_bit_and_of_its_type(value: Any) -> None:
    assert same(read_back({"value": value}), {"value": value})


def test_views_of_one_storage_and_names_that_meet_are_kept_apart() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {"a": {"b": base, 1: base[0]}, "a.b": base.T, "1": base[1:], "row": base[:, 1]}
    assert same(read_back(views), views)


def test_an_object_array_keeps_its_values() -> None:
    array = np.empty((2, 2), object)
    array[:] = [[1, "x"], [(2, None), Fraction(1, 3)]]
    found = read_back({"array": array})["array"]
    assert found.dtype == object
    assert found.tolist() == array.tolist()


@dataclass
class Stranger:
    value: int = 0


class Odd:
    def __str__(self) -> str:
        return "x + 1"


def test_objects_in_what_a_scorer_says_become_their_text_and_others_are_refused() -> None:
    kept = read_back({"score": Score(1.0, 1.0, {}, {"pred": Odd(), "!n": 3})})["score"]
    assert kept.extra == {"pred": "x + 1", "!n": 3}
    with pytest.raises(CheckpointError, match=r"^state\.row\.0 holds a .*Odd, which a checkpoint"):
        read_back({"row": [Odd()]})


def test_a_class_that_the_reader_does_not_name_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, {"x": Stranger(3)})
    assert read_state(tmp_path, [Stranger]) == {"x": Stranger(3)}
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read: 'Stranger'; use"):
        read_state(tmp_path, [])


def retold(change: Callable[[Any], Any]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        tree = json.loads((folder / TREE).read_text())
        (folder / TREE).write_text(json.dumps(change(tree)))

    return spoil


FOREIGN = {
    "no JSON": lambda folder: (folder / TREE).write_bytes(b"\x80\x04"),
    "no tensors": lambda folder: (folder / TENSORS).unlink(),
    "no safetensors": lambda folder: (folder / TENSORS).write_bytes(b"rubbish"),
    "a list": retold(lambda tree: [tree]),
    "a tag that is none": retold(lambda tree: {"x": {"!eval": "1"}}),
    "a tensor that is not there": retold(lambda tree: {"x": {"!tensor": "y"}}),
    "an array beyond the end": retold(lambda tree: {"x": {"!array": ["<i8", [9], 0]}}),
    "an array before the start": retold(lambda tree: {"x": {"!array": ["<i8", [1], -8]}}),
    "a negative shape": retold(lambda tree: {"x": {"!array": ["<i8", [-1], 0]}}),
    "an array of pointers": retold(lambda tree: {"x": {"!array": ["|O8", [1], 0]}}),
    "an object without its fields": retold(lambda tree: {"x": {"!object": ["VersionSpan", {}]}}),
    "a fraction that takes forever": retold(lambda tree: {"x": {"!fraction": "1e99999999"}}),
    "nested without end": lambda folder: (folder / TREE).write_text("[" * 10**5 + "]" * 10**5),
}


@pytest.mark.parametrize("spoil", FOREIGN.values(), ids=FOREIGN)
def test_a_state_that_is_none_is_refused_in_one_line(
    spoil: Callable[[Path], object], tmp_path: Path
) -> None:
    write_state(tmp_path, {"x": np.arange(3)})
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: .+; use another") as caught:
        read_state(tmp_path, [VersionSpan])
    assert "\n" not in str(caught.value)


def shards(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder / SHARD_INDEX


def test_an_index_of_tensors_is_taken(tmp_path: Path) -> None:
    kinds = {str(kind): torch.zeros(2, dtype=kind) for kind in TENSOR_TYPES}
    shards(tmp_path, {"policy": kinds})
    check_shards(tmp_path)


def elsewhere(index: Path) -> None:
    known = pickle.loads(index.read_bytes())
    for each in known.storage_data.values():
        each.relative_path = "../../secret"
    index.write_bytes(pickle.dumps(known))


SPOILT = {
    "code": (lambda index: index.write_bytes(pickle.dumps(Bomb(index.parent / "ran"))), "mkdir"),
    "objects": (lambda index: shards(index.parent, {"x": Stranger()}), "BytesStorageMetadata"),
    "elsewhere": (elsewhere, "references files outside"),
    "rubbish": (lambda index: index.write_bytes(b"rubbish"), "cannot be read"),
    "nothing": (lambda index: index.unlink(), "No such file"),
}


@pytest.mark.parametrize(("spoil", "said"), SPOILT.values(), ids=SPOILT)
def test_an_index_of_anything_else_is_refused_and_runs_nothing(
    spoil: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    spoil(shards(tmp_path, {"x": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=said):
        check_shards(tmp_path)
    assert not (tmp_path / "ran").exists()
