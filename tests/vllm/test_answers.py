"""Answers of the vLLM engine: the torch engine's tokens, whatever vLLM's scheduler does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import CONFIGS, VOCAB, drain, model_of, torch_engine
from tests.vllm_engines import SLOTS, vllm_engine
from transformers import PreTrainedModel

from winnow.errors import ConfigError
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.types import Segment

SAMPLING = [
    SamplingParams(60, 0.8, stop_token_ids=(2,)),
    SamplingParams(60, 1.3, top_p=0.9, stop_token_ids=(2, 5)),
    SamplingParams(60, 1.0, top_k=7, min_p=0.02),
    SamplingParams(60, 0.0),
]


def requests(count: int = 8, n: int = 4, longest: int = 60, seed: int = 0) -> list[GroupRequest]:
    """Groups with different settings, prompts and stop ids."""
    rng = np.random.default_rng(seed)
    return [
        GroupRequest(
            g,
            rng.integers(3, VOCAB, rng.integers(1, longest)),
            tuple(AnswerRequest(i, 2**63 + 1000 * g + i) for i in range(n)),
            SAMPLING[g % len(SAMPLING)],
            g,
        )
        for g in range(count)
    ]


def expected(model: PreTrainedModel, groups: Sequence[GroupRequest]) -> dict[Any, CompletionEvent]:
    """The torch engine's answers; it takes one set of stop ids at a time."""
    found: dict[Any, CompletionEvent] = {}
    engine = torch_engine(model, slots=SLOTS)
    for group in groups:
        found |= drain(engine, [group])
    return found


def assert_same(got: dict[Any, CompletionEvent], want: dict[Any, CompletionEvent]) -> None:
    assert got.keys() == want.keys()
    for key, event in want.items():
        np.testing.assert_array_equal(got[key].segment.token_ids, event.segment.token_ids)
        np.testing.assert_allclose(got[key].segment.logprobs, event.segment.logprobs, atol=3e-5)
        assert got[key].finish_reason == event.finish_reason


def scheduler_of(engine: Any) -> Any:
    return engine._llm.engine_core.engine_core.scheduler


@pytest.mark.parametrize("slots", [3, SLOTS])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "qwen2-window"])
def test_tokens_are_those_of_the_torch_engine_whatever_the_batch(name: str, slots: int) -> None:
    groups = requests()
    want = expected(model_of(name, torch.float32), groups)
    got = drain(vllm_engine(model_of(name), slots=slots), groups)
    assert_same(got, want)
    assert {event.finish_reason for event in got.values()} == {"stop", "length"}


