"""Images of rows: opened as files of unknown origin, and made ready for a model's vision tower.

    bytes, path or data: URL ─► size by header ─► pixels, upright, on white ─► resized ─► PNG

Nothing is opened but PNG, JPEG, WEBP, GIF (its first frame) and BMP, nothing is decoded whose
header says more pixels than `data.max_image_pixels`, and nothing is fetched.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from winnow.config.data import DataConfig
from winnow.data.columns import error_line, excerpt, field_error
from winnow.errors import DataError
from winnow.types import Image, IntArray

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

IMAGE_MARK = "<image>"
"""Stands for an image in the text of a message."""
Source = bytes | str
"""The content of an image's file, or its path."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_KEYS = ("bytes", "image", "path", "image_url", "url")
"""Keys of objects that hold an image: Hugging Face's, and those of parts of messages."""
_MOST_BYTES = 256 << 20


class VisionInput(NamedTuple):
    """A vision-language model's processor of images, and its config, which names its tokens."""

    processor: Any
    config: Any

    @property
    def tokens(self) -> list[int]:
        """Ids of the tokens before, of and behind an image."""
        names = ("vision_start", "image", "vision_end")
        return [getattr(self.config, f"{name}_token_id") for name in names]

    @property
    def edge(self) -> int:
        """Pixels of a token's side."""
        return int(self.processor.patch_size * self.processor.merge_size)


def load_vision_input(path: str, field: str) -> VisionInput | None:
    """Load the processor of a model's folder; None where that holds no vision-language model.

    Raises:
        ModelError: its files cannot be read.
    """
    from winnow.models.folders import ModelRef, read_config
    from winnow.models.vision import has_vision, load_image_processor

    folder = Path(path).expanduser()
    where = ModelRef(str(folder), field, path)
    config = read_config(where, False) if (folder / "config.json").is_file() else None
    return VisionInput(load_image_processor(where), config) if has_vision(config) else None


def parse_image(value: Any, origin: str, name: str, folder: Path | None) -> Source:
    """Return the image that a value of a row holds.

    Args:
        name: of the value, for errors.
        folder: relative paths start there; None where the data file is not local.

    Raises:
        DataError: it holds none, or one that is elsewhere.
    """
    image = value
    while isinstance(image, Mapping):
        image = next((image[key] for key in IMAGE_KEYS if image.get(key) is not None), None)
    if hasattr(image, "getbands"):  # of Pillow, from a user's source
        image.save(buffer := io.BytesIO(), "PNG")
        image = buffer.getvalue()
    if not isinstance(image, Source) or not image:
        raise field_error(origin, name, value, "an image: bytes, a path or a data: URL")
    if isinstance(image, bytes) or image.startswith("data:"):
        return image
    path = image.removeprefix("file://")
    if "://" in path or (folder is None and not path.startswith("/")):
        raise DataError(
            f"{origin}: {name} is {excerpt(image, 60)}, and images are not fetched; download it "
            "and give its path, or store its bytes in the row"
        )
    return str((folder or Path()) / path)


def read_image(source: Source) -> bytes:
    """Return the content of an image's file.

    Raises:
        OSError, ValueError: it cannot be read, or is too large.
    """
    if isinstance(source, bytes):
        return source
    if source.startswith("data:"):
        return base64.b64decode(source.partition(";base64,")[2], validate=True)
    file = Path(source)
    if not file.is_file() or file.stat().st_size > _MOST_BYTES:
        raise OSError(f"no such file of at most {_MOST_BYTES >> 20} MiB")
    return file.read_bytes()


