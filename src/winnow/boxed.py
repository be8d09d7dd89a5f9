r"""Boxes around final answers: `\boxed{…}`, `\fbox{…}` and `\boxed 5`, braces in them balanced."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the `}` that closes the `{` at `start`; `\{` and `\}` do not count."""
    depth = 0
    for mark in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return mark.start()
    return None


def find_last_box(text: str) -> tuple[int, str] | None:
    """Return the start of the last box and its content; None without one that ends."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    rest = text[found.end() :].lstrip()
    if not rest.startswith("{"):
        words = re.split(r"[\s$]", rest, maxsplit=1)[0]
        return (found.start(), words) if words else None
    end = closing_brace(rest, 0)
    return None if end is None else (found.start(), rest[1:end].strip())


def last_box_content(text: str) -> str | None:
    """Return the content of the last box, if any."""
    found = find_last_box(text)
    return None if found is None else found[1]
