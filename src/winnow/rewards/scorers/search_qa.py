"""Questions with short answers, as search agents are asked: exact match, and F1 over words.

The answer is what stands in the last `<answer>…</answer>` (Search-R1, arXiv 2503.09516). Both
sides lose case, punctuation, articles and spare white space (SQuAD, arXiv 1606.05250). The
ground truth is one text, several that are right, or an object with the key `target` for them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from winnow.rewards.scorers.reading import last_tagged, structure, verdict
from winnow.types import Score

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score_exact(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 if the answer is one of the right ones, else 0."""
    pred = last_tagged(text) or ""
    return verdict(_is_exact(pred, golds(ground_truth)), pred)


def score_f1(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """The share of words that agree with the nearest right answer; accuracy is exact match."""
    pred = last_tagged(text) or ""
    right = golds(ground_truth)
    shared = max((f1(pred, gold) for gold in right), default=0.0)
    exact = float(_is_exact(pred, right))
    return Score(shared, exact, {"task": shared}, {"pred": pred, "f1": shared})


def golds(ground_truth: Any) -> list[str]:
    """All answers that are right."""
    value = structure(ground_truth)
    if isinstance(value, Mapping):
        value = value.get("target", value.get("answers", []))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return [str(value)]


def plain(answer: str) -> str:
    """An answer in lower case, without punctuation, articles and spare white space."""
    answer = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", answer).split())


def f1(pred: str, gold: str) -> float:
    """Harmonic mean of the shares of words that the two have in common."""
    said, wanted = plain(pred).split(), plain(gold).split()
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def _is_exact(pred: str, right: list[str]) -> bool:
    return plain(pred) != "" and plain(pred) in map(plain, right)
