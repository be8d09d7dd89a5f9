"""Reward models with random weights and tokenizers of their own, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.small_models import CHAT_TEMPLATE, byte_level_bpe
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from winnow.models.folders import quiet_transformers

TEXTS = ["5391:", "1|539;3|59;5|9;9|#1359", "0123456789:|;#?abcdefghijk", "<|user|><|assistant|>"]


def classifier(**changes: Any) -> Qwen3ForSequenceClassification:
    """A Qwen3 with a head of one number; weights so large that scores differ."""
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.5,
        "num_labels": 1,
    }
    torch.manual_seed(1)
    return Qwen3ForSequenceClassification(Qwen3Config(**shape | changes))


def classifier_folder(
    folder: Path, *, template: str | None = CHAT_TEMPLATE, tokenizer: bool = True, **changes: Any
) -> Path:
    """`classifier` with a byte-level BPE, which cuts text in another way than any policy does."""
    with quiet_transformers():
        classifier(**changes).save_pretrained(folder)
    if tokenizer:
        made = byte_level_bpe(TEXTS)
        made.chat_template = template
        made.save_pretrained(folder)
    return folder
