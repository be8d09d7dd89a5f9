"""vLLM engines for tests; importing this takes vLLM."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.v1.engine.llm_engine import LLMEngine

from winnow.rollout.engine import WeightUpdate
from winnow.rollout.vllm_engine import VllmEngine, meta_model, start_vllm

SLOTS = 32
"""The most answers at once of an engine of a test."""


@cache
def started(config: str, dtype: str = "float32", **options: object) -> tuple[LLMEngine, nn.Module]:
    """A vLLM that tests share, with random weights, and the shapes of its model.

    Args:
        config: the text of a `config.json`.
    """
    folder = tempfile.mkdtemp(prefix="winnow-vllm-")
    Path(folder, "config.json").write_text(config)
    given = {"slots": SLOTS, "prefill_tokens": 1024, "cache_gib": 1 / 32} | options
    given["extra"] = {"load_format": "dummy"} | dict(given.get("extra", ()))  # type: ignore[call-overload]
    llm = start_vllm(folder, dtype=dtype, **given)  # type: ignore[arg-type]
    return llm, meta_model(folder, getattr(torch, dtype))


def vllm_engine(
    model: PreTrainedModel,
    slots: int = 8,
    prefill_tokens: int = 64,
    vocab_size: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    live_updates: bool = False,
) -> VllmEngine:
    """An engine with the weights of a model; no older one of the same config may be used again."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    llm, shapes = started(json.dumps(config))
    llm.abort_request(list(llm.output_processor.external_req_ids))
    engine = VllmEngine(
        llm, shapes, slots, vocab_size or model.config.vocab_size, decode, live_updates
    )
    tensors = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    asyncio.run(engine.load_weights(WeightUpdate(0, tensors)))
    return engine
