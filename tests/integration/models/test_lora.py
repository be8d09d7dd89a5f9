"""An adapter's files, written by other processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
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
from winnow.rollout.engine import WeightUpdate
from winnow.rollout.remote_engine import TorchEngineWorker
from winnow.rollout.weights import buckets

WRITE = """
import sys
from pathlib import Path
import torch
from winnow.config.model import LoraAdapter
from winnow.data.sort_digits import build_tokenizer
from winnow.models.causal_lm import load_causal_lm
from winnow.models.lora import adapter_weights, adapter_writer, add_lora

model = load_causal_lm(sys.argv[1], torch.float32, torch.device("cpu"))
add_lora(model, LoraAdapter(rank=2), seed=0)
weights = {name: torch.ones_like(tensor) for name, tensor in adapter_weights(model)}
adapter_writer(model, build_tokenizer())(weights, Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_the_same_adapter_is_written_in_the_same_bytes_by_every_process(tmp_path: Path) -> None:
    base = digits_folder(tmp_path / "base")
    written = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", WRITE, str(base), str(folder)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0]
    assert written[0] == written[1]


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
    canary = Canary.drawn(29, 64, model.dtype)
    expected = canary.expected(policy)

    async def run() -> None:
        inner = engine._engine
        with pytest.raises(PublicationError, match="does not answer as the trainer does"):
            await canary.check(expected, 1, {"engine": inner})
        alone = list(buckets(WeightUpdate(1, policy.export_weights(adapter_only=True))))
        sent = sum(piece.array.nbytes for bucket in alone for piece in bucket.pieces)
        assert sent == sum(w.nbytes for n, w in model.named_parameters() if ".lora_" in n)
        await inner.load_weights(WeightUpdate(1, shares=[Elsewhere(alone)]))
        assert await canary.check(expected, 1, {"engine": inner}) >= 0
        whole = list(buckets(WeightUpdate(2, policy.export_weights())))
        with pytest.raises(PublicationError, match="none of that name"):
            await inner.load_weights(WeightUpdate(2, shares=[Elsewhere(whole)]))

    asyncio.run(run())
