"""Tiny vision-language models with random weights, images, and groups that show them."""

from __future__ import annotations

import io
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image as Pillow
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from winnow.models.causal_lm import use_layout_attention
from winnow.models.vision import encode_png
from winnow.types import Answer, Group, Image, Prompt, Score, Segment, Trajectory, join_images

Kind = Literal["qwen2_5_vl", "qwen3_vl"]
VOCAB, STOP, IMAGE_TOKEN = 32, 1, 4
PATCH, MERGE = 4, 2


def vision_model(
    kind: Kind, dtype: torch.dtype = torch.float64, depth: int = 2, head: int = 8, tied: bool = True
) -> Any:
    """A small model for images of 8 x 8 pixels a token, with Winnow's attention."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 4 * head,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "rope_parameters": rope | {"mrope_section": [head // 4, head // 8, head // 8]},
        "pad_token_id": 0,
        "eos_token_id": STOP,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": depth,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 32,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 4 * head,
        "initializer_range": 0.1,
    }
    special = {"image_token_id": IMAGE_TOKEN, "video_token_id": 5, "vision_start_token_id": 2}
    special |= {"vision_end_token_id": 3, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    model: Any
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [depth - 1]}
        config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
        model = Qwen2_5_VLForConditionalGeneration(config)
    else:
        text |= {"head_dim": head}
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = Qwen3VLConfig(text_config=text, vision_config=vision, **special)
        model = Qwen3VLForConditionalGeneration(config)
    model.to(dtype).eval()
    model.image_processor = processor()
    use_layout_attention(model)
    return model


def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """The tower's rotary embedding, which transformers computes in fp32 whatever the type is."""
    halves = (
        [x, torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)]
        for x in (q, k)
    )
    return tuple(x * cos[:, None].to(x) + y * sin[:, None].to(x) for x, y in halves)


def processor() -> Any:
    """The image processor of these models."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, min_pixels=64, max_pixels=4096
    )


def image(rows: int, columns: int, seed: int = 0) -> Image:
    """Noise of so many rows and columns of tokens."""
    edge = PATCH * MERGE
    shape = rows * edge, columns * edge, 3
    rng = np.random.default_rng([seed, rows, columns])
    return encode_png(rng.integers(0, 256, shape, np.uint8), edge)


def shown(*parts: Image | list[int]) -> tuple[np.ndarray[Any, Any], tuple[Image, ...]]:
    """Token ids of texts and images, each image between the tokens 2 and 3; and the images."""
    ids, images = list[int](), list[tuple[int, tuple[Image, ...]]]()
    for part in parts:
        if isinstance(part, Image):
            images += [(1, ()), (len(part), (part,)), (1, ())]
            ids += [2, *[IMAGE_TOKEN] * len(part), 3]
        else:
            images.append((len(part), ()))
            ids += part
    return np.array(ids, np.int64), join_images(images)


def prompt(uid: int, *parts: Image | list[int]) -> Prompt:
    ids, images = shown(*parts)
    return Prompt(str(uid), ids, "", "", None, images=images)


def group(number: int, prompt: Prompt, *answers: list[int]) -> Group:
    """A group of answers with made-up log-probs and rewards."""
    made = []
    for place, ids in enumerate(answers):
        logprobs = np.full(len(ids), -1.5, np.float32)
        segment = Segment(np.array(ids, np.int64), logprobs, ())
        made.append(Answer(Trajectory((segment,), "stop"), Score(float(place % 2), 0.0)))
    return Group(number, prompt, tuple(made))


def their_logits(model: Any, ids: Any, images: tuple[Image, ...]) -> torch.Tensor:
    """Logits [T, V], on the host, of one sequence by transformers' own pass and attention."""
    model.config.get_text_config()._attn_implementation = "sdpa"
    device = model.device
    is_image = torch.zeros(1, len(ids), dtype=torch.int, device=device)
    for image in images:
        is_image[:, image.start : image.start + len(image)] = 1
    tokens = torch.tensor(np.array(ids), device=device)[None]
    # The image's token as a written one, which transformers would take for an image's.
    stray = (tokens == IMAGE_TOKEN) & (is_image == 0)
    embed = model.get_input_embeddings()
    hook = embed.register_forward_hook(
        lambda module, _, out: torch.where(stray[..., None], module.weight[IMAGE_TOKEN], out)
    )
    inputs: dict[str, Any] = {}
    if images:
        opened = [Pillow.open(io.BytesIO(image.png)) for image in images]
        made = model.image_processor(opened, do_resize=False, return_tensors="pt")
        inputs = {"pixel_values": made["pixel_values"].to(device, model.dtype)}
        grids = made["image_grid_thw"].to(device)
        inputs |= {"image_grid_thw": grids, "mm_token_type_ids": is_image}
    logits = model(input_ids=tokens.masked_fill(stray, 0), use_cache=False, **inputs).logits[0]
    hook.remove()
    use_layout_attention(model)
    return logits.cpu()
