"""The rows of the embedded engine, and how many of them fit."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import SHAPE, drain, groups_of, model_of, torch_engine
from transformers import Qwen3Config

from winnow.errors import ConfigError
from winnow.rollout.embedded import slots
from winnow.rollout.embedded.cache_room import cache_room_gib, gpu_memory_gib, max_slots
from winnow.rollout.embedded.slots import (
    DecodeLayout,
    PrefilledAnswer,
    PromptBlock,
    SlotCache,
    Slots,
)
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.vllm.worker import memory_share

PLAIN, NUCLEUS = SamplingParams(5), SamplingParams(5, top_p=0.5)


def pending(number: int, sampling: SamplingParams, greedy: bool = False) -> PrefilledAnswer:
    answer = AnswerRequest(0, number, greedy=greedy)
    return PrefilledAnswer(GroupRequest(number, np.arange(3), (answer,), sampling, number), answer)


def test_settings_that_no_row_has_any_more_are_forgotten() -> None:
    keys = torch.zeros(1, 1, 4, 2)
    block = PromptBlock([(keys, keys)])
    slots = Slots(4, torch.float32, torch.device("cpu"))
    slots.fill_rows([pending(0, NUCLEUS), pending(1, PLAIN)], block)
    slots.fill_rows([pending(2, PLAIN, greedy=True), pending(3, PLAIN)], block)
    for gone, numbers in ((0, [3, 1, 2]), (2, [3, 1]), (0, [1])):
        slots.free_rows([gone])
        assert [answer.group.group_id for answer in slots.answers] == numbers
        used = [slots.kinds[kind] for kind in slots.kind[: len(slots)].tolist()]
        assert used == [a.settings for a in slots.answers]
        assert set(slots.kinds) == set(used)


def test_the_room_for_keys_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * gib)
    gpu = torch.device("cuda", 0)
    memory = gpu_memory_gib(gpu)
    assert memory == (50, 80)
    assert cache_room_gib(*memory, 0.25, 8.0, False) == 20
    assert cache_room_gib(*memory, None, None, False) == pytest.approx(0.9 * 50)
    assert cache_room_gib(*memory, None, 0.0, False) == pytest.approx(0.5 * 50)
    assert cache_room_gib(*memory, None, 10.0, True) == pytest.approx(0.9 * 40)
    assert cache_room_gib(*memory, None, 10.0, False) == pytest.approx(0.5 * 40)
    assert cache_room_gib(*memory, None, 60.0, True) == 0
    assert memory_share(*memory, 0.25, 8.0) == 0.25
    assert memory_share(*memory, None, 10.0) == pytest.approx(0.92 * 40 / 80)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "heads", "kv_heads", "window"),
    [
        (torch.float32, 1e-6, 4, 4, None),
        (torch.float32, 1e-6, 6, 2, 3),
        (torch.bfloat16, 2e-2, 6, 2, None),
        (torch.float16, 3e-3, 4, 4, 3),
    ],
)
@pytest.mark.bits
def test_a_query_sees_its_rows_keys_and_the_new_one(
    dtype: torch.dtype,
    tolerance: float,
    heads: int,
    kv_heads: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    lengths, width, cpu = [7, 1, 4, *range(9, 25)], 16, torch.device("cpu")
    # Rows of 8 up to 13 keys, of 8 up to 21 and of 3 up to 24: padding the second costs 24.
    monkeypatch.setattr(slots, "_CHUNK_COST", 24 * kv_heads * width)
    rows = torch.arange(len(lengths))
    cache = SlotCache(len(lengths) + 1, dtype, cpu)
    cache.reserve(max(lengths), len(lengths) + 1)
    shape = cache.rows, kv_heads, cache.length, width
    cache.layers = [(random(*shape), random(*shape))]
    at = torch.tensor(lengths) - 1
    for row, length in enumerate(lengths):
        cache.bias[row, :length] = 0.0
    q, k, v = (random(len(lengths), n, width) for n in (heads, kv_heads, kv_heads))
    layout = DecodeLayout(cache, rows, at, np.array(lengths))
    got = layout.attend(0, q, k, v, 0.4, window)
    assert [length for _, length in layout._chunks] == [13, 24]

    keys, values = cache.layers[0]
    for row, length in enumerate(lengths):
        assert torch.equal(keys[row, :, length - 1], k[row])
        assert torch.equal(values[row, :, length - 1], v[row])
        seen = slice(max(0, length - (window or length)), length)
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = keys[row, own, seen].double() @ q[row, head].double() * 0.4
            want = scores.softmax(-1) @ values[row, own, seen].double()
            torch.testing.assert_close(got[row, head].double(), want, rtol=0, atol=tolerance)


# The bound of the key/value cache: as many slots as fit, and no byte more


ROW_GIB = 128 * 64 * 4 / 2**30
"""Of 100 tokens, which take 128, in fp32: 2 layers of 2 key/value heads of width 8."""


def fit(slots: int, gib: float | None, **other: Any) -> int:
    config = Qwen3Config(**{**SHAPE, "head_dim": 8, **other})
    return max_slots(config, torch.float32, slots, 100, gib)


def test_as_many_slots_are_kept_as_fit_and_one_at_least(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    with pytest.raises(ConfigError, match="does not hold one answer: 100 tokens take"):
        fit(8, 1e-5)


def test_an_engine_within_its_bound_writes_the_same_answers() -> None:
    groups = groups_of(sampling=SamplingParams(max_tokens=60, stop_token_ids=(2,)))
    groups = [replace(g, sampling=SamplingParams(70 + 5 * g.group_id)) for g in groups]
    free = drain(torch_engine(model_of("qwen3", torch.float32)), groups)
    gib = 3 * ROW_GIB
    engine = torch_engine(model_of("qwen3", torch.float32), longest=100, cache_gib=gib)
    assert engine.status().slots == 3
    bounded = drain(engine, groups)
    assert {k: e.segment.token_ids.tolist() for k, e in free.items()} == {
        k: e.segment.token_ids.tolist() for k, e in bounded.items()
    }
    held = sum(cache.nbytes for layer in engine._slots.cache.layers for cache in layer)
    assert 0 < held <= gib * 2**30
    asyncio.run(engine.close())


def test_a_cache_grows_ahead_but_not_beyond_the_longest_answer_and_its_rows() -> None:
    rows = SlotCache(256, torch.float32, torch.device("cpu"))
    found = []
    for count in (6, 4, 7, 20, 250):
        rows.reserve(10, count)
        found.append(rows.rows)
    assert found == [6, 6, 9, 20, 250]

    def lengths(longest: int | None) -> list[int]:
        cache = SlotCache(2, torch.float32, torch.device("cpu"), longest)
        found = []
        for length in (10, 65, 129, 200):
            cache.reserve(length, 2)
            found.append(cache.length)
        return found

    assert lengths(None) == [64, 128, 192, 320]
    assert lengths(200) == [64, 128, 192, 256]