def test_tokens_behind_a_prefix_are_those_of_the_torch_engine() -> None:
    groups = requests(n=1)
    want = expected(model_of("qwen3", torch.float32), groups)
    resumed = []
    for group in groups:
        whole = want[group.group_id, 0].segment
        cut = max(1, 2 * len(whole) // 3) if len(whole) > 1 else 0
        prefix = Segment(whole.token_ids[:cut], whole.logprobs[:cut], ()) if cut else None
        answer = AnswerRequest(0, group.answers[0].seed, prefix)
        resumed.append(GroupRequest(group.group_id, group.prompt_ids, (answer,), group.sampling, 0))
    assert_same(drain(vllm_engine(model_of("qwen3")), resumed), want)


def test_answers_that_lose_their_memory_are_written_as_if_they_had_kept_it() -> None:
    """The cache holds five blocks of 128 tokens; eight answers of two blocks each want it."""
    model = model_of("qwen3")
    rng = np.random.default_rng(4)
    groups = [
        GroupRequest(
            g,
            rng.integers(3, VOCAB, 100),
            (AnswerRequest(0, g),),
            SamplingParams(100, 0.9),
            g,
        )
        for g in range(8)
    ]
    bytes_a_block = 128 * 2 * 2 * 2 * 32 * 4  # tokens, K and V, layers, heads, elements, float32
    engine = vllm_engine(model, cache_gib=6 * bytes_a_block / 2**30, longest=200)
    preempted: set[str] = set()
    inner = scheduler_of(engine)._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.add(request.request_id)
        inner(request, *args, **kwargs)

    scheduler_of(engine)._preempt_request = preempt
    got = drain(engine, groups)
    scheduler_of(engine)._preempt_request = inner
    assert preempted
    assert_same(got, drain(torch_engine(model_of("qwen3", torch.float32)), groups))
    assert engine.status().generated_tokens == 800
    # The first in the queue kept theirs.
    ticks = [got[g, 0].tick for g in range(8)]
    assert ticks[0] == min(ticks) <= 102


def test_prompts_cut_in_chunks_give_the_same_tokens() -> None:
    groups = requests(longest=180)
    want = expected(model_of("qwen3", torch.float32), groups)
    engine = vllm_engine(model_of("qwen3"), prefill_tokens=40)
    got = drain(engine, groups)
    assert_same(got, want)
    whole = drain(vllm_engine(model_of("qwen3")), groups)
    assert max(e.tick for e in got.values()) > max(e.tick for e in whole.values())


def test_uncut_prompts_need_no_larger_steps_than_the_longest_answer() -> None:
    """The sequences of the canary are longer than all answers here, and have to be taken."""
    engine = vllm_engine(model_of("qwen3"), chunked_prefill=False, prefill_tokens=100, longest=100)
    groups = requests(longest=40)
    assert_same(drain(engine, groups), expected(model_of("qwen3", torch.float32), groups))
    (found,) = asyncio.run(engine.logprobs_of([np.arange(256) % VOCAB], 1.0, 8))
    assert len(found) == 8


def test_the_answers_to_a_prompt_share_its_prefill() -> None:
    prompt = np.random.default_rng(3).integers(3, VOCAB, 150)
    group = GroupRequest(
        0, prompt, tuple(AnswerRequest(i, i) for i in range(4)), SamplingParams(4), 0
    )
    computed = []
    for caching in (True, False):
        engine = vllm_engine(model_of("qwen3"), prefix_caching=caching)
        scheduler, tokens = scheduler_of(engine), 0
        inner = scheduler.schedule

        def schedule(*args: Any, inner: Any = inner) -> Any:
            nonlocal tokens
            found = inner(*args)
            tokens += found.total_num_scheduled_tokens
            return found

        scheduler.schedule = schedule
        drain(engine, [group])
        scheduler.schedule = inner
        computed.append(tokens)
    # One block of 128 tokens is full; the rest is computed for each.
    assert computed == [4 * (150 + 3) - 3 * 128, 4 * (150 + 3)]


def test_sequences_are_scored_beside_answers_in_all_slots() -> None:
    engine = vllm_engine(model_of("qwen3"), slots=SLOTS, live_updates=True)
    (group,) = requests(1)
    many = tuple(AnswerRequest(i, i) for i in range(SLOTS))
    endless = GroupRequest(0, group.prompt_ids, many, SamplingParams(150), 0)

    async def run() -> None:
        await engine.submit([endless])
        assert await engine.events(until=5) == []
        (found,) = await engine.logprobs_of([np.arange(3, 40)], 1.0, 8)
        assert len(found) == 8
        # Eight tokens and a prefill: it did not wait for the end of an answer.
        assert engine.status().tick <= 5 + 9
        assert engine.status().running == SLOTS

    asyncio.run(run())


def test_an_fp32_head_is_exact_in_bf16() -> None:
    gaps = []
    for fp32_head in (True, False):
        model = model_of("qwen3", torch.bfloat16)
        for layer in model.model.layers:  # what is left to differ is the head
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        model.model.norm.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        extra = {"hf_overrides": {"rope_theta": 20_000.0}}  # has to leave the head as it is
        engine = vllm_engine(model, fp32_head=fp32_head, extra=extra)
        ids = np.random.default_rng(0).integers(0, VOCAB, 60)
        (found,) = asyncio.run(engine.logprobs_of([ids], 1.0, 59))
        rows = torch.from_numpy(ids)
        with torch.no_grad():
            states = model.model.norm(model.model.embed_tokens(rows)).double()
            logits = states @ model.get_output_embeddings().weight.double().T
        want = logits[:-1].log_softmax(-1).gather(1, rows[1:, None])[:, 0]
        gaps.append(float(np.abs(found - want.numpy()).max()))
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


def test_an_answer_that_does_not_fit_is_refused_when_it_is_submitted() -> None:
    engine = vllm_engine(model_of("qwen3"))
    group = GroupRequest(7, np.arange(3, 13), (AnswerRequest(0, 0),), SamplingParams(250), 0)
    with pytest.raises(ValueError, match="group 7: a prompt of 10 tokens and an answer of 250"):
        asyncio.run(engine.submit([group]))
    assert engine.status().queued == 0


def test_more_tokens_than_the_model_has_positions_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"allow 300 tokens, but .* has 256 positions"):
        vllm_engine(model_of("qwen3"), longest=300)
