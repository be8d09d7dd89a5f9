"""Vision-language models: images as tokens of a prompt, positions, and the vision tower.

A prompt has the image token once for each cell of an image's grid. The embeddings of these are
what the tower makes of the image's patches, and in models with deepstack (Qwen3-VL) further
features are added behind the first decoder layers. Positions are those of M-RoPE (Qwen2-VL,
arXiv:2409.12191): an image takes one place in time and its rows and columns in two further
coordinates, and what follows continues behind the larger of both.

Shapes: `T` tokens of a forward call, `M` tokens of distinct images, `H` width of the text model,
`D` deepstack layers.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.types import Image, IntArray

if TYPE_CHECKING:
    from winnow.models.folders import ModelRef

VISION_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Values of `model_type` in config.json of the vision-language models that can be trained."""


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Tokens of a forward call that stand for images, and the tower's features of them."""

    places: Tensor
    """[P] int64: which of the T tokens, ascending."""
    features: Tensor
    """[1 + D, P, H]: embeddings, and what is added behind the first D decoder layers."""


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

    try:
        return Qwen2VLImageProcessorPil.from_pretrained(where.path)
    except ImportError as error:
        raise ModelError(f"{where}: images need Pillow; pip install 'winnow-rl[images]'") from error
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ModelError(
            f"{where}: its preprocessor_config.json is missing or cannot be read ({reason}); give "
            "a complete Hugging Face folder"
        ) from error


def rope_positions(positions: IntArray, images: Iterable[tuple[Image, int, int]]) -> IntArray:
    """Compute the three coordinates [3, T] of packed tokens.

    Args:
        positions: [T] of the tokens in their contexts.
        images: each with the place of its first token among the T and the end of its context, in
            the order of places.
    """
    rope = np.tile(positions, (3, 1))
    for image, start, end in images:
        (rows, columns), stop = image.grid, start + len(image)
        first = rope[0, start]
        rope[0, start:stop] = first
        rope[1, start:stop] = first + np.repeat(np.arange(rows), columns)
        rope[2, start:stop] = first + np.tile(np.arange(columns), rows)
        rope[:, stop:end] -= len(image) - max(rows, columns)
    return rope


@dataclass(frozen=True, eq=False)
class ImageSpan:
    """Tokens of a context that run in one forward call, and the images of the whole context."""

    images: tuple[Image, ...]
    start: int
    stop: int


def place_images(spans: Sequence[ImageSpan]) -> tuple[IntArray, IntArray, tuple[Image, ...]]:
    """Place the images of packed spans.

    Returns:
        the three coordinates [3, T] of all tokens, the tokens [P] that stand for images, and these
        images in the same order, as often as they occur.
    """
    ropes, places, shown, first = [np.empty((3, 0), np.int64)], [np.empty(0, np.int64)], [], 0
    for span in spans:
        placed = [(image, image.start, span.stop) for image in span.images]
        ropes.append(rope_positions(np.arange(span.stop), placed)[:, span.start :])
        for image in span.images:
            if image.start >= span.start:
                places.append(first + image.start - span.start + np.arange(len(image)))
                shown.append(image)
        first += span.stop - span.start
    return np.concatenate(ropes, axis=1), np.concatenate(places), tuple(shown)


def position_shift(images: Iterable[Image]) -> int:
    """Return what the coordinates behind these images are less than the tokens' places."""
    return sum(len(image) - max(image.grid) for image in images)


def noise_image(processor: Any) -> Image:
    """Make an image of fixed noise, of two rows and three columns of tokens."""
    rows, columns, edge = 2, 3, processor.patch_size * processor.merge_size
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
    """Run the vision tower; returns features [1 + D, M, H] of all images, one behind the other.

    Without images it runs on a blank one, of which no feature is returned: on ranks all units of
    the tower run together.
    """
    tower, processor = cast(Any, model).base_model.visual, cast(Any, model).image_processor
    arrays = [decode_png(image.png) for image in images]
    if not images:
        edge = processor.patch_size * processor.merge_size
        arrays = [np.zeros((edge, edge, 3), np.uint8)]
    pixels, grids = image_patches(processor, arrays)
    pixels, grids = pixels.to(tower.device, tower.dtype), grids.to(tower.device)
    output = tower(pixels, grid_thw=grids, return_dict=True)
    features = torch.stack([output.pooler_output, *getattr(output, "deepstack_features", ())])
    return features if images else features[:, :0]


def image_patches(processor: Any, arrays: Sequence[NDArray[np.uint8]]) -> tuple[Tensor, Tensor]:
    """Return the patches of all images, and each one's grid of patches: time, height, width."""
    inputs = processor(
        arrays, do_resize=False, return_tensors="pt", input_data_format="channels_last"
    )
    return inputs["pixel_values"], inputs["image_grid_thw"]


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of an image."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(png), formats=("PNG",)) as opened:
        return np.asarray(opened.convert("RGB"))
