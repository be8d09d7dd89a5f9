"""An adapter alone, published to the vLLM engine: from its version on, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.test_engine import VOCAB, model_of, reference_logprobs
from tests.vllm.test_publication import group_of
from transformers import PreTrainedModel

from winnow.config.model import LoraAdapter
from winnow.errors import PublicationError
from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.models.lora import add_lora, merge
from winnow.rollout.vllm.engine import VllmEngine, VllmEngineWorker
from winnow.rollout.weights import WeightUpdate, pack_buckets

ADAPTER = LoraAdapter(rank=3, alpha=5.0, rslora=True)


def adapted(seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The base with an adapter that has learnt."""
    model = model_of("qwen3", dtype)
    add_lora(model, ADAPTER, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return model


def alone(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    return list(Strategy(model).export_weights(adapter_only=True))


def exact(seed: int) -> PreTrainedModel:
    """The same, merged, in float64."""
    model = adapted(seed).double()
    merge(model)
    return model


ALIVE: list[VllmEngine] = []
"""A vLLM that is collected ends the process groups of all others of its process."""


def engine_of(folder: Path, dtype: str = "float32", **options: Any) -> VllmEngine:
    model_of("qwen3", getattr(torch, dtype)).save_pretrained(folder)
    rank = SimpleNamespace(device_index=None)
    given = {"slots": 8, "prefill_tokens": 1024, "cache_gib": 1 / 32, "vocab_size": VOCAB}
    worker = VllmEngineWorker(
        rank, model=str(folder), dtype=dtype, adapter=ADAPTER, **given | options
    )
    engine: Any = worker._engine
    ALIVE.append(engine)
    return engine


def test_an_adapter_acts_from_its_version_on_though_prompts_were_cached(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, live_updates=True, slots=12)
    prompt = np.random.default_rng(0).integers(3, VOCAB, 140)  # a block of the cache, and more
    done: dict[int, list[Any]] = {}

    async def publish(version: int) -> None:
        packed = list(pack_buckets(WeightUpdate(version, alone(adapted(version))), 2000))
        assert len(packed) > 10
        for bucket in packed:
            assert await engine.take_bucket(bucket) == bucket.checksum()
        await engine.load_weights(WeightUpdate(version))

    async def run() -> None:
        for version in (0, 1, 2):
            if version:
                await publish(version)
            limits = {2 * version: 20, 2 * version + 1: 60}
            await engine.submit([group_of(prompt, n, limit=limit) for n, limit in limits.items()])
            for event in await engine.events():
                done.setdefault(event.group_id, []).append(event.segment)
        while events := await engine.events():
            for event in events:
                done.setdefault(event.group_id, []).append(event.segment)

    asyncio.run(run())
    assert {number: len(found) for number, found in done.items()} == dict.fromkeys(range(6), 3)
    references = [model_of("qwen3", torch.float64), exact(1), exact(2)]
    for version, reference in enumerate(references):
        for segment in done[2 * version]:  # begun and ended under it
            assert [span.version for span in segment.spans] == [version]
            want = reference_logprobs(reference, prompt, segment.token_ids)
            np.testing.assert_allclose(segment.logprobs, want, atol=3e-5)
        begun = [[(s.version, s.stop) for s in segment.spans] for segment in done[2 * version + 1]]
        ends = [[(0, 20), (1, 40), (2, 60)], [(1, 20), (2, 60)], [(2, 60)]]
        assert begun == [ends[version]] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_hears_another_adapter(dtype: str, tmp_path: Path) -> None:
    engine = engine_of(tmp_path, dtype)
    model = adapted(1, getattr(torch, dtype))
    use_layout_attention(model)
    canary = Canary.random(VOCAB, 64, model.dtype)
    expected = canary.score(Strategy(model))

    async def run() -> float:
        for seed in (None, 2):
            if seed is not None:
                other = alone(adapted(seed, model.dtype))
                await engine.load_weights(WeightUpdate(seed, other))
            with pytest.raises(PublicationError, match="disagrees with the trainer"):
                await canary.check(expected, 1, {"engine": engine})
        await engine.load_weights(WeightUpdate(3, alone(model)))
        found = await canary.check(expected, 3, {"engine": engine})
        with pytest.raises(PublicationError, match="no such tensor"):
            await engine.load_weights(WeightUpdate(4, Strategy(model).export_weights()))
        return found

    # Without bfloat16 instructions (AVX2) 0.11 was seen.
    assert asyncio.run(run()) < {"float32": 1e-4, "bfloat16": 0.25}[dtype]
