"""Weights of a folder, read in rectangles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_models import digits_model
from torch import Tensor

from winnow.models.causal_lm import load_causal_lm
from winnow.models.sharded_loading import SavedWeights, saved_weights

CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts."
NAMES = (
    "model.norm.weight",
    "model.layers.0.self_attn.o_proj.weight",
    *(EXPERTS + stack for stack in ("gate_up_proj", "down_proj")),
)
"""Of one and two dimensions; and stacked, from two tensors of the files each and from one."""


class Counted:
    """A file, or a slice of one, that counts the numbers taken of it."""

    taken = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def get_slice(self, name: str) -> Counted:
        return Counted(self._inner.get_slice(name))

    def get_shape(self) -> Any:
        return self._inner.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._inner[index]
        Counted.taken += found.numel()
        return found


@pytest.fixture(scope="module")
def model() -> Any:
    return digits_model(True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, model: Any) -> SavedWeights:
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    found = saved_weights(load_causal_lm(str(folder), torch.float32, CPU, hollow=True))
    assert found is not None
    found._weight_files = {name: Counted(file) for name, file in found._weight_files.items()}
    return found


@given(st.data())
def test_a_part_of_a_weight_is_that_of_the_whole_and_nothing_else_is_read(
    model: Any, weights: SavedWeights, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(NAMES))
    whole = model.get_parameter(name).detach()
    slices = []
    for size in whole.shape[: data.draw(st.integers(1, whole.ndim))]:
        start = data.draw(st.integers(0, size - 1))
        own = slice(start, data.draw(st.integers(start + 1, size)))
        slices.append(data.draw(st.sampled_from([own, slice(None)])))
    Counted.taken = 0
    found = weights.part(name, slices)
    assert torch.equal(found, whole[tuple(slices)])
    assert Counted.taken == found.numel()
