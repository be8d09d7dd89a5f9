"""Figures as people read them: short, aligned, and plain ASCII where a terminal asks for it."""

from __future__ import annotations

import math
import unicodedata

DASH = "-"


def share(value: float | None, digits: int = 0) -> str:
    """`0.423` as `42 %`."""
    if value is None:
        return DASH
    return f"{100 * value:.{digits}f} %" if math.isfinite(value) else str(value)


def number(value: float | None, digits: int = 2) -> str:
    """A figure with fixed digits."""
    return DASH if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """`12345` as `12,345`; from ten million on in millions."""
    if value is None or not math.isfinite(value):
        return DASH if value is None else str(value)
    return f"{value / 1e6:,.1f} M" if abs(value) >= 1e7 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """`75` as `1:15`; from an hour on `1:02:03`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """What a model wrote, made safe to print: no control codes, nothing beyond the encoding."""
    shown = "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def shorten(text: str, limit: int) -> str:
    """The text, cut in the middle when longer than `limit`."""
    if len(text) <= limit:
        return text
    head = (limit - 5) * 2 // 3
    return f"{text[:head]} ... {text[len(text) - (limit - 5 - head) :]}"


def _is_harmless(character: str) -> bool:
    # Cc and Cf: escape sequences and marks that turn the direction of writing; Cs: surrogates.
    return character == "\n" or unicodedata.category(character) not in ("Cc", "Cf", "Cs")