def open_image(
    source: Source, name: str, config: DataConfig, vision: VisionInput | None = None
) -> Pixels:
    """Decode an image into RGB, turned as its EXIF data says, on white where it is transparent.

    Args:
        name: of the image, for errors.
        vision: resizes it as this model takes it.

    Raises:
        DataError: it is missing, damaged, too large, or in another format.
    """
    if isinstance(source, str):
        name = f"{name} ({excerpt(source)})"
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps

        stream = io.BytesIO(read_image(source))
        with Pillow.open(stream, formats=_FORMATS) as image:
            (width, height), most = image.size, config.max_image_pixels
            if not 0 < width * height <= most:
                raise ValueError(f"{width} x {height} pixels, data.max_image_pixels is {most}")
            image.verify()  # checksums, of which decoding ignores some
        with Pillow.open(stream, formats=_FORMATS) as image:
            pixels = ImageOps.exif_transpose(image)
        if pixels.mode.startswith("I;16"):
            pixels = pixels.point(lambda value: value / 256)
        is_clear = pixels.has_transparency_data
        pixels = pixels.convert("RGBA" if is_clear else "RGB")
        # A new image, as metadata would go into the PNG.
        canvas = Pillow.new("RGB", pixels.size, "white")
        canvas.paste(pixels, mask=pixels if is_clear else None)
        return canvas if vision is None else _resize(canvas, config, vision)
    except ImportError as error:
        remedy = "pip install 'winnow-rl[images]'"
        raise DataError(f"{name}: images need the package Pillow; {remedy}") from error
    # Pillow's readers raise whatever they meet in a damaged file.
    except Exception as error:
        # Where Pillow knows no format it quotes the stream.
        is_unknown = "cannot identify" in str(error)
        reason = f"not an image in {', '.join(_FORMATS)}" if is_unknown else error_line(error)
        raise DataError(f"{name}: {reason}; replace it, or remove the row") from error


def open_images(
    sources: Sequence[Source], origin: str, config: DataConfig, vision: VisionInput | None = None
) -> Iterator[Pixels]:
    """Open the images of a row or a reply, one after the other."""
    for number, source in enumerate(sources, 1):
        yield open_image(source, f"{origin} image {number}", config, vision)


def _resize(pixels: Pixels, config: DataConfig, vision: VisionInput) -> Pixels:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    most = config.max_pixels or vision.processor.size["longest_edge"]
    least = min(config.min_pixels or vision.processor.size["shortest_edge"], most)
    height, width = smart_resize(pixels.height, pixels.width, vision.edge, least, most)
    return pixels.resize((width, height), vision.processor.resample)


def split_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose marks of images became parts of its content."""
    pieces = re.split(f"({IMAGE_MARK})", message["content"])
    image = {"type": "image"}
    parts = [image if p == IMAGE_MARK else {"type": "text", "text": p} for p in pieces if p]
    return {**message, "content": parts} if len(pieces) > 1 else message


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of messages that are images."""
    contents = [m["content"] for m in messages if isinstance(m["content"], list)]
    return [part for content in contents for part in content if part["type"] == "image"]


@dataclass(frozen=True)
class ImageReader:
    """Reads images as a model sees them, and places them among the tokens of a text."""

    config: DataConfig
    vision: VisionInput | None
    """None where the model takes text alone."""

    def read(self, sources: Sequence[Source], origin: str) -> list[Image]:
        """Read images, whose places are not known yet.

        Raises:
            DataError: one is not usable, or the model takes none.
        """
        if not sources:
            return []
        if self.vision is None:
            raise DataError(
                f"{origin}: has images, and the model takes text alone; set model.path to a "
                "vision-language model, or leave the images out (data.image_key=none)"
            )
        from winnow.models.vision import encode_png

        pixels = open_images(sources, origin, self.config, self.vision)
        return [encode_png(np.asarray(each), self.vision.edge) for each in pixels]

    def place(
        self, ids: Sequence[int] | IntArray, images: Sequence[Image], origin: str, before: int = 0
    ) -> tuple[IntArray, tuple[Image, ...]]:
        """Repeat each token that stands for an image as often as the image has tokens.

        Args:
            images: of the conversation so far.
            before: the number of those whose tokens come before `ids`.

        Returns:
            The ids [L], and the images at their places among them.

        Raises:
            DataError: there are more or fewer such tokens than images, or too many images.
        """
        array, most = np.array(ids, np.int64), self.config.max_images
        if self.vision is None:
            return array, ()
        if len(images) > most:
            raise DataError(
                f"{origin}: {len(images)} images, data.max_images is {most}; raise it, or show "
                "fewer"
            )
        (places,) = (array == self.vision.config.image_token_id).nonzero()
        shown = images[before:]
        if len(places) != len(shown):
            raise DataError(
                f"{origin}: {len(shown)} images, and its prompt has {len(places)} image tokens; "
                "write one <image> for each, and use a chat template that shows images"
            )
        copies = np.ones_like(array)
        copies[places] = [len(image) for image in shown]
        starts = (copies.cumsum() - copies)[places].tolist()
        placed = [image.at(start) for image, start in zip(shown, starts, strict=True)]
        return array.repeat(copies), tuple(placed)
