"""Which answers may go to tasks of reasoning-gym that evaluate them as Python.

Some of its tasks call `eval` on an answer, or sympy's `parse_expr`, which is `eval` too: an
answer could run anything in the scorer's process. Before those an answer is held against what it
can rightly consist of: without brackets that call and without attributes nothing can be run.
"""

from __future__ import annotations

import re

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""They evaluate a list or a text."""
EXPRESSIONS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
"""They evaluate a formula."""

_LONGEST_FORMULA = 500
_LIST = re.compile(r"[\w\s\[\],'\".-]*")
_FORMULA = re.compile(r"(?:[A-Za-z0-9\s+\-*/(),^]|(?<=\d)\.(?=\d))*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
# fmt: off
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "asin", "acos", "atan",
    "arcsin", "arccos", "arctan", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi",
    "Abs", "abs", "Rational", "Integral",
))
# fmt: on
# Powers of powers, and exponents of more than three digits: numbers that fill the memory.
_TOWER = re.compile(r"(?:\*\*|\^)\s*\(*\s*(?:\d{4}|[\w.]+\s*\)*\s*(?:\*\*|\^))")


def may_pass(task: str, answer: str) -> bool:
    """Whether a task may be given an answer."""
    if task in LISTS:
        return _LIST.fullmatch(answer) is not None
    if task not in EXPRESSIONS:
        return True
    return (
        len(answer) <= _LONGEST_FORMULA
        and _FORMULA.fullmatch(answer) is not None
        and all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(answer))
        and _TOWER.search(answer) is None
    )
