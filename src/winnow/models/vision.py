"""Vision-language models: images as tokens of a prompt, positions, and the vision tower.

A prompt has the image token once for each cell of an image's grid. The embeddings of these are
what the tower makes of the image's patches, and in models with deepstack (Qwen3-VL) further
features are added behind the first decoder layers. Positions are those of M-RoPE (Qwen2-VL,
arXiv:2409.12191): an image takes one place in time and its rows and columns in two further
coordinates, and what follows continues behind the larger of both.

Shapes: `T` tokens of a forward call, `P` of them that stand for images, `M` tokens of some images,
`H` width of the text model, `D` deepstack layers.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.folders import ModelRef, explain_load_errors
from winnow.types import Image, IntArray, join_images

VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` in config.json of the vision-language models that can be trained."""


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """The images among the tokens of a forward call; may be none, if other calls have some."""

    images: tuple[Image, ...]
    """In the order of their tokens; an image of n answers is there n times."""
    places: Tensor
    """[P] int64: the tokens that stand for images, ascending."""
    rope: Tensor
    """[3, T] int64: coordinates of all tokens."""
    features: Tensor | None = None
    """[1 + D, P, H]: embeddings of the tokens of images, and what is added to these behind the
    first D decoder layers; None until the vision tower has run."""

    def to(self, device: torch.device, non_blocking: bool = False) -> PlacedImages:
        """Return a copy without features on `device`."""
        tensors = (t.to(device, non_blocking=non_blocking) for t in (self.places, self.rope))
        return PlacedImages(self.images, *tensors)


def has_vision(config: Any) -> bool:
    """Return whether a config.json is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def check_vision(config: Any, where: ModelRef) -> None:
    """Refuse vision-language models whose positions or features this program does not know.

    Raises:
        ModelError: it is one of these.
    """
    if has_vision(config) and config.model_type not in VISION_MODELS:
        raise ModelError(
            f"{where}: vision-language models of type {config.model_type} are not supported; "
            f"give one of type {' or '.join(VISION_MODELS)}"
        )


def refuse_vision(config: Any, purpose: str, remedy: str) -> None:
    """Refuse a vision-language model where only text is computed.

    Args:
        purpose: what takes text alone, such as a key of the recipe.

    Raises:
        ModelError: it is one.
    """
    if has_vision(config):
        raise ModelError(
            f"{purpose} takes text alone, and {config.name_or_path} is a vision-language model; "
            f"{remedy}"
        )


def load_image_processor(where: ModelRef) -> Any:
    """Load the image processor of a model's folder, in the variant that needs Pillow alone.

    Raises:
        ModelError: the folder has none, or Pillow is not installed.
    """
    from transformers import Qwen2VLImageProcessorPil

    fault = f"{where}: cannot read its preprocessor_config.json"
    with explain_load_errors(fault, missing="pip install 'winnow-rl[images]'"):
        return Qwen2VLImageProcessorPil.from_pretrained(where.path)


def place_images(positions: IntArray, images: Sequence[Image], ends: IntArray) -> PlacedImages:
    """Place images among packed tokens.

    Args:
        positions: [T] of the tokens in their contexts, as if an image took one for each of its own.
        images: placed among the T, in the order of their tokens.
        ends: of all contexts, ascending.
    """
    rope, places = np.tile(positions, (3, 1)), [np.empty(0, np.int64)]
    for image in images:
        start, stop = image.start, image.start + len(image)
        places.append(np.arange(start, stop))
        rope[:, start:stop] = rope[0, start]
        rope[1:, start:stop] += np.indices(image.grid).reshape(2, -1)
        end = ends[np.searchsorted(ends, start, "right")]
        rope[:, stop:end] -= position_shift([image])
    return PlacedImages(tuple(images), *map(torch.from_numpy, (np.concatenate(places), rope)))


def place_spans(
    images: Iterable[tuple[Image, ...]], starts: IntArray, stops: IntArray
) -> PlacedImages | None:
    """Place images among packed spans of contexts; None if the spans show none.

    Args:
        images: of each context, placed in it.
        starts, stops: of each context's tokens that are packed.
    """
    positions, parts = list[IntArray](), list[tuple[int, tuple[Image, ...]]]()
    for context, start, stop in zip(images, starts.tolist(), stops.tolist(), strict=True):
        before = [image for image in context if image.start < start]
        positions.append(np.arange(start, stop) - position_shift(before))
        parts.append((stop - start, tuple(i.at(i.start - start) for i in context[len(before) :])))
    packed, ends = join_images(parts), np.cumsum(stops - starts)
    return place_images(np.concatenate(positions), packed, ends) if packed else None


def position_shift(images: Iterable[Image]) -> int:
    """Return what the coordinates behind these images are less than the tokens' places."""
    return sum(len(image) - max(image.grid) for image in images)


def noise_image(processor: Any, rows: int, columns: int) -> Image:
    """Make an image of fixed noise, of so many rows and columns of tokens."""
    edge = processor.patch_size * processor.merge_size
    rng = np.random.default_rng(0)
    return encode_png(rng.integers(0, 256, (rows * edge, columns * edge, 3), np.uint8), edge)


def encode_png(rgb: NDArray[np.uint8], edge: int) -> Image:
    """Return an image [height, width, 3] as a model sees it.

    Args:
        edge: pixels of a token's side, which height and width are multiples of.
    """
    from PIL import Image as Pillow

    file = io.BytesIO()
    Pillow.fromarray(rgb).save(file, "PNG", compress_level=1)
    png, (height, width) = file.getvalue(), rgb.shape[:2]
    return Image(0, (height // edge, width // edge), png, sha256(png).hexdigest())


def encode_images(model: nn.Module, images: Sequence[Image]) -> Tensor:
    """Return features [1 + D, M, H] of all images, one behind the other.

    The vision tower runs once on each distinct image. Without images it runs on a token of
    noise, of which no feature is returned: on ranks all units of the tower run together.
    """
    tower, processor = cast(Any, model).base_model.visual, cast(Any, model).image_processor
    shown = images or [noise_image(processor, 1, 1)]
    distinct = {image.digest: image for image in shown}
    pixels, grids = image_patches(processor, [image.png for image in distinct.values()])
    pixels, grids = pixels.to(tower.device, tower.dtype), grids.to(tower.device)
    output = tower(pixels, grid_thw=grids, return_dict=True)
    layers = torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())])
    sizes = [*map(len, distinct.values())]
    parts = dict(zip(distinct, torch.split(layers, sizes, 1), strict=True))
    return torch.cat([parts[image.digest] for image in shown], 1)[:, : sum(map(len, images))]


def image_patches(processor: Any, pngs: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Return the patches of all images, and each one's grid of patches: time, height, width."""
    from PIL import Image as Pillow

    images = [Pillow.open(io.BytesIO(png), formats=("PNG",)) for png in pngs]
    inputs = processor(images, do_resize=False, return_tensors="pt")
    return inputs["pixel_values"], inputs["image_grid_thw"]
