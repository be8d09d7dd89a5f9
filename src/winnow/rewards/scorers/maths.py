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
from html.entities import html5
from typing import Any

from winnow.boxed import closing_brace, find_last_box
from winnow.rewards.scorers.markers import Extra, drop_commas, full_frac, make_score
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

# Geometry3K's comparison, which is mathruler's.
_THINK_BOXED = re.compile(r"(?s)<think>(?>.*?</think>)(?>.*?\\boxed\{).*?\}")
_TEXT_ALONE = re.compile(r"^\\text\{(.+)\}$")
_MATH_DROPPED = re.compile(r"\n|\\!|\\left|\\right|\^\\circ|\^\{\\circ\}|\\[$%]|%")
_TYPED_UNIT = re.compile(
    "(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard)"
    r"(?:es)?s? *(?:\^[0-9]+)?|\^ *\\circ"
)
_INNER_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TUPLE = re.compile(r"[()\[\]][^()\[\]]+[()\[\]]")
_TYPED_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
# No formula of numbers, letters and roots, or one whose number may be too large to compute: Python
# takes powers of whole numbers in one step, which no alarm ends.
_UNREADABLE = re.compile(
    r"[^\w .+\-*/^()!]|_|\^\(|\^[0-9]+\^|\^[0-9]{2}|\^sqrt|\)\^.*\)\^|\*\*(?:[^0-9]|[0-9]{2})"
    r"|\*\*.*\*\*|[0-9]{3}!|[!)]!|[0-9.]e[+-]?[0-9]{3}|[A-Za-z)]\."
)
_SYMPY_NAMES = "Symbol Number Integer Float Rational Function factorial sqrt pi ln"
_MACRO = re.compile(r"(?s)\\(?:mbox|color)\{[^{}]*\}|\\([A-Za-z]+|.|$)\s*")
_TYPED = {"pi": "{pi}", "cdot": "*", "times": "*", "infty": "{inf}", "cup": "U", "surd": "sqrt"}
_TYPED |= {"circ": "∘", "triangle": "", "colon": "", "\\": "\n"}
_TYPED |= dict.fromkeys([*",;: ", "quad"], " ") | dict.fromkeys(["tfrac", "dfrac"], "\\frac")
_TYPED |= {name: name for name in ("sin", "cos", "tan", "arctan", "log", "ln")}
_TYPED |= {name: f"\\{name}" for name in ("frac", "sqrt")}
_PRIVATE = 0xE000
"""The first character of Unicode's private use."""


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

    The rule that `hiyouga/geometry3k` is usually trained with, `geo3k` of verl: an answer is right
    where mathruler equates it with the gold one, unlike `is_equal` (docs/rewards.md).
    """
    start = text.rfind("\\boxed{")
    # An escaped brace counts as any other.
    end = closing_brace(text.replace("\\", " "), start + 6) if start >= 0 else None
    pred = "" if end is None else text[start + 7 : end].strip()
    right = float(end is not None and _is_equal_as_typed(pred, str(ground_truth)))
    form = float(_THINK_BOXED.match(text) is not None)
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


def _is_equal_as_typed(pred: str, gold: str) -> bool:
    """Return whether an answer is the gold one in MATH's writing, as typed, or term by term."""
    if _math_text(pred) == _math_text(gold):
        return True
    if max(len(pred), len(gold)) > LONGEST_EXPRESSION:
        return False
    typed, reference = _typed_text(pred), _typed_text(gold)
    terms, golds = (
        text[1:-1].split(",") if _TUPLE.fullmatch(text) else [text]
        for text in (_INNER_COMMA.sub("", each) for each in (typed, reference))
    )
    ends = len(golds) == 1 or typed[:1] + typed[-1:] == reference[0] + reference[-1]
    is_split_alike = ends and len(terms) == len(golds)
    return typed == reference or (is_split_alike and all(map(_is_equal_term, terms, golds)))


