"""The rows of the embedded engine, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.slots import (
    DecodeLayout,
    PrefilledAnswer,
    PrefillLayout,
    PromptBlock,
    SlotCache,
    Slots,
)

PLAIN, NUCLEUS = SamplingParams(5), SamplingParams(5, top_p=0.5)


def pending(number: int, sampling: SamplingParams, greedy: bool = False) -> PrefilledAnswer:
    answer = AnswerRequest(0, number, greedy=greedy)
    return PrefilledAnswer(GroupRequest(number, np.arange(3), (answer,), sampling, number), answer)


def test_settings_that_no_row_has_any_more_are_forgotten() -> None:
    keys = torch.zeros(1, 1, 4, 2)
    block = PromptBlock([(keys, keys)])
    slots = Slots(4, torch.float32, torch.device("cpu"))
    slots.place([pending(0, NUCLEUS), pending(1, PLAIN)], block)
    slots.place([pending(2, PLAIN, greedy=True), pending(3, PLAIN)], block)
    for gone, numbers in ((0, [3, 1, 2]), (2, [3, 1]), (0, [1])):
        slots.leave([gone])
        assert [answer.group.group_id for answer in slots.answers] == numbers
        used = [slots.kinds[kind] for kind in slots.kind[: len(slots)].tolist()]
        assert used == [a.group.sampling_of(a.request) for a in slots.answers]
        assert set(slots.kinds) == set(used)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_a_query_sees_its_rows_keys_and_the_new_one(
    dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    lengths, width, cpu = [7, 1, 4], 16, torch.device("cpu")
    rows = torch.arange(len(lengths))
    cache = SlotCache(len(lengths) + 1, dtype, cpu)
    cache.reserve(max(lengths))
    shape = cache.slots, kv_heads, cache.length, width
    cache.layers = [(random(*shape), random(*shape))]
    at = torch.tensor(lengths) - 1
    for row, length in enumerate(lengths):
        cache.bias[row, :length] = 0.0
    q, k, v = (random(len(lengths), n, width) for n in (heads, kv_heads, kv_heads))
    got = DecodeLayout(cache, rows, at, max(lengths)).attend(0, q, k, v, 0.4, window)

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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[7, 1, 4], [4, 4]])
def test_tokens_of_a_prefill_see_those_before_them_and_their_keys_are_kept(
    lengths: list[int], window: int | None
) -> None:
    heads, kv_heads, width = 6, 2, 16
    generator = torch.Generator().manual_seed(0)
    layout = PrefillLayout(np.array(lengths), torch.device("cpu"))
    assert layout.positions.tolist() == [i for length in lengths for i in range(length)]
    q, k, v = (
        torch.randn(sum(lengths), n, width, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads)
    )
    got = layout.attend(0, q, k, v, 0.4, window)

    [kept] = layout.layers
    begin = 0
    for row, length in enumerate(lengths):
        here = slice(begin, begin + length)
        for table, given in zip(kept, (k, v), strict=True):
            assert torch.equal(table[row, :, :length], given[here].transpose(0, 1))
            assert not table[row, :, length:].any()
        for place in range(length):
            seen = slice(begin + max(0, place + 1 - (window or length)), begin + place + 1)
            for head in range(heads):
                own = head // (heads // kv_heads)
                weights = (k[seen, own] @ q[begin + place, head] * 0.4).softmax(-1)
                torch.testing.assert_close(got[begin + place, head], weights @ v[seen, own])
        begin += length
