"""Simulation of a vision tower on a rank: the images of prompts, and their passes on fake pixels.

Each prompt is assumed to show one image, the largest that `data.max_prompt_tokens` and the limits
of pixels allow. A rank encodes the images of an update in chunks, each for its n answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from winnow.config.root import Config
from winnow.errors import ModelError
from winnow.learning.batch import MicroBatch
from winnow.learning.images import EncodedImages
from winnow.learning.runner import ModelRunner, Output
from winnow.types import Image

# Transformers gives whole tensors with boundaries to implementations of such names.
_ATTENTION = "winnow_plan_flash_attention"


def make_images(config: Config, model: Any) -> tuple[Image, ...]:
    """Make the images, without pixels, that a rank encodes for an update; none for text models.

    Raises:
        ModelError: the model's tower cannot be simulated.
    """
    if (processor := getattr(model, "image_processor", None)) is None:
        return ()
    vision = model.config.vision_config
    if not hasattr(vision, "window_size"):
        raise ModelError(
            f"model.path={model.name_or_path}: a vision tower of type {model.config.model_type} "
            "cannot be planned; plan with a model of type qwen2_5_vl of this size"
        )
    edge = processor.patch_size * processor.merge_size
    pixels = config.data.max_pixels or processor.size["longest_edge"]
    window = (vision.window_size // edge or 1) ** 2
    windows = min(pixels // edge**2, config.data.max_prompt_tokens - 2) // window or 1
    groups = config.trainer.groups_per_update(config.sampling.groups_per_step)
    ranks = getattr(config.trainer.strategy, "ranks", 1)
    count = min(groups, math.ceil(groups * config.rollout.n / ranks))
    return tuple(Image(0, (window, windows), b"", str(number)) for number in range(count))


class TowerRunner(ModelRunner):
    """A runner that gives the vision tower fake pixels; images have whole windows alone."""

    def forward(
        self, micro: MicroBatch | tuple[Image, ...], outputs: frozenset[Output] = frozenset()
    ) -> dict[Output, Tensor] | Tensor:
        if not isinstance(micro, tuple):
            return super().forward(micro, outputs)
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _attend_windows)
        model = cast(Any, self.model)
        tower, processor = model.base_model.visual, model.image_processor
        tower.config._attn_implementation = _ATTENTION
        tokens, windows = sum(map(len, micro)), sum(image.grid[1] for image in micro)
        patches = tokens * processor.merge_size**2
        size = 3 * processor.temporal_patch_size * processor.patch_size**2
        output = tower(
            torch.empty(patches, size, dtype=tower.dtype),
            grid_thw=torch.ones(len(micro), 3, dtype=torch.int64),
            position_ids=torch.zeros(patches, 2, dtype=torch.int64),
            window_index=torch.arange(tokens),
            cu_seqlens=torch.zeros(len(micro) + 1),
            cu_window_seqlens=torch.zeros(windows + 1),
        )
        return torch.stack((output.pooler_output,))


def _attend_windows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend within windows of one size, as transformers calls it; query is [1, N, T, D]."""
    count = len(options["cu_seq_lens_q"]) - 1
    heads, width = query.shape[1], query.shape[-1]
    q, k, v = (t.reshape(heads, count, -1, width).transpose(0, 1) for t in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, scale=options["scaling"])
    return out.transpose(1, 2).flatten(0, 1)[None], None


class TrackedImages(EncodedImages):
    """Features whose backward pass is a phase of its own."""

    begin: Callable[[], object]
    """Called at the start of the backward pass."""

    def backward(self) -> None:
        self.begin()
        super().backward()
