"""An adapter's files, written by other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.small_models import digits_folder
from tests.stored import Elsewhere

from winnow.config.model import LoraAdapter
from winnow.errors import PublicationError
from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import freeze, load_causal_lm
from winnow.models.lora import add_lora
from winnow.rollout.remote_engine import TorchEngineWorker
from winnow.rollout.weights import WeightUpdate, pack_buckets


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_apart_takes_the_adapter_alone(dtype: Any, tmp_path: Path) -> None:
    base, adapter = str(digits_folder(tmp_path / "base")), LoraAdapter(rank=2)
    model = load_causal_lm(base, getattr(torch, dtype), torch.device("cpu"))
    add_lora(model, adapter, seed=3)
    freeze(model, ["*lora_A*"])  # it must come all the same
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    policy = Strategy(model)
    options: dict[str, Any] = {"model": base, "dtype": dtype, "slots": 2, "prefill_tokens": 64}
    engine: Any = TorchEngineWorker(SimpleNamespace(device_index=None), adapter=adapter, **options)
    canary = Canary.random(29, 64, model.dtype)
    expected = canary.score(policy)

    async def run() -> None:
        inner = engine._engine
        with pytest.raises(PublicationError, match="disagrees with the trainer"):
            await canary.check(expected, 1, {"engine": inner})
        alone = list(pack_buckets(WeightUpdate(1, policy.export_weights(adapter_only=True))))
        sent = sum(piece.array.nbytes for bucket in alone for piece in bucket.pieces)
        assert sent == sum(w.nbytes for n, w in model.named_parameters() if ".lora_" in n)
        await inner.load_weights(WeightUpdate(1, stored=[Elsewhere(alone)]))
        assert await canary.check(expected, 1, {"engine": inner}) >= 0
        whole = list(pack_buckets(WeightUpdate(2, policy.export_weights())))
        with pytest.raises(PublicationError, match="no such tensor"):
            await inner.load_weights(WeightUpdate(2, stored=[Elsewhere(whole)]))

    asyncio.run(run())
