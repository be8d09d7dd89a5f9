r"""A letter among several: read from a box, from tags, from `Answer: B`, or from the last line.

The first of these places that names a letter counts, in it the last mention. The ground truth
is a letter (`B`, `(B)`, `B. Paris`), or the number of the right choice from 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from winnow.rewards.scorers.math_text import last_boxed
from winnow.rewards.scorers.reading import last_tagged, verdict
from winnow.types import Score

# A capital at the beginning, perhaps in brackets or bold, that is a word of its own: not the `A`
# of `A cat`, nor the `I` of `I am`.
_OPENING = r"(?:\\text(?:bf)?\{|\\mathrm\{|[\s*_$(\[{\"'`]){0,8}"
_LETTER = re.compile(_OPENING + r"([A-Z])(?![\w'\u2019-])(?!\s+[a-z])")
_SAID = re.compile(
    r"(?i:\banswer|\bchoice|\boption)\**(?:\s{1,3}(?i:is))?\s{0,3}:?" + _LETTER.pattern
)
_LINE_ALONE = re.compile(_OPENING + r"([A-Z])[\s*_$)\]}.\"'`]{0,8}$")


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 if the letter chosen is the right one, else 0."""
    pred = choice(text)
    return verdict(pred != "" and pred == _gold(ground_truth), pred)


def choice(text: str) -> str:
    """The letter that an answer chooses; empty where it chooses none."""
    for place in (last_boxed(text), last_tagged(text)):
        found = _LETTER.match(place) if place else None
        if found:
            return found.group(1)
    said: list[str] = _SAID.findall(text)
    if said:
        return said[-1]
    line = text.rstrip().rpartition("\n")[2]
    alone = _LINE_ALONE.match(line)
    return alone.group(1) if alone else ""


def _gold(ground_truth: Any) -> str:
    text = str(ground_truth).strip()
    if re.fullmatch(r"[0-9]|1[0-9]|2[0-5]", text):
        return chr(ord("A") + int(text))
    found = _LETTER.match(text) or re.match(r"\(?([A-Za-z])(?:[).:]|$)", text)
    return found.group(1).upper() if found else ""
