"""Vision-language models in vLLM: requests carry patches and grids instead of files.

Images are prepared as for the trainer, so vLLM gets what its own processor would make of them, and
that processor, which takes a tokenizer and torchvision, is never loaded. Importing this module
registers the models in its process: `start_vllm` has each of vLLM's workers import it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl
from transformers.utils import is_torchvision_available
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal import MULTIMODAL_REGISTRY, inputs
from vllm.multimodal.processing import BaseProcessingInfo

from winnow.models.folders import quiet_transformers
from winnow.models.vision import image_patches
from winnow.rollout.vllm.plugin import WorkerExtension as WorkerExtension  # vLLM finds it here
from winnow.types import Image


def image_inputs(images: Sequence[Image], processor: Any, salt: str) -> dict[str, Any]:
    """Return what a request for an answer has besides token ids.

    Args:
        images: placed among the token ids.
        processor: the model's, of images.
        salt: of the weights, or vLLM would go on with what an older tower made of an image.
    """
    return {
        "type": "multimodal",
        "mm_kwargs": {"image": [_prepared(image.png, processor) for image in images]},
        "mm_hashes": {"image": [f"{salt}:{image.digest}" for image in images]},
        "mm_placeholders": {"image": [inputs.PlaceholderRange(i.start, len(i)) for i in images]},
    }


@lru_cache(maxsize=8)  # the answers to a prompt follow one another
def _prepared(png: bytes, processor: Any) -> inputs.MultiModalKwargsItem:
    pixels, grids = image_patches(processor, [png])
    return _item(pixels, grids[0])


def _item(pixels: Tensor, grid: Tensor) -> inputs.MultiModalKwargsItem:
    one = inputs.MultiModalBatchedField(keep_on_cpu=True)
    return inputs.MultiModalKwargsItem(
        pixel_values=inputs.MultiModalFieldElem(pixels, inputs.MultiModalFlatField(slices=[])),
        image_grid_thw=inputs.MultiModalFieldElem(grid, one),
    )


class _Info(BaseProcessingInfo):  # type: ignore[misc]
    """Answers what vLLM asks about a model, and of its processor, when it starts."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Any) -> Mapping[str, int]:
        return {"image": seq_len}  # whatever fits the prompt

    def get_dummy_mm_inputs(self, mm_counts: Any, **_: Any) -> dict[str, Any]:
        """Return the largest image, with which vLLM measures a GPU's memory."""
        vision = self.get_hf_config().vision_config
        side = math.isqrt(self.ctx.model_config.max_model_len) * vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        grid = torch.tensor([1, side, side])
        return {"mm_kwargs": {"image": [_item(torch.zeros(side**2, width), grid)]}}


def _processor(info: _Info, _: int) -> SimpleNamespace:
    return SimpleNamespace(info=info, get_dummy_mm_inputs=info.get_dummy_mm_inputs)


if not is_torchvision_available():
    # Of each module vLLM imports a function, which this one has, too.
    for _name in ("qwen2_vl.image_processing_qwen2_vl", "qwen3_vl.video_processing_qwen3_vl"):
        sys.modules[f"transformers.models.{_name}"] = image_processing_pil_qwen2_vl
_register = MULTIMODAL_REGISTRY.register_processor(_processor, info=_Info, dummy_inputs=lambda _: 0)
with quiet_transformers():
    for _name in ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"):
        # vLLM looks at a class of its own list in a process without the modules above.
        _model = type(_name, (ModelRegistry.models[_name].load_model_cls(),), {})
        ModelRegistry.register_model(_name, _register(_model))
