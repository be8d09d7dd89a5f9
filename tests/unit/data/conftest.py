"""Tokenizers made on the spot, and a way to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def train_bpe(
    texts: Iterable[str], *, bos: bool = False, eos_too: bool = False, chat: str | None = None
) -> PreTrainedTokenizerBase:
    """A byte-level BPE; `bos` puts `<s>` in front of each text, `eos_too` `</s>` behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>" if eos_too else "<s> $A",
            special_tokens=[("<s>", 0), ("</s>", 1)],
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.chat_template = chat
    return made


@pytest.fixture(scope="session")
def bpe() -> PreTrainedTokenizerBase:
    """A tokenizer that adds nothing and has no chat template."""
    return train_bpe(["What is 1 + 1?", "Answer: 2", "the sum of two numbers"] * 3)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows to a file in the test's folder and return its path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
