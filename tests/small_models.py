"""Hugging Face model folders with random weights, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from winnow.data.sort_digits import build_tokenizer
from winnow.models.folders import quiet_transformers

QWEN_VOCABULARY = 151_936
"""Rows of Qwen's embedding: more than its tokenizer, or any tokenizer of a test, has ids."""
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}: "
    "{{ tool.function.description }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ '<|endoftext|>' if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def digits_model(experts: bool = False, **changes: Any) -> PreTrainedModel:
    """A Qwen3 of 2,000 weights for the 29 characters of `sort_digits`, or one with 5 experts."""
    shape = {
        "vocab_size": 29,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | _EXPERTS | changes))
    return Qwen3ForCausalLM(Qwen3Config(**shape | changes))


def save(model: PreTrainedModel, tokenizer: Any, folder: Path) -> Path:
    """Write a model, and a tokenizer if there is one, as a Hugging Face folder."""
    with quiet_transformers():
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def described(folder: Path, **config: Any) -> str:
    """A folder with the config.json of a Qwen3, and nothing else of it."""
    told = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
    }
    (folder / "config.json").write_text(json.dumps(told | config))
    return str(folder)


def digits_folder(folder: Path, **changes: Any) -> Path:
    """`digits_model` with its tokenizer."""
    return save(digits_model(**changes), build_tokenizer(), folder)


def qwen_folder(folder: Path, family: str, texts: Iterable[str], *, chat: bool) -> Path:
    """A narrow Qwen2 or Qwen3 with Qwen's vocabulary size and a byte-level BPE of the texts."""
    shape: dict[str, Any] = {
        "vocab_size": QWEN_VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)),
        "qwen3": lambda: Qwen3ForCausalLM(
            Qwen3Config(**shape, head_dim=8, tie_word_embeddings=False)
        ),
    }[family]()
    return save(model, byte_level_bpe(texts, chat=chat), folder)


def byte_level_bpe(texts: Iterable[str], *, chat: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of 2,000 entries, as Qwen's is made."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    made.chat_template = CHAT_TEMPLATE if chat else None
    return made
