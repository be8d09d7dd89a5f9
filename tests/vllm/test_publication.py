"""Publication to the vLLM engine: it uses the new weights alone, or says that it is broken."""

from __future__ import annotations

import asyncio
import copy
import itertools
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import (
    VOCAB,
    Wire,
    model_of,
    reference_logprobs,
    torch_engine,
)
from tests.vllm_engines import vllm_engine
from transformers import PreTrainedModel

from winnow.errors import PublicationError, WorkerError
from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine, Reply
from winnow.rollout.vllm import plugin as vllm_plugin
from winnow.rollout.vllm.engine import VllmEngine
from winnow.rollout.weights import Bucket, WeightUpdate, pack_buckets

Weights = list[tuple[str, torch.Tensor]]


def learned(name: str = "qwen3", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model after it has learnt: every tensor is another."""
    model = model_of(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    return model


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs a head of this type for this CPU: bfloat16 needs AVX-512."""
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def weights_of(model: PreTrainedModel) -> Weights:
    return [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]


def group_of(prompt: np.ndarray, number: int, n: int = 3, limit: int = 20) -> GroupRequest:
    answers = tuple(AnswerRequest(i, 10 * number + i) for i in range(n))
    return GroupRequest(number, prompt, answers, SamplingParams(limit), number)


async def publish(engine: Any, update: WeightUpdate, bucket_bytes: int = 20_000) -> list[int]:
    """Returns the engine's tick before each bucket and after the last one."""
    packed = list(pack_buckets(update, bucket_bytes))
    assert len(packed) > 10
    ticks = [engine.status().tick]
    for bucket in packed:
        assert await engine.take_bucket(bucket) == bucket.checksum()
        ticks.append(engine.status().tick)
        await asyncio.sleep(0)
    await engine.load_weights(WeightUpdate(update.version))
    return ticks


# A tied head, one of its own, and experts, whose width vLLM pads.
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "qwen3-experts"])
def test_fresh_answers_are_of_the_new_weights_though_their_prompt_was_cached(name: str) -> None:
    engine = vllm_engine(model_of(name), live_updates=True)
    prompt = np.random.default_rng(0).integers(3, VOCAB, 140)  # a block of the cache, and more
    new = learned(name)

    async def run() -> tuple[list[Any], list[Any]]:
        await engine.submit([group_of(prompt, 0), group_of(prompt[:5], 1, limit=100)])
        cached = list(await engine.events())
        assert engine.status().running == 3  # the cache cannot be emptied now
        await publish(engine, WeightUpdate(1, weights_of(new)))
        await engine.submit([group_of(prompt, 2)])
        fresh: list[Any] = []
        while events := await engine.events():
            fresh += events
        return cached, fresh

    cached, fresh = asyncio.run(run())
    for event in cached:
        want = reference_logprobs(model_of(name), prompt, event.segment.token_ids)
        np.testing.assert_allclose(event.segment.logprobs, want, atol=3e-5)
    reference = learned(name, torch.float64)
    for event in fresh:
        spans = [(span.version, span.stop) for span in event.segment.spans]
        if event.group_id == 1:
            assert spans == [(0, 20), (1, 100)]
            continue
        assert spans == [(1, 20)]
        want = reference_logprobs(reference, prompt, event.segment.token_ids)
        np.testing.assert_allclose(event.segment.logprobs, want, atol=5e-6)
    assert len(cached) == 3
    assert len(fresh) == 6


@pytest.mark.parametrize("name", ["qwen3", "qwen3-experts"])
def test_answers_go_on_while_an_update_is_kept_beside_the_weights(name: str) -> None:
    group, new = group_of(np.arange(3, 9), 0, limit=240), weights_of(learned(name))
    size = sum(tensor.nbytes for _, tensor in new) // 11

    async def run(staging: int, at: int, breaks_off: bool = False) -> tuple[list[int], list[Any]]:
        engine = engines[staging]
        before = engine.status().tick
        await engine.submit([group])
        assert await engine.events(until=before + at) == []
        if breaks_off:
            with pytest.raises(PublicationError, match="are missing"):
                await publish(engine, WeightUpdate(1, new[:-1]), size)
            assert engine.status().weight_version == 0
        ticks = await publish(engine, WeightUpdate(1, new), size)
        found: list[Any] = []
        while events := await engine.events():
            found += events
        return [tick - before for tick in ticks], found

    engines = {}
    told = []
    for breaks_off in (False, True):
        engines[1] = vllm_engine(model_of(name), live_updates=True, staging_engines=1)
        ticks, beside = asyncio.run(run(1, 3, breaks_off))
        assert all(later > earlier for earlier, later in itertools.pairwise(ticks))
        engines[0] = vllm_engine(model_of(name), live_updates=True)
        still, found = asyncio.run(run(0, ticks[-1]))
        assert set(still) == {ticks[-1]}
        told.append(ticks[-1])
        for ours, theirs in zip(beside, found, strict=True):
            assert ours.segment.spans == theirs.segment.spans
            assert [(span.version, span.stop) for span in ours.segment.spans][1:] == [(1, 240)]
            np.testing.assert_array_equal(ours.segment.token_ids, theirs.segment.token_ids)
            np.testing.assert_allclose(ours.segment.logprobs, theirs.segment.logprobs, atol=1e-6)
    assert told[1] > told[0]


