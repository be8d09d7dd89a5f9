"""The bound of the key/value cache: as many slots as fit, and no byte more."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.test_engine import SHAPE, drain, groups_of, model_of, torch_engine
from transformers import Qwen3Config

from winnow.errors import ConfigError
from winnow.rollout.engine import SamplingParams
from winnow.rollout.slots import SlotCache, slots_that_fit

CONFIG = Qwen3Config(**SHAPE, head_dim=8)
"""2 layers of 2 key/value heads of width 8: 2 * 2 * 2 * 8 numbers a token."""
ROW_GIB = 128 * 64 * 4 / 2**30
"""Of 100 tokens, which take 128, in fp32."""


def fit(slots: int, gib: float | None, **other: Any) -> int:
    config = Qwen3Config(**{**SHAPE, "head_dim": 8, **other})
    return slots_that_fit(config, torch.float32, slots, 100, gib)


def test_as_many_slots_are_kept_as_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert fit(8, 8 * ROW_GIB) == 8
        assert "takes up to 0.000244 GiB: 8 slots, 3.05e-05 GiB each" in caplog.text
        assert fit(8, None) == 8
        assert "reduced" not in caplog.text
        assert fit(8, 3.9 * ROW_GIB) == 3
    assert "rollout.engine.slots 8 is reduced to 3" in caplog.text
    assert fit(8, 8 * ROW_GIB, num_hidden_layers=4) == 4
    # A model with fewer positions than prompt and answer may have never holds more.
    assert fit(8, 2 * ROW_GIB, max_position_embeddings=64) == 4


def test_a_cache_that_holds_no_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_gib 1e-05 holds not one answer: 100 tokens take"):
        fit(8, 1e-5)


@pytest.mark.parametrize("fitting", [1, 3])
def test_an_engine_within_its_bound_writes_the_same_answers(fitting: int) -> None:
    groups = groups_of(sampling=SamplingParams(max_tokens=60, stop_token_ids=(2,)))
    groups = [replace(g, sampling=SamplingParams(70 + 5 * g.group_id)) for g in groups]
    free = drain(torch_engine(model_of("qwen3", torch.float32)), groups)
    gib = fitting * ROW_GIB
    engine = torch_engine(model_of("qwen3", torch.float32), longest=100, cache_gib=gib)
    assert engine.status().slots == fitting
    bounded = drain(engine, groups)
    assert {k: e.segment.token_ids.tolist() for k, e in free.items()} == {
        k: e.segment.token_ids.tolist() for k, e in bounded.items()
    }
    held = sum(cache.nbytes for layer in engine._slots.cache.layers for cache in layer)
    assert 0 < held <= gib * 2**30
    asyncio.run(engine.close())


def test_a_cache_grows_ahead_but_not_beyond_the_longest_answer() -> None:
    def lengths(longest: int | None) -> list[int]:
        cache = SlotCache(2, torch.float32, torch.device("cpu"), longest)
        found = []
        for length in (10, 65, 129, 200):
            cache.reserve(length)
            found.append(cache.length)
        return found

    assert lengths(None) == [64, 128, 192, 320]
    assert lengths(200) == [64, 128, 192, 256]
