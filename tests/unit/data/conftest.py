"""A tokenizer made on the spot, and a way to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_tokenizers import train_bpe
from transformers import PreTrainedTokenizerBase


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
