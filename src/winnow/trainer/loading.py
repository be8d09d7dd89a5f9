"""The policy's model as a recipe asks for it: base, adapter, frozen weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from winnow.config.model import LoraAdapter, ModelConfig
from winnow.errors import ModelError
from winnow.models import freeze, load_causal_lm, torch_dtype
from winnow.workers.lora import adapter_base, add_lora, load_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_policy_model(
    config: ModelConfig, path: str, device: torch.device, seed: int
) -> PreTrainedModel:
    """The model to train, from a model's folder or, to go on with, an adapter's.

    Args:
        path: not `config.path` where a warm start or a checkpoint gives the model.
        seed: of a new adapter.

    Raises:
        ModelError: model, adapter or frozen weights are not what the recipe says.
    """
    base = adapter_base(Path(path))
    if base is not None and not isinstance(config.adapter, LoraAdapter):
        raise ModelError(
            f"model.path {path} is an adapter; set model/adapter=lora to train it on, or export it "
            "merged with winnow export"
        )
    dtype = torch_dtype(config.dtype)
    model = load_causal_lm(base or path, dtype, device, config.trust_remote_code)
    if base is not None:
        load_lora(model, Path(path))
    elif isinstance(config.adapter, LoraAdapter):
        add_lora(model, config.adapter, seed)
    if config.freeze:
        freeze(model, config.freeze)
    return model
