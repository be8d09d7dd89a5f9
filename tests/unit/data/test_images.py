"""Rows with images: how they are written, opened, resized and rendered, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2VLImageProcessorPil
from typer.testing import CliRunner

from winnow.cli.data import app
from winnow.config.data import DataConfig
from winnow.data.check import check
from winnow.data.images import ImageReader, VisionInput, open_image, read_image
from winnow.data.prepare import PrepareReport
from winnow.data.prompts import PromptRenderer, PromptSet
from winnow.data.sources import Row, read_rows
from winnow.data.user_source import UserRows
from winnow.errors import DataError

WriteJsonl = Callable[..., str]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
SHOWN = "".join(SPECIAL[:3])
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16}
PROCESSOR = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=SIZE)


def tokenizer_with(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    made = train_bpe(["What is 1 + 1?"], chat=template)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


TOKENIZER = tokenizer_with()
IDS = TOKENIZER.convert_tokens_to_ids(SPECIAL)
NAMES = ["vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id"]
CONFIG = Qwen2_5_VLConfig(**dict(zip(NAMES, IDS, strict=True)))
VISION = VisionInput(PROCESSOR, CONFIG)


def picture(width: int = 60, height: int = 40, seed: int = 0) -> Pillow.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Pillow.fromarray(noise)


def file_of(image: Pillow.Image, kind: str = "PNG", **options: Any) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


PNG = file_of(picture())
TRUTH = {"data_source": "s", "reward_model": {"ground_truth": "2"}}


def row(text: str, *images: bytes | str) -> Row:
    return Row("f:1", "f row 1", "s", ({"role": "user", "content": text},), "2", images=images)


def render(*rows: Row, vision: VisionInput | None = VISION, **config: Any) -> PromptSet:
    tokenizer = config.pop("tokenizer", TOKENIZER)
    return PromptRenderer(tokenizer, DataConfig(**config), vision=vision).render(rows)


@pytest.mark.parametrize("size", [(60, 40), (28, 28), (5, 300), (640, 480), (1, 1)])
def test_the_model_sees_what_its_own_processor_makes_of_the_image(size: tuple[int, int]) -> None:
    image = picture(*size)
    (made,) = ImageReader(DataConfig(), VISION).read([file_of(image)], "f")
    raw = PROCESSOR([image], return_tensors="np")
    ours = PROCESSOR([Pillow.open(io.BytesIO(made.png))], do_resize=False, return_tensors="np")
    np.testing.assert_array_equal(ours["pixel_values"], raw["pixel_values"])
    assert raw["image_grid_thw"].tolist() == [[1, *(2 * cells for cells in made.grid)]]
    assert len(made.digest) == 64


def test_bounds_of_the_recipe_replace_those_of_the_processor() -> None:
    sizes = [{"max_pixels": 28 * 28}, {"min_pixels": 28 * 28 * 12}]
    grids = [ImageReader(DataConfig(**size), VISION).read([PNG], "f")[0].grid for size in sizes]
    assert grids == [(1, 1), (3, 5)]


def test_pixels_are_upright_on_white_and_carry_no_metadata() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert open_image(file_of(picture(), "JPEG", exif=exif), "f", DataConfig()).size == (40, 60)
    clear = Pillow.new("RGBA", (9, 9), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    pixels = open_image(file_of(clear), "f", DataConfig())
    assert [pixels.getpixel((i, i)) for i in (0, 1)] == [(255, 0, 0), (255, 255, 255)]
    assert pixels.info == {}
    deep = Pillow.fromarray(np.full((9, 9), 0x8000, np.uint16))
    assert open_image(file_of(deep), "f", DataConfig()).getpixel((0, 0)) == (128, 128, 128)
    moving = file_of(picture(), "GIF", save_all=True, append_images=[picture(seed=1)])
    assert open_image(moving, "f", DataConfig()).size == (60, 40)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


FORMATS = "not an image in PNG, JPEG, WEBP, GIF, BMP; replace it, or remove the row"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
HOSTILE = {
    "bomb": (png_of(9000, 9000), "9000 x 9000 pixels, data.max_image_pixels is 64000000; replace"),
    "huge bomb": (png_of(2**31 - 1, 2**31 - 1), "exceeds limit of"),
    "truncated": (file_of(picture(), "JPEG")[:900], "truncated"),
    "svg": (SVG, FORMATS),
    "tiff": (file_of(picture(), "TIFF"), FORMATS),
    "eps": (file_of(picture(), "EPS"), FORMATS),
    "checksum": (PNG[:-30] + bytes([PNG[-30] ^ 1]) + PNG[-29:], "broken PNG file"),
    "zero": (png_of(0, 9), ""),
    "thin": (file_of(picture(900, 2)), "aspect ratio"),
    "missing": ("/nowhere/a.png", "image 1 (/nowhere/a.png): no such file of at most 256 MiB"),
    "folder": ("/tmp", "no such file"),
    "device": ("/dev/zero", "no such file"),
    "base64": ("data:image/png;base64,!", "Only base64 data is allowed"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_image_is_refused_in_one_line_with_its_row(name: str) -> None:
    source, reason = HOSTILE[name]
    with pytest.raises(DataError) as caught:
        render(row("<image>", source))
    assert str(caught.value).startswith("f row 1 image 1")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


PART = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "Sum?"}]
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def part(image: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [PART[0], image, PART[2]]}]


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "Look: <image>Sum?", "images": ["pics/a.png"]},
        {"prompt": "Look: <image>Sum?", "images": [{"image": "file://{}/pics/a.png"}]},
        {"prompt": "Look: <image>Sum?", "images": [{"bytes": None, "path": "pics/a.png"}]},
        {"prompt": "Look: <image>Sum?", "image": URL},
        {"prompt": [{"role": "user", "content": PART}], "images": ["{}/pics/a.png"]},
        {"prompt": part({"type": "image", "image": "pics/a.png"})},
        {"prompt": part({"type": "image_url", "image_url": {"url": URL}}), "images": None},
    ],
)
def test_a_row_may_hold_its_images_in_many_ways(
    columns: dict[str, Any], write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics/a.png").write_bytes(PNG)
    path = write_jsonl([{**TRUTH, **columns}])
    Path(path).write_text(Path(path).read_text().replace("{}", str(tmp_path)))
    (found,) = read_rows([path])
    assert found.messages == ({"role": "user", "content": "Look: <image>Sum?"},)
    assert [read_image(source) for source in found.images] == [PNG]
    assert not {"image", "images"} & found.extra.keys()


def test_bytes_of_parquet_and_images_of_a_users_source_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = [{"image": {"bytes": PNG, "path": "a.png"}, "prompt": "Sum?", "solution": "2"}]
    pq.write_table(pa.Table.from_pylist(columns), path)
    (found,) = read_rows([str(path)])  # TRL's: the images come before the question
    assert (found.text, found.images) == ("<image>Sum?", (PNG,))
    code = tmp_path / "mine.py"
    made = {**TRUTH, "prompt": "<image>"}
    code.write_text(
        "from PIL import Image\n"
        f"rows = lambda: [{{**{made}, 'images': [Image.new('RGB', (9, 9))]}}]\n"
    )
    config = DataConfig(task={"name": "custom", "path": f"{code}:rows"})
    (source,) = UserRows(config.task, config).row(0).images
    assert open_image(source, "f", config).size == (9, 9)


def test_a_mark_without_an_image_in_the_column_is_refused(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{**TRUTH, "prompt": "<image>?", "images": []}])
    with pytest.raises(DataError, match=r"row 1: prompt has 1 <image> .* and images has 0; give"):
        read_rows([path])


def test_a_column_image_that_names_a_container_is_no_image(write_jsonl: WriteJsonl) -> None:
    (found,) = read_rows([write_jsonl([{**TRUTH, "prompt": "a", "image": "ubuntu:24.04"}])])
    assert found.images == ()
    assert found.extra["image"] == "ubuntu:24.04"


def test_images_stand_where_their_marks_are_and_no_text_spells_one() -> None:
    wide, high = file_of(picture(140, 56)), file_of(picture(56, 140))
    text = "<image> or <image>?"
    (prompt,) = render(row(text, wide, high)).prompts
    assert prompt.text == f"[user]{SHOWN} or {SHOWN}?[assistant]"
    assert [(image.grid, len(image)) for image in prompt.images] == [((2, 5), 10), ((5, 2), 10)]
    is_image = np.zeros(len(prompt.token_ids), bool)
    for image in prompt.images:
        is_image[image.start : image.start + len(image)] = True
        assert prompt.token_ids[image.start - 1] == IDS[0]
        assert prompt.token_ids[image.start + len(image)] == IDS[2]
    assert ((prompt.token_ids == IDS[1]) == is_image).all()
    assert is_image.sum() == 20
    with pytest.raises(DataError, match="f row 1: 1 images, and its prompt has 2 image tokens; w"):
        render(row("<image><|image_pad|>", wide))
    assert prompt.messages[0]["content"] == text
    (other,) = render(row(text, wide, file_of(picture(56, 140, seed=1)))).prompts
    assert other.token_ids.tolist() == prompt.token_ids.tolist()
    assert PromptSet((other,)).fingerprints != PromptSet((prompt,)).fingerprints


def test_without_a_chat_template_the_tokens_of_an_image_take_the_marks_place() -> None:
    (prompt,) = render(row("a <image> b", PNG), tokenizer=tokenizer_with(None)).prompts
    assert prompt.text == f"a {SHOWN} b"
    assert (prompt.token_ids == IDS[1]).sum() == len(prompt.images[0]) == 6


def test_a_text_of_a_vision_language_model_is_as_before() -> None:
    rows = [row("What is <image>?"), row("1 + 1")]
    texts = [prompt.token_ids.tolist() for prompt in render(*rows, vision=None).prompts]
    assert [prompt.token_ids.tolist() for prompt in render(*rows).prompts] == texts


@pytest.mark.parametrize("rule", ["filter", "left", "right", "middle"])
def test_a_prompt_with_images_that_is_too_long_is_left_out_and_never_cut(rule: str) -> None:
    large = file_of(picture(112, 112))
    made = render(
        row("<image>", large), row("<image>", PNG), overlong_prompts=rule, max_prompt_tokens=30
    )
    assert (made.size, made.filtered, made.cut) == (1, 1, 0)
    with pytest.raises(DataError, match=r"the prompt has 3\d tokens, data.max_prompt_tokens is 30"):
        render(row("<image>", large), overlong_prompts="error", max_prompt_tokens=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vision": None}, "f row 1: has images, and the model takes text alone; set model.path "),
        ({"max_images": 1}, "f row 1: 2 images, data.max_images is 1; raise it, or show fewer"),
        ({"tokenizer": tokenizer_with(CHAT_TEMPLATE)}, "f row 1: 2 images, and its prompt has 0 "),
    ],
)
def test_images_that_the_model_or_the_recipe_does_not_take(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        render(row("<image><image>", PNG, PNG), **options)
    assert str(caught.value).startswith(message)


def test_the_check_opens_each_image_and_names_the_first_faulty_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    other = file_of(picture(seed=1))
    contents = [PNG, other, other]
    rows = [{**TRUTH, "prompt": "<image>Sum?", "images": [each]} for each in contents]
    pq.write_table(pa.Table.from_pylist(rows), path)
    for part_of_model in (TOKENIZER, PROCESSOR, CONFIG):
        part_of_model.save_pretrained(tmp_path / "model")
    arguments = ["check", str(path), "--tokenizer", str(tmp_path / "model"), "--json"]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    found = [report[name] for name in ("images", "unique_prompts", "copies", "conflicts")]
    assert found == [3, 2, 1, []]
    assert report["lengths"]["longest"] > 6
    broken = [{**rows[0], "images": [SVG if i > 1 else PNG]} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(broken), path)
    with pytest.raises(DataError) as caught:
        check(str(path), lambda _: None)
    assert str(caught.value) == f"{path} row 3 image 1: {FORMATS}"


def test_geometry3k_gets_its_instruction_and_keeps_its_images(
    prepare_file: Callable[..., PrepareReport], tmp_path: Path
) -> None:
    fixed = {"problem": "<image>Find x.", "answer": "3 \\sqrt { 2 }", "id": 7, "ground_truth": "B"}
    contents = [PNG, file_of(picture(seed=1)), PNG]
    rows = [{"images": [{"bytes": each, "path": None}], **fixed} for each in contents]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    done = prepare_file("geometry3k", str(path))
    assert (done.read, done.copies, done.written) == (3, 1, 2)
    made = read_rows([done.out])
    asked = made[0].text
    assert asked.startswith("<image>Find x. You FIRST think about the reasoning process as an ")
    assert asked.endswith("</think> tags. The final answer MUST BE put in \\boxed{}.")
    assert [each.images for each in made] == [(contents[0],), (contents[1],)]
    assert {(r.data_source, r.ground_truth) for r in made} == {
        ("hiyouga/geometry3k", fixed["answer"])
    }
    assert made[0].extra["extra_info"]["problem"] == "<image>Find x."
    again = prepare_file("geometry3k", done.out, out=str(tmp_path / "again.parquet"))
    assert (again.written, again.instructions_removed) == (2, 2)
    assert [(r.text, r.images) for r in read_rows([again.out])] == [
        (r.text, r.images) for r in made
    ]
