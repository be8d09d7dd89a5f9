r"""When two prompts are the same prompt, and when they are alike.

*The same*: equal once white space at the ends and a known instruction are off. This decides what
counts as a duplicate and whether labels conflict, so nothing that might matter is thrown away.

*Alike*: equal in their letters, digits, decimal points and signs (+ - * / = < >), whatever the
case, spacing, punctuation, brackets and `\left`, `\right` around them. This finds an evaluation
problem that was typed again for a training file, and keeps z^4 + z^2 apart from z^4 - z^2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from winnow.data.prepare_instruction import bare
from winnow.data.sources import Message

_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_MINUS = str.maketrans({"\u2212": "-", "\u2013": "-"})
_NO_MATTER = re.compile(r"(?!(?<=\d)\.\d)(?:[^\w+\-*/=<>]|_)")
"""A point within a number does matter."""


def prompt_text(messages: Sequence[Message]) -> str:
    """The messages of a prompt as one text."""
    return "\n".join(message["content"] for message in messages)


def same(messages: Sequence[Message]) -> str:
    """Equal for prompts that are the same."""
    return "\n".join(bare(message["content"]) for message in messages)


def alike(messages: Sequence[Message]) -> str:
    """Equal for prompts that are alike."""
    text = _SIZES.sub("", same(messages)).translate(_MINUS)
    # A prompt of nothing but punctuation is like itself alone.
    return _NO_MATTER.sub("", text).casefold() or text
