r"""Mathematical answers as text: where a solution states its answer, and one form of writing it.

The rules are those that published MATH scores were made with (Hendrycks et al. 2021, arXiv
2103.03874, `math_equivalence`), and a few more of the same kind: thousands' commas, `\text{}`.
"""

from __future__ import annotations

import re
from typing import Any

_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"answer\**\s*:", re.IGNORECASE)

_DROPPED = re.compile(
    r"\\[!,;:]|\\left(?![A-Za-z])|\\right(?![A-Za-z])|\^\{?\\circ\}?|°|\\degree(?![A-Za-z])"
    r"|\\?[$%]|\n"
)
_UNIT = re.compile(r"(?<=[^\s{(\[])\s*\\(?:text|mbox|mathrm)\{[^{}]*\}(?:\^\{?[23]\}?)?\s*$")
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(?:\s*)([^\s{\\])(?:\s*)(\{[^{}]*\}|[^\s{\\])")
_FRACTION_OF_TWO_BRACES = re.compile(r"\\frac(\{[^{}]*\})\s*([^\s{\\])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([^\s{\\\[])")
_SLASHED = re.compile(r"(-?)(\d+)/(\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_BARE_POINT = re.compile(r"(?<!\d)\.(?=\d)")


def read_answer(text: str) -> str:
    r"""The answer that a solution states last, empty without one.

    Stated is what stands in `\boxed{}`, or on a line behind `Answer:`, where mathematics
    between dollar signs comes before the words around it.
    """
    boxed = _last_box(text)
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
    r"""A ground truth, which may be a worked solution with its answer in a box."""
    text = str(ground_truth).strip()
    boxed = _last_box(text)
    return boxed[1] if boxed is not None else text


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` (`\fbox{}`, `\boxed 5`) holds; None without a whole one."""
    found = _last_box(text)
    return None if found is None else found[1]


def normalize(answer: str) -> str:
    """An answer in the one form in which equal ones are the same text, as far as rules go."""
    answer = answer.strip().rstrip(".").replace("\\\\", "\\")
    answer = answer.replace("tfrac", "frac").replace("dfrac", "frac")
    answer = _DROPPED.sub("", answer)
    answer = _WRAPPER.sub(r"\1", _UNIT.sub("", answer))
    name, equals, value = answer.partition("=")
    if equals and "=" not in value and len(name.strip()) <= 2:  # `x = 5`, `k=5`
        answer = value
    answer = _BARE_POINT.sub("0.", answer.strip())
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = _SHORT_FRACTION.sub(_full_fraction, answer)
    answer = _FRACTION_OF_TWO_BRACES.sub(r"\\frac\1{\2}", answer)
    answer = "".join(answer.split())
    if _THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")
    slashed = _SLASHED.fullmatch(answer)
    if slashed:
        answer = "{}\\frac{{{}}}{{{}}}".format(*slashed.groups())
    return "\\frac{1}{2}" if answer == "0.5" else answer


def _full_fraction(found: re.Match[str]) -> str:
    above, below = found.groups()
    return f"\\frac{{{above}}}{below if below.startswith('{') else f'{{{below}}}'}"


def _last_box(text: str) -> tuple[int, str] | None:
    """Where the last box begins, and its content, braces in it balanced."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    found = boxes[-1]
    rest = text[found.end() :].lstrip()
    if not rest.startswith("{"):
        words = re.split(r"[\s$]", rest, maxsplit=1)[0]
        return (found.start(), words) if words else None
    depth = 0
    for mark in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return found.start(), rest[1 : mark.start()].strip()
    return None