def test_answers_that_wait_for_memory_begin_with_the_new_weights() -> None:
    """The cache holds four of eight answers, and their prompt as the old weights read it."""
    bytes_a_block = 128 * 2 * 2 * 2 * 32 * 4  # tokens, K and V, layers, heads, elements, float32
    memory = {"cache_gib": 6 * bytes_a_block / 2**30, "longest": 200}
    engine = vllm_engine(model_of("qwen3"), live_updates=True, **memory)
    prompt = np.random.default_rng(0).integers(3, VOCAB, 140)

    async def run() -> list[Any]:
        await engine.submit([group_of(prompt, 0, n=8, limit=40)])
        assert await engine.events(until=20) == []
        assert [len(event.segment) for event in await engine.progress()] == [20] * 4 + [0] * 4
        await publish(engine, WeightUpdate(1, weights_of(learned())))
        assert engine.status().running + engine.status().queued == 8
        out: list[Any] = []
        while events := await engine.events():
            out += events
        return out

    done = {event.answer: event.segment for event in asyncio.run(run())}
    spans = [[(span.version, span.stop) for span in done[i].spans] for i in range(8)]
    assert spans == [[(0, 20), (1, 40)]] * 4 + [[(1, 40)]] * 4
    reference = learned(dtype=torch.float64)
    for answer in range(4, 8):
        want = reference_logprobs(reference, prompt, done[answer].token_ids)
        np.testing.assert_allclose(done[answer].logprobs, want, atol=5e-6)


