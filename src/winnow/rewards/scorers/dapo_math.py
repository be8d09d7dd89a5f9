r"""Mathematical answers as DAPO scores them: the line `Answer: …`, normalised, as text.

The last match of `Answer:` within the last 300 characters counts. Both sides go through
`normalize`, then they must be the same text: `0.50` is not `0.5`. The boxed mode compares the
last `\boxed{}` within the last 100 characters as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
_DECORATION = re.compile(
    r"\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\text\{(?:s|m|\.|\s*|\s*and\s*)\}(?:\^[23])?"
    r"|\\(?:ldots|dots|;|!|\$|\ )|,\\!|\{,\}|\""
)
_MATH = re.compile(r"\$([^$]+)\$")
_WRAPPER = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"(frac)([^{\\])(\{[^{}]*\}|[^{\\])")
_SHORT_ROOT = re.compile(r"(sqrt)([^{\\\[])")
_PLAIN_NUMBER = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """+1 or -1 by the `Answer:` line; `pred` is the normalised answer, empty without one."""
    found: list[str] = _ANSWER.findall(text[-TAIL_CHARACTERS:])
    pred = normalize(found[-1]) if found else ""
    return _verdict(pred, pred != "" and pred == normalize(str(ground_truth)))


def score_boxed(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    r"""+1 or -1 by the content of the last `\boxed{}`, without any normalising."""
    pred = _last_boxed(text[-BOXED_TAIL_CHARACTERS:])
    return _verdict(pred or "", pred is not None and pred == str(ground_truth))


def normalize(answer: str) -> str:
    """An answer without what does not change its meaning in mathematical writing."""
    answer = answer.rpartition("=")[2]
    answer = _ARTICLE.sub("", answer)
    answer = answer.replace(".$", "$").replace(r"\mbox", r"\text")
    answer = _DECORATION.sub("", answer)
    answer = _UNIT.sub("", answer)
    # Of a sentence with mathematics in it the mathematics counts.
    math = _MATH.search(answer)
    answer = (math.group(1) if math else answer).replace("$", "").replace(" ", "")
    answer = _unbox(_WRAPPER.sub(r"\1", answer))
    answer = _SHORT_FRACTION.sub(_full_fraction, answer)
    answer = _SHORT_ROOT.sub(r"\1{\2}", answer)
    if _PLAIN_NUMBER.fullmatch(answer):
        answer = answer.replace(",", "")
    return answer.strip()


def _full_fraction(found: re.Match[str]) -> str:
    r"""`frac12` and `frac1{2}` to `frac{1}{2}`."""
    above, below = found.group(2), found.group(3)
    return f"frac{{{above}}}{below if below.startswith('{') else f'{{{below}}}'}"


def _unbox(answer: str) -> str:
    before, box, after = answer.partition(_BOXED)
    inside, brace, behind = after.rpartition("}")
    return f"{before}{inside}{behind}" if box and brace else answer


def _last_boxed(text: str) -> str | None:
    """What the last box holds, braces in it balanced; None without a whole box."""
    start = text.rfind(_BOXED)
    depth = 0
    for i in range(start + len(_BOXED) - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(_BOXED) : i]
    return None


def _verdict(pred: str, right: bool) -> Score:
    reward = 1.0 if right else -1.0
    return Score(reward, float(right), {"task": reward}, {"pred": pred})
