"""Text of others, made fit for a line that a person reads."""

from __future__ import annotations


def excerpt(text: str, characters: int = 100) -> str:
    """The beginning of a text, on one line and safe to print."""
    text = " ".join(text[: 10 * characters].split())
    cut = text if len(text) <= characters else f"{text[: characters - 1]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


def said(error: BaseException) -> str:
    """What an error of another library says, or else what it is called."""
    lines = str(error).strip().splitlines()
    return (excerpt(lines[0], 300) if lines else "") or type(error).__name__
