r"""Answers behind marks and between tags: reading them, and the scorers that need no more.

An answer in the `<think>` form begins with that tag; where a chat template has put it into the
prompt already, it may be missing. Each tag stands once. GSM8K's numbers are compared as text,
without commas and dollar signs; a full stop that ends a sentence is no part of a number. Everything
here takes time in proportion to the text, whatever a policy writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from winnow.types import Score

Extra = Mapping[str, Any]
"""Other columns of a row."""
GSM8K_MARK = "####"
_NUMBER = re.compile(r"[-+]?\$?-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
# A second number offered beside the first: `5 or 6`.
_ANOTHER = re.compile(r"\s*(?:or|and|to|/|;|,)\s*[-+]?\$?-?\.?\d")
_BOX = "\\boxed{"
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def score_sort_digits(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give +1 or -1 for sorted digits: what stands after the last `#` must be they, exactly.

    The working before it is not looked at. `pred` is empty without a `#`.
    """
    return _score_behind("#", text, ground_truth)


def score_calc(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give +1 or -1 for a result: what stands after the last `=` must be it, exactly.

    `pred` is empty without a `=`.
    """
    return _score_behind("=", text, ground_truth)


def _score_behind(mark: str, text: str, ground_truth: Any) -> Score:
    is_marked, answer = mark in text, text.rpartition(mark)[2]
    pred = answer if is_marked else ""
    return make_score(is_marked and pred == str(ground_truth), pred, wrong_reward=-1.0)


def score_gsm8k(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 if the number after the last `####` is right and the only one offered, else 0."""
    _, mark, after = text.rpartition(GSM8K_MARK)
    after = after.lstrip()
    match = _NUMBER.match(after) if mark else None
    number = match.group().rstrip(",") if match else ""
    return _score_number("" if _ANOTHER.match(after, len(number)) else number, ground_truth)


def score_gsm8k_flexible(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 if the last number of the answer is right, else 0."""
    numbers = _NUMBER.findall(text)
    return _score_number(numbers[-1] if numbers else "", ground_truth)


def _score_number(answer: str, ground_truth: Any) -> Score:
    pred = _plain_number(answer)
    # A ground truth may be the whole worked solution.
    gold = _plain_number(str(ground_truth).rpartition(GSM8K_MARK)[2])
    return make_score(pred != "" and pred == gold, pred)


def _plain_number(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removeprefix("+")


def score_think_answer(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 for `<think>…</think><answer>…</answer>` and nothing around it, else 0."""
    thoughts, rest = _split_thoughts(text)
    inside = rest.removeprefix("<answer>").removesuffix("</answer>")
    is_tagged = rest.startswith("<answer>") and rest.endswith("</answer>")
    is_right = thoughts != "" and is_tagged and inside.strip() != "" and "answer>" not in inside
    return make_score(is_right, "")


def score_think_boxed(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    r"""Give 1 for `<think>…</think>` and a `\boxed{…}` after it, else 0."""
    thoughts, rest = _split_thoughts(text)
    start = rest.find(_BOX)
    is_boxed = start >= 0 and rest.find("}", start + len(_BOX) + 1) >= 0
    return make_score(thoughts != "" and is_boxed, "")


def score_nothing(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 0 and no part, where a reward model alone scores a data source."""
    return Score(0.0, 0.0)


def _split_thoughts(text: str) -> tuple[str, str]:
    """Split into the content of the think tags and the rest; empty where they are not in order."""
    before, closing, after = text.strip().removeprefix("<think>").partition("</think>")
    if not closing or "<think>" in before or "think>" in after:
        return "", ""
    return before.strip(), after.strip()


def last_tagged(text: str) -> str | None:
    """Return the text between the last `<answer>` and its `</answer>`; None without both."""
    opening, closing = "<answer>", "</answer>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def full_frac(match: re.Match[str]) -> str:
    r"""Write a match of `frac`, `1` and `2` (or `{2}`) as `frac{1}{2}`."""
    name, above, below = match.groups()
    return f"{name}{{{above}}}{below if below.startswith('{') else f'{{{below}}}'}"


def drop_commas(answer: str) -> str:
    """Write a number such as `1,200` as `1200`; anything else stays as it is."""
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer


def decode_json(value: Any) -> Any:
    """Decode a truth that holds JSON: files with a text column have lists and objects so."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def make_score(right: bool, pred: str, wrong_reward: float = 0.0) -> Score:
    """Make the score of a right or wrong answer; `pred` is the answer that was read."""
    reward = 1.0 if right else wrong_reward
    return Score(reward, float(right), {"task": reward}, {"pred": pred})
