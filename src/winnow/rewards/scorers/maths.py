r"""Mathematical answers: as text by the rules of MATH, or by value with `math-verify`.

As text, the rules are those that published MATH scores were made with (Hendrycks et al. 2021,
arXiv 2103.03874, `math_equivalence`), and a few more of the same kind: thousands' commas,
`\text{}`. There `0.25` is not `\frac{1}{4}`, and a percent sign says nothing, since some gold
answers to "what percent" leave it out.

By value, `0.25`, `1/4` and `\frac{1}{4}` are one answer. Computer algebra can take any time: each
step has `_STEP_S` seconds, by an alarm, which Python allows in a process's main thread only (a
scorer process has it); elsewhere nothing but the caller's own limit ends it. An answer too long to
be one is compared as text alone.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

from winnow.boxed import find_last_box, last_box_content
from winnow.rewards.scorers.markers import Extra, drop_commas, full_frac, is_think_boxed, make_score
from winnow.types import Score

LONGEST_EXPRESSION = 400
"""Characters; the longest gold answer of MATH-500 has 55."""
GEOMETRY3K_FORMAT_SHARE = 0.1
_STEP_S = 2

_ANSWER = re.compile(r"answer\**\s*:", re.IGNORECASE)
_DROPPED = re.compile(
    r"\\[!,;:]|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\^\{?\\circ\}?|°|\\degree(?![A-Za-z])"
    r"|\\?[$%]|\n"
)
_UNIT = re.compile(r"(?<=[^\s{(\[])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?[23]\}?)?\s*$")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"(\\frac)(?:\s*)([^\s{\\])(?:\s*)(\{[^{}]*\}|[^\s{\\])")
_FRACTION_OF_TWO_BRACES = re.compile(r"\\frac(\{[^{}]*\})\s*([^\s{\\])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([^\s{\\\[])")
_SLASHED = re.compile(r"(-?)(\d+)/(\d+)")
_BARE_POINT = re.compile(r"(?<!\d)\.(?=\d)")
_BASE = re.compile(r"(?<=[0-9A-F])_\{?(\d+)\}?$")
# Computer algebra reads past these, to the adjacent number.
_NOT_READ = re.compile(r"\\neq?(?![A-Za-z])|\\not(?![A-Za-z])|≠|(?<=\d):(?=\d)")


def score_as_text(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give 1 if the stated answer is the gold one as normalised text, else 0."""
    pred = read_answer(text)
    plain = normalize(pred)
    return make_score(plain != "" and plain == normalize(gold_answer(ground_truth)), pred)


def score_by_value(
    data_source: str, text: str, ground_truth: Any, extra: Extra, wrong_reward: float = 0.0
) -> Score:
    """Give 1 if the stated answer has the value of the gold one, else `wrong_reward`."""
    pred = read_answer(text)
    return make_score(is_equal(pred, gold_answer(ground_truth)), pred, wrong_reward)


def score_dapo_by_value(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give DAPO's rewards, +1 and -1, by value."""
    return score_by_value(data_source, text, ground_truth, extra, wrong_reward=-1.0)


def score_geometry3k(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    r"""Give nine tenths for the boxed answer and one for the form `<think>…</think> … \boxed{}`.

    The rule that `hiyouga/geometry3k` is usually trained with. Its questions come with pictures,
    which only rows without `images` do without.
    """
    pred = last_box_content(text) or ""
    right = float(is_equal(pred, gold_answer(ground_truth)))
    form = float(is_think_boxed(text))
    reward = (1 - GEOMETRY3K_FORMAT_SHARE) * right + GEOMETRY3K_FORMAT_SHARE * form
    return Score(reward, right, {"task": reward}, {"pred": pred, "format": form})


def is_equal(pred: str, gold: str) -> bool:
    """Return whether an answer is the gold one, by its text or by its value."""
    plain, reference = normalize(pred), normalize(gold)
    if plain == "" or reference == "" or plain == reference:
        return plain != "" and plain == reference
    if max(len(pred), len(gold)) > LONGEST_EXPRESSION or _is_misread(plain, reference):
        return False
    # Slow to import, and not needed where the texts agree.
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each time-out
    in_main = threading.current_thread() is threading.main_thread()
    limit = _STEP_S if in_main else None

    def same(*answers: str) -> bool:
        parsed = [parse(f"${answer}$", parsing_timeout=limit) for answer in answers]
        return all(parsed) and bool(verify(*parsed, timeout_seconds=limit))

    # A false equation of numbers, such as 1=5, has no value.
    *sides, last = pred.split("=")
    calculated = [side for side in sides if side.strip() and not re.search(r"[A-Za-z]", side)]
    return same(gold, pred) and all(same(last, side) for side in calculated)


def _is_misread(plain: str, reference: str) -> bool:
    """Return whether two answers differ in a sign that computer algebra passes over."""
    bases = [_BASE.findall(answer) for answer in (plain, reference)]
    signs = [bool(_NOT_READ.search(answer)) for answer in (plain, reference)]
    return bases[0] != bases[1] or signs[0] != signs[1]


def read_answer(text: str) -> str:
    r"""Return the answer that a solution states last, empty without one.

    It is stated in `\boxed{}`, or on a line behind `Answer:`, where mathematics between dollar
    signs comes before the words around it.
    """
    boxed = find_last_box(text)
    lines = list(_ANSWER.finditer(text))
    if boxed is not None and (not lines or lines[-1].start() < boxed[0]):
        return boxed[1]
    if not lines:
        return ""
    line = text[lines[-1].end() :].lstrip().lstrip("*").partition("\n")[0].strip()
    between = line.split("$")
    inside = [part.strip() for part in between[1:-1:2] if part.strip()]
    return inside[-1] if inside else line.rstrip("*.").rstrip()


def gold_answer(ground_truth: Any) -> str:
    r"""Return the answer in a ground truth, which may be a worked solution with a box."""
    text = str(ground_truth).strip()
    boxed = find_last_box(text)
    return boxed[1] if boxed is not None else text


def normalize(answer: str) -> str:
    """Write an answer in the one form in which equal ones are the same text, as far as rules go."""
    answer = answer.strip().rstrip(".").replace("\\\\", "\\")
    answer = answer.replace("tfrac", "frac").replace("dfrac", "frac")
    answer = _DROPPED.sub("", answer)
    answer = _WRAPPER.sub(r"\1", _UNIT.sub("", answer))
    name, equals, value = answer.partition("=")
    is_name = len(name.strip()) <= 2 and not any(map(str.isdigit, name))
    if equals and "=" not in value and is_name:  # `x = 5`, `k=5`
        answer = value
    answer = _BARE_POINT.sub("0.", answer.strip())
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = _SHORT_FRACTION.sub(full_frac, answer)
    answer = _FRACTION_OF_TWO_BRACES.sub(r"\\frac\1{\2}", answer)
    answer = _BASE.sub(r"_\1", "".join(answer.split()))
    answer = drop_commas(answer)
    if slashed := _SLASHED.fullmatch(answer):
        answer = "{}\\frac{{{}}}{{{}}}".format(*slashed.groups())
    return "\\frac{1}{2}" if answer == "0.5" else answer
