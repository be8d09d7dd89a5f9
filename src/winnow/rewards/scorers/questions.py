"""Questions with short answers, and questions with several choices.

Search agents answer in the last `<answer>…</answer>` (Search-R1, arXiv 2503.09516). Both sides
lose case, punctuation, articles and spare white space (SQuAD, arXiv 1606.05250). The ground truth
is one text, several that are right, or an object with the key `target` for them.

A choice is a letter read from a box, from tags, from `Answer: B`, or from the last line. The first
of these places that names a letter counts, in it the last mention. The ground truth is a letter
(`B`, `(B)`, `B. Paris`), or the number of the right choice from 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from winnow.boxed import last_box_content
from winnow.rewards.scorers.markers import Extra, decode_json, last_tagged, make_score
from winnow.types import Score

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

# A capital at the beginning, perhaps in brackets or bold, that is a whole word: not the `A`
# of `A cat`, nor the `I` of `I am`.
_OPENING = r"(?:\\text(?:bf)?\{|\\mathrm\{|[\s*_$(\[{\"'`]){0,8}"
_LETTER = re.compile(_OPENING + r"([A-Z])(?![\w'\u2019-])(?!\s+[a-z])")
_STATED = re.compile(
    r"(?i:\banswer|\bchoice|\boption)\**(?:\s{1,3}(?i:is))?\s{0,3}:?" + _LETTER.pattern
)
_LINE_ALONE = re.compile(_OPENING + r"([A-Z])[\s*_$)\]}.\"'`]{0,8}$")


def score_exact(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 if the answer is one of the right ones, else 0."""
    pred = last_tagged(text) or ""
    return make_score(_is_exact(pred, gold_answers(ground_truth)), pred)


def score_f1(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give the F1 over words with the nearest right answer; accuracy is exact match."""
    pred = last_tagged(text) or ""
    right = gold_answers(ground_truth)
    shared = max((f1(pred, gold) for gold in right), default=0.0)
    exact = float(_is_exact(pred, right))
    return Score(shared, exact, {"task": shared}, {"pred": pred, "f1": shared})


def gold_answers(ground_truth: Any) -> list[str]:
    """List all answers that are right."""
    value = decode_json(ground_truth)
    if isinstance(value, Mapping):
        value = value.get("target", value.get("answers", []))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [str(value)]


def normalize(answer: str) -> str:
    """Lower the case, and drop punctuation, articles and spare white space."""
    answer = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", answer).split())


def f1(pred: str, gold: str) -> float:
    """Compute the harmonic mean of the shares of words that the two have in common."""
    pred_tokens, gold_tokens = normalize(pred).split(), normalize(gold).split()
    common = (Counter(pred_tokens) & Counter(gold_tokens)).total()
    return 2 * common / (len(pred_tokens) + len(gold_tokens)) if common else 0.0


def _is_exact(pred: str, right: list[str]) -> bool:
    return normalize(pred) != "" and normalize(pred) in map(normalize, right)


def score_choice(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 if the letter chosen is the right one, else 0."""
    pred = read_choice(text)
    return make_score(pred != "" and pred == _gold_letter(ground_truth), pred)


def read_choice(text: str) -> str:
    """Return the letter that an answer chooses; empty where it chooses none."""
    for place in (last_box_content(text), last_tagged(text)):
        match = _LETTER.match(place) if place else None
        if match:
            return match.group(1)
    stated: list[str] = _STATED.findall(text)
    if stated:
        return stated[-1]
    line = text.rstrip().rpartition("\n")[2]
    alone = _LINE_ALONE.match(line)
    return alone.group(1) if alone else ""


def _gold_letter(ground_truth: Any) -> str:
    text = str(ground_truth).strip()
    if re.fullmatch(r"[0-9]|1[0-9]|2[0-5]", text):
        return chr(ord("A") + int(text))
    match = _LETTER.match(text) or re.match(r"\(?([A-Za-z])(?:[).:]|$)", text)
    return match.group(1).upper() if match else ""