def _is_equal_term(pred: str, gold: str) -> bool:
    """Return whether terms have one value; two fractions or one whole number must agree as text."""
    if _TYPED_FRACTION.search(pred) and _TYPED_FRACTION.search(gold):
        return pred == gold
    both = f"{gold} {pred}"
    letters = set(filter(str.isalpha, re.sub("sqrt|frac", "", both)))
    one_is_whole = (_whole(pred) is None) != (_whole(gold) is None)
    if one_is_whole or len(letters) > 2 or _UNREADABLE.search(both):
        return False
    import sympy
    from math_verify.utils import TimeoutException, timeout
    from sympy.parsing import sympy_parser as parser

    rules = (*parser.standard_transformations, parser.convert_xor)
    rules = (*rules, parser.implicit_multiplication_application)
    names = {name: getattr(sympy, name) for name in _SYMPY_NAMES.split()}

    def is_zero() -> bool:
        left, right = (parser.parse_expr(term, {}, rules, names) for term in (gold, pred))
        return bool(sympy.simplify(left - right) == 0)

    in_main = threading.current_thread() is threading.main_thread()
    try:
        return bool(timeout(_STEP_S if in_main else None)(is_zero)())
    except (Exception, TimeoutException):  # the parser raises anything at what is no formula
        return False


def _math_text(answer: str) -> str:
    """Write an answer by MATH's rules, without the additions of `normalize`."""
    text = _TEXT_ALONE.sub(r"\1", answer.strip()).strip().replace("\\\\", "\\")
    text = re.sub("[td]frac", "frac", _MATH_DROPPED.sub("", text))
    text = text.partition("\\text{ ")[0] if text.count("\\text{ ") == 1 else text
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, _, value = text.partition("=")
    text = value if len(name) <= 2 and text.count("=") == 1 else text
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", _SHORT_FRACTION.sub(full_frac, text))
    return "\\frac{1}{2}" if text == "0.5" else text


def _typed_text(answer: str) -> str:
    """Write an answer as typed without LaTeX, units, spaces and capitals."""
    text = re.sub(r"\\?[$%]", "", _TEXT_ALONE.sub(r"\1", answer))
    text = re.sub(" (?:or|and) ", " , ", text)
    for name, zeros in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(name, f"*10^{zeros}")
    text = re.sub(r"(?s)^\{(.*)\}$", r"\1", _TYPED_UNIT.sub("", text))
    text = re.sub(r",\\! *", "", text)
    text = _whole(text) or text
    text = _read_latex(text) if "\\" in text else text
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", text))
    text = re.sub("[ {}]", "", text).lower()
    return _whole(_INNER_COMMA.sub("", text)) or text


def _whole(number: str) -> str | None:
    """Return a number without its point if it is whole to 1e-7."""
    try:
        value = float(number)
        return str(round(value)) if abs(value - round(value)) <= 1e-7 else None
    except (ValueError, OverflowError):  # the second: it is infinite
        return None


def _read_latex(text: str) -> str:
    r"""Write LaTeX as typed text; as in mathruler, `\frac{a+b}{c}` is `a+b/c`."""
    text = text.replace("~", "\xa0")
    text = _MACRO.sub(lambda macro: _TYPED.get(macro[1], html5.get(f"{macro[1]};", "")), text)
    text = "{" * (text.count("}") + 1) + text + "}" * (text.count("{") + 1)
    groups: list[str] = []  # each leaves one character in the text around it
    while match := re.search(r"\{([^{}]*)\}", text):
        roots = re.sub(r"\\sqrt\s*(?:\[[^\]]*\])?\s*(\S)", r"sqrt(\1)", match[1])
        groups.append(re.sub(r"\\frac\s*(\S)\s*(\S)", r" \1/\2", roots))
        text = text[: match.start()] + chr(_PRIVATE + len(groups)) + text[match.end() :]
    while groups:
        text = text.replace(chr(_PRIVATE + len(groups)), groups.pop())
    return text.strip()