def test_bf16_weights_arrive_and_a_stale_tied_head_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM on a CPU leaves the packed copy of a tied head as it was, and reports success."""
    new = learned(dtype=torch.bfloat16)
    engine = vllm_engine(model_of("qwen3", torch.bfloat16))
    ids = [np.random.default_rng(1).integers(0, VOCAB, 64)]
    (want,) = asyncio.run(torch_engine(new).logprobs_of(ids, 1.0, 63))
    gaps = []
    for repack in (False, True):
        if not repack:
            monkeypatch.setattr(vllm_plugin, "repack_head", lambda model: None)
        asyncio.run(engine.load_weights(WeightUpdate(1, weights_of(new))))
        (found,) = asyncio.run(engine.logprobs_of(ids, 1.0, 63))
        gaps.append(float(np.abs(found - want).max()))
        monkeypatch.undo()
    assert gaps[1] < 0.2
    assert gaps[0] > 1 or not packs(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_canary_catches_a_stale_tied_head_of_weights_5_percent_apart(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_of("qwen3", dtype)
    with torch.no_grad():
        for parameter in before.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.2)  # as flat as models begin
    engine, policy = vllm_engine(before), copy.deepcopy(before)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_((1 + 0.05 * torch.randn(parameter.shape)).to(dtype))
    use_layout_attention(policy)
    strategy = Strategy(policy, temperature=0.8, vocab_size=VOCAB)
    canary = Canary.random(VOCAB, 256, dtype, 0.8)
    expected = canary.score(strategy)
    tensors = list(strategy.export_weights(dtype))

    async def run() -> None:
        with monkeypatch.context() as without:
            without.setattr(vllm_plugin, "repack_head", lambda model: None)
            await engine.load_weights(WeightUpdate(1, tensors))
        if packs(dtype):
            with pytest.raises(PublicationError, match="engine 0 disagrees with the trainer"):
                await canary.check(expected, 1, {"engine 0": engine})
        await engine.load_weights(WeightUpdate(2, tensors))
        largest = await canary.check(expected, 2, {"engine 0": engine})
        assert largest < expected.limits.largest / 2

    asyncio.run(run())


def test_an_engine_that_slept_writes_with_the_weights_that_wake_it() -> None:
    """On a CPU vLLM gives no memory back, but its scheduler and prefix cache sleep as on a GPU."""
    engine, new = vllm_engine(model_of("qwen3")), learned()
    prompt = np.random.default_rng(0).integers(3, VOCAB, 140)

    async def run() -> list[Any]:
        await engine.submit([group_of(prompt, 0)])
        await engine.events(until=3)
        with pytest.raises(ValueError, match="abort what runs before the engine sleeps"):
            await engine.sleep()
        await engine.abort([0])
        assert len(await engine.events()) == 3
        remote = RemoteEngine(Wire(EngineWorker(engine)), Reply(None, [], engine.status()))
        group = EngineGroup([remote], True)
        await group.sleep()
        assert engine._llm.engine_core.engine_core.is_scheduler_paused()
        await group.wake("weights")
        assert engine._llm.engine_core.engine_core.is_scheduler_paused()
        await group.load_weights(WeightUpdate(1, weights_of(new)))
        await group.wake("cache")
        await group.submit([group_of(prompt, 1)])
        return list(await group.events())

    for event in asyncio.run(run()):
        want = reference_logprobs(learned(dtype=torch.float64), prompt, event.segment.token_ids)
        np.testing.assert_allclose(event.segment.logprobs, want, atol=5e-6)


SIZES = count(1000)


@pytest.fixture
def doomed() -> VllmEngine:
    """An engine whose vLLM no other test uses."""
    return vllm_engine(model_of("qwen3"), live_updates=True, prefill_tokens=next(SIZES))


def shortened(update: WeightUpdate) -> WeightUpdate:
    assert update.tensors is not None
    return WeightUpdate(update.version, list(update.tensors)[:-1])


def misnamed(update: WeightUpdate) -> WeightUpdate:
    return WeightUpdate(update.version, [(f"x.{name}", t) for name, t in update.tensors or ()])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(shortened, "1 of the model's tensors are missing"), (misnamed, "no such tensor")],
    ids=["a tensor is missing", "names are of another model"],
)
def test_an_update_that_came_in_part_ends_the_engine(
    doomed: VllmEngine, spoil: Any, reason: str
) -> None:
    update = WeightUpdate(1, weights_of(learned()))

    async def run() -> None:
        await doomed.submit([group_of(np.arange(3, 9), 0, limit=100)])
        await doomed.events(until=3)
        waiting = asyncio.create_task(doomed.events())
        with pytest.raises(PublicationError, match=reason):
            await publish(doomed, spoil(update))
        calls: list[Any] = [
            waiting,  # it is not left waiting
            doomed.events(),
            doomed.submit([group_of(np.arange(3, 9), 1)]),
            doomed.logprobs_of([np.arange(3, 9)], 1.0, 2),
            doomed.take_bucket(next(iter(pack_buckets(update)))),
            doomed.load_weights(WeightUpdate(2)),
        ]
        for call in calls:
            with pytest.raises(WorkerError, match=f"{reason}.*the engine must be replaced"):
                await asyncio.wait_for(call, 60)
        # What it wrote until then is known.
        told = await doomed.progress()
        assert [len(event.segment) for event in told] == [3, 3, 3]

    asyncio.run(run())


def test_others_go_on_when_one_engine_cannot_take_weights(
    doomed: VllmEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = learned()
    receiver = doomed._make_receiver

    def interrupted(version: int) -> Any:
        doomed._llm.collective_rpc("start_weight_update")  # as one that was cut off leaves it
        return receiver(version)

    monkeypatch.setattr(doomed, "_make_receiver", interrupted)
    healthy = torch_engine(model_of("qwen3", torch.float32), live_updates=True)

    async def run() -> list[Any]:
        engines = [
            RemoteEngine(Wire(EngineWorker(engine)), Reply(None, [], engine.status()))
            for engine in (healthy, doomed)
        ]
        group = EngineGroup(engines, deterministic=False)
        await group.submit([group_of(np.arange(3, 9), g, limit=200) for g in range(5)])
        await asyncio.sleep(0.05)
        await group.load_weights(WeightUpdate(1, weights_of(new)))
        out: list[Any] = []
        while events := await group.events():
            out += events
        assert group.dead == ["engine 1"]
        assert group.status().weight_version == 1
        return out

    events = asyncio.run(run())
    assert {event.kind for event in events} == {"finished"}
    assert len({event.key for event in events}) == len(events) == 15
    assert "already active" in caplog.text


def test_a_bucket_out_of_turn_ends_the_engine(doomed: VllmEngine) -> None:
    first: Bucket = next(iter(pack_buckets(WeightUpdate(1, weights_of(learned())), 20_000)))

    async def run() -> None:
        await doomed.take_bucket(first)
        with pytest.raises(PublicationError, match="expected bucket 1 of version 1"):
            await doomed.take_bucket(Bucket(1, 5, first.pieces))
        with pytest.raises(WorkerError, match="must be replaced"):
            await doomed.take_bucket(first)

    asyncio.run(run())
