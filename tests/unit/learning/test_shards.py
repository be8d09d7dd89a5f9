"""Pieces of tensors: what they are, and that any cut of a tensor is read in any other."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load

from winnow.learning.shards import Piece

Axis = list[int]
"""Where a dimension is cut: the ends of its parts."""


def save_together(states: list[dict[str, Any]], folder: Path) -> None:
    """Have each state be a rank's, in this process: what `save` does, without its messages."""
    writer = FileSystemWriter(folder, sync_files=False)
    planners = [DefaultSavePlanner() for _ in states]
    plans = []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    results = []
    for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True):
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    writer.finish(metadata, results)


@st.composite
def cuts(draw: st.DrawFn, shape: list[int]) -> list[Axis]:
    """Ends of the parts along each dimension; two that are the same leave a part empty."""
    ends = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    return [[*sorted(inner), size] for inner, size in zip(ends, shape, strict=True)]


def parts(whole: Tensor, axes: list[Axis]) -> list[Piece]:
    """Every rectangle of a cut, as views of the whole."""
    sides = [itertools.pairwise([0, *ends]) for ends in axes]
    found = []
    for corner in itertools.product(*sides):
        own = whole[tuple(slice(*side) for side in corner)]
        found.append(Piece(own, whole.shape, [start for start, _ in corner]))
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@given(st.data())
def test_any_cut_is_read_in_any_other_with_the_same_bits(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.randn(shape)
    saved = parts(whole, data.draw(cuts(shape)))
    # Ranks that have what another has, and one that has nothing at all.
    twice = data.draw(st.lists(st.sampled_from(saved), max_size=3))
    states: list[dict[str, Any]] = [{"weights": {"w": piece}} for piece in [*saved, *twice]]
    states.insert(data.draw(st.integers(0, len(states))), {"weights": {}})
    room = torch.full(shape, torch.nan)
    with TemporaryDirectory() as folder:
        save_together(states, Path(folder))
        for piece in parts(room, data.draw(cuts(shape))):
            state = {"weights": {"w": piece}}
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
            assert state["weights"]["w"] is piece
        plain = {"weights": {"w": torch.zeros(shape)}}
        load(plain, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(room, whole)
    assert torch.equal(plain["weights"]["w"], whole)


@pytest.mark.parametrize(
    ("rows", "told"),
    [([slice(0, 2), slice(3, 4)], "invalid fill"), ([slice(0, 3), slice(2, 4)], "overlapping")],
)
def test_pieces_that_do_not_make_the_whole_are_not_saved(
    rows: list[slice], told: str, tmp_path: Path
) -> None:
    whole = torch.randn(4, 2)
    pieces = [Piece(whole[own], whole.shape, (own.start, 0)) for own in rows]
    with pytest.raises(ValueError, match=told):
        save_together([{"w": piece} for piece in pieces], tmp_path)


def test_a_piece_is_filled_from_its_like_or_the_whole() -> None:
    whole = torch.arange(12.0).view(3, 4)
    room = torch.zeros(3, 4)
    piece = Piece(room[:, 1:3], room.shape, (0, 1))
    piece.fill(whole)
    assert room.tolist() == [[0, 1, 2, 0], [0, 5, 6, 0], [0, 9, 10, 0]]
    piece.fill(Piece(-whole[:, 1:3], whole.shape, (0, 1)))
    assert room.tolist() == [[0, -1, -2, 0], [0, -5, -6, 0], [0, -9, -10, 0]]
    with pytest.raises(AssertionError):
        piece.fill(Piece(whole[:, :2], whole.shape, (0, 0)))
    with pytest.raises(AssertionError, match="sticks out"):
        Piece(whole[:, 1:3], whole.shape, (0, 3))
    nothing = Piece.absent((3, 4), torch.float16)
    assert (nothing.shape, nothing.dtype, nothing.to_local().numel()) == ((3, 4), torch.float16, 0)
