"""Countdown: reach a number from given ones by + - * / and brackets, each used exactly once.

The expression stands in the last `<answer>…</answer>`, perhaps with `= 98` behind it. Values are
exact fractions. An expression in its tags that is wrong gets a tenth, as in TinyZero, which set
the task.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from winnow.rewards.scorers.markers import Extra, decode_json, last_tagged
from winnow.types import Score

FORMAT_REWARD = 0.1
LONGEST_EXPRESSION = 300
"""Characters."""
_SIGNS = str.maketrans({"×": "*", "÷": "/", "·": "*", "−": "-", "x": "*"})  # noqa: RUF001
_ALLOWED = frozenset("0123456789+-*/() ")
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """1, a tenth for the form alone, or 0."""
    truth = decode_json(ground_truth)
    target, numbers = truth["target"], truth["numbers"]
    pred = last_tagged(text) or ""
    expression = pred.partition("=")[0].translate(_SIGNS).strip()
    right = _reaches(expression, int(target), sorted(map(int, numbers)))
    form = float(pred != "")
    reward = 1.0 if right else FORMAT_REWARD * form
    return Score(reward, float(right), {"task": reward}, {"pred": pred, "format": form})


def _reaches(expression: str, target: int, numbers: list[int]) -> bool:
    if not expression or len(expression) > LONGEST_EXPRESSION or set(expression) - _ALLOWED:
        return False
    used: list[int] = []
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == target and sorted(used) == numbers


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """An expression's value; the numbers in it are added to `used`.

    Raises:
        ValueError: it holds something else than the four operations on whole numbers.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        return OPERATORS[type(node.op)](left, right)
    raise ValueError(ast.dump(node))
