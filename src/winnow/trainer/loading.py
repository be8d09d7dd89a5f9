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
    config: ModelConfig, path: str, device: torch.device, seed: int, start: str | None = None
) -> PreTrainedModel:
    """The model to train, from a model's folder or from a checkpoint's with an adapter.

    Args:
        path: not `config.path` where a warm start or a checkpoint gives the model.
        seed: of a new adapter.
        start: where the model lies now that an adapter belongs to, if that has moved.

    Raises:
        ModelError: model, adapter or frozen weights are not what the recipe says.
    """
    base = adapter_base(Path(path), start or config.path)
    # Else what it started from would not be the model with the adapter switched off.
    if base is not None and (path == config.path or not isinstance(config.adapter, LoraAdapter)):
        raise ModelError(
            f"model.path {path} is an adapter; merge it into its model first, as winnow export "
            "does for a run, and give that"
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
