r"""Mathematical answers as DAPO scores them: the line `Answer: …`, normalised, as text.

The last match of `Answer:` within the last 300 characters counts. Both sides go through
`normalize`, then they must be the same text: `0.50` is not `0.5`. The boxed mode compares the
last `\boxed{}` within the last 100 characters as it stands.
"""

from __future__ import annotations

import re
from typing import Any

from winnow.boxed import closing_brace
from winnow.rewards.scorers.markers import Extra, drop_commas, full_frac, make_score
from winnow.types import Score

TAIL_CHARACTERS = 300
BOXED_TAIL_CHARACTERS = 100
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_BOXED = r"\boxed{"

# Units and other words that may stand beside a number; a letter next to one makes it part
# of another word (`cm` in `cmx`).
_UNITS = (
    "square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|"
    "degrees|cm|gm|pounds|meters|meals|edges|students|multiples"
)
_UNIT = re.compile(rf"(?<![A-Za-z\\])(?:{_UNITS})(?![A-Za-z])")
_ARTICLE = re.compile(r"(?<![A-Za-z\\])(?:an?|the) +(?=[\w$\\])", re.IGNORECASE)
# Roman type that holds a unit and nothing else, with the power that belongs to it.
_UNIT_IN_TEXT = re.compile(
    rf"(?:\\,|~)?\\(?:text|mathrm)\{{(?:\s|~|\.|\bm\b|\bs\b|\band\b|\b(?:{_UNITS})\b)*\}}"
    r"(?:\^(?:[23]|\{[23]\}))?"
)
_DECORATION = re.compile(
    r"\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\(?:ldots|dots|;|!|\$|\ )|,\\!|\{,\}|\""
)
_MATH = re.compile(r"\$([^$]+)\$")
_WRAPPER = re.compile(r"\\(?:text|textbf|overline)(?=\{)")
_SHORT_FRACTION = re.compile(r"(frac)([^{\\])(\{[^{}]*\}|[^{\\])")
_SHORT_ROOT = re.compile(r"(sqrt)([^{\\\[])")
_GROUP = re.compile(r"\{([^{},]+)\}")  # braces without a comma are no set, and print nothing


def score(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give +1 or -1 by the `Answer:` line; `pred` is the normalised answer, empty without one."""
    matches: list[str] = _ANSWER.findall(text[-TAIL_CHARACTERS:])
    pred = normalize(matches[-1]) if matches else ""
    return make_score(pred != "" and pred == normalize(str(ground_truth)), pred, wrong_reward=-1.0)


def score_boxed(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    r"""Give +1 or -1 by the content of the last `\boxed{}`, without any normalising."""
    tail = text[-BOXED_TAIL_CHARACTERS:]
    start = tail.rfind(_BOXED)
    end = closing_brace(tail, start + len(_BOXED) - 1) if start >= 0 else None
    pred = None if end is None else tail[start + len(_BOXED) : end]
    return make_score(pred is not None and pred == str(ground_truth), pred or "", wrong_reward=-1.0)


def normalize(answer: str) -> str:
    """Drop from an answer whatever does not change its meaning in mathematical writing."""
    answer = answer.rpartition("=")[2]
    answer = _ARTICLE.sub("", answer)
    answer = answer.replace(".$", "$").replace(r"\mbox", r"\text")
    answer = _UNIT_IN_TEXT.sub("", answer)
    answer = _DECORATION.sub("", answer)
    answer = _UNIT.sub("", answer)
    # Of a sentence with mathematics in it the mathematics counts.
    math = _MATH.search(answer)
    answer = (math.group(1) if math else answer).replace("$", "").replace(" ", "")
    answer = _unbox(_unwrap(answer))
    group = _GROUP.fullmatch(answer)
    answer = group.group(1) if group else answer
    answer = _SHORT_FRACTION.sub(full_frac, answer)
    answer = _SHORT_ROOT.sub(r"\1{\2}", answer)
    return drop_commas(answer).strip()


def _unwrap(answer: str) -> str:
    r"""Replace `\text{…}` and its kin by their contents, braces in them balanced."""
    parts, start = [], 0
    for match in _WRAPPER.finditer(answer):
        if match.start() < start:  # within one that is unwrapped below
            continue
        end = closing_brace(answer, match.end())
        if end is None:
            break
        inside = _unwrap(answer[match.end() + 1 : end])
        if inside.startswith("{") and closing_brace(inside, 0) == len(inside) - 1:
            inside = inside[1:-1]
        parts += [answer[start : match.start()], inside]
        start = end + 1
    return "".join([*parts, answer[start:]])


def _unbox(answer: str) -> str:
    before, box, after = answer.partition(_BOXED)
    inside, brace, behind = after.rpartition("}")
    return f"{before}{inside}{behind}" if box and brace else answer
