"""vLLM engines for tests; importing this takes vLLM."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from vllm.distributed import parallel_state as state
from vllm.v1.engine.llm_engine import LLMEngine

from winnow.rollout.vllm.engine import VllmEngine, meta_model, start_vllm
from winnow.rollout.vllm.worker import VllmOptions
from winnow.rollout.weights import WeightUpdate

SLOTS = 32
"""The most answers at once of an engine of a test."""


@cache
def started(config: str, dtype: str, extra: str, **options: Any) -> tuple[LLMEngine, nn.Module]:
    """A vLLM that tests share, with random weights, and the shapes of its model.

    Args:
        config: the text of a `config.json`.
        extra: further options of vLLM's, as JSON.
    """
    if state.model_parallel_is_initialized() and state._EP is None:
        # A mixture wants a group that vLLM makes where the first model of a process is one.
        state._EP = state.init_model_parallel_group([[0]], 0, "gloo", group_name="ep")
    folder = tempfile.mkdtemp(prefix="winnow-vllm-")
    Path(folder, "config.json").write_text(config)
    given: dict[str, Any] = {"prefill_tokens": 1024, "cache_gib": 1 / 32} | options
    others = {"load_format": "dummy"} | json.loads(extra)
    llm = start_vllm(folder, VllmOptions(dtype=dtype, slots=SLOTS, extra=others, **given))
    return llm, meta_model(folder, getattr(torch, dtype))


def vllm_engine(
    model: PreTrainedModel,
    slots: int = 8,
    vocab_size: int | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    live_updates: bool = False,
    staging_engines: int = 0,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> VllmEngine:
    """An engine with the weights of a model, in bf16 where that has them.

    Engines of the same config and `options` (of `start_vllm`) share a vLLM: an older one may not be
    used again.
    """
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    dtype = "bfloat16" if model.dtype == torch.bfloat16 else "float32"
    llm, shapes = started(
        json.dumps(config, default=str), dtype, json.dumps(extra or {}), **options
    )
    llm.abort_request(list(llm.output_processor.external_req_ids))
    vocab_size = vocab_size or model.config.vocab_size
    engine = VllmEngine(llm, shapes, slots, vocab_size, decode, live_updates, staging_engines)
    tensors = ((name, tensor.detach()) for name, tensor in model.named_parameters())
    asyncio.run(engine.load_weights(WeightUpdate(0, tensors)))
    return engine
