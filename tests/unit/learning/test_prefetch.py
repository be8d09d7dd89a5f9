"""Layers whose weights are gathered ahead, on ranks that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import fake_ranks
from tests.small_models import digits_model

from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh
from winnow.learning.strategy import decoder_layers


@pytest.mark.parametrize(
    ("ahead", "forward", "backward"),
    [
        (0, [[], [], [], []], [[], [], [], []]),
        (1, [[1], [2], [3], []], [[], [0], [1], [2]]),
        (2, [[1, 2], [2, 3], [3], []], [[], [0], [1, 0], [2, 1]]),
        (9, [[1, 2, 3], [2, 3], [3], []], [[], [0], [1, 0], [2, 1, 0]]),
    ],
)
def test_each_layer_gathers_those_that_run_after_it(
    ahead: int, forward: list[list[int]], backward: list[list[int]]
) -> None:
    with fake_ranks(2, 0):
        model = digits_model(num_hidden_layers=4).to(torch.float32)
        FSDP2Strategy(model, make_mesh("cpu", 2, 1), Sharding(prefetch=ahead))
        layers: list[Any] = decoder_layers(model)
        states = [layer._get_fsdp_state() for layer in layers]
        places = {id(state): place for place, state in enumerate(states)}
        told = [[places[id(s)] for s in state._states_to_forward_prefetch] for state in states]
        assert told == forward
        told = [[places[id(s)] for s in state._states_to_backward_prefetch] for state in states]
        assert told == backward
