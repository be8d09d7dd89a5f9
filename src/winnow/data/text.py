"""Token ids back to text, for scorers and people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from winnow.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decoder(
    tokenizer: PreTrainedTokenizerBase, special_tokens: bool = False
) -> Callable[[IntArray | Sequence[int]], str]:
    """A function from ids to text, with or without special tokens.

    Fast tokenizers are asked directly: the wrapper around them costs several times as much,
    and a step decodes each of its answers.
    """
    plain = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
    inner: Any = tokenizer.backend_tokenizer if plain else tokenizer

    def decode(ids: IntArray | Sequence[int]) -> str:
        numbers = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return cast(str, inner.decode(numbers, skip_special_tokens=not special_tokens))

    return decode
