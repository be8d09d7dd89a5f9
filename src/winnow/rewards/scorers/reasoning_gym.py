"""Tasks of reasoning-gym: the package that set a problem also judges the answer.

The row says which task it is (`data_source`: `reasoning_gym/NAME`) and brings the problem's entry
and the task's settings in `extra_info`, as `winnow.data.reasoning_gym` writes them. The answer
is the text in the last `<answer>…</answer>`. Tasks judge by custom rules, many of them with
shares of the whole for an answer that is nearly right.

Two checks stand between an answer and its task. Some tasks call `eval` on an answer, or sympy's
`parse_expr`, which is `eval` too: such an answer must be plain data or a small formula
(`is_safe`). And some tasks reward answers that solve nothing (`_is_hack`): NaN, any
text for a truth value, numbers that were not given; or, among formulas, the question as an
integral.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from winnow.rewards.scorers.countdown import OPERATORS
from winnow.rewards.scorers.markers import Extra, last_tagged
from winnow.types import Score

log = logging.getLogger(__name__)

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks that evaluate a list or a text."""
ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Tasks that evaluate a formula of numbers."""
_CALCULUS = frozenset({"intermediate_integration", "simple_integration"})
EXPRESSIONS = ARITHMETIC | _CALCULUS | {"polynomial_multiplication"}
"""Tasks that evaluate a formula."""

_LONGEST_FORMULA = 500
_LARGEST_EXPONENT = 999
_CALCULATION = re.compile(r"[0-9\s+\-*/().]*")
_FORMULA = re.compile(r"(?:[A-Za-z0-9\s+\-*/(),^]|(?<=\d)\.(?=\d))*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*")
# NaN and infinity as `float`, `complex`, `Decimal` and JSON read them, and no part of a word: tasks
# compare with `>`, sort and take minima, and NaN comes through all of these.
_NOT_FINITE = re.compile(r"(?<![a-z])(?:s?nan|inf(?:inity)?)+[ij]?(?![a-z])", re.IGNORECASE)
_DROPPED = re.compile(r"[\s,]")  # by tasks, before they read a number
# fmt: off
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "asin", "acos", "atan",
    "arcsin", "arccos", "arctan", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "pi",
    "Abs", "abs", "Rational",
))
# fmt: on


def score(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Give the task's own score, 0 to 1; accuracy is 1 for the full one only.

    An answer gets 0 if the task raises at it, or if it may not be given to the task;
    `unreadable` is 1 then.

    Raises:
        KeyError: the row has no entry.
        ValueError: there is no such task.
    """
    info = extra.get("extra_info") or {}
    task = data_source.partition("/")[2] or str(info.get("task"))
    entry = json.loads(info["entry"], object_hook=_restore_types)
    judge = _load_task(task, info.get("config") or "{}")
    pred = last_tagged(text)
    share, unreadable = 0.0, 1.0
    # The package's own answer to an integral without a closed form is that integral.
    is_reference = pred is not None and pred == str(entry.get("answer")).strip()
    if pred is None or is_reference or (is_safe(task, pred) and not _is_hack(task, pred, entry)):
        try:
            share, unreadable = float(judge.score_answer(pred, entry)), 0.0
        except Exception as error:  # the task's code on whatever a policy wrote
            log.debug("%s raised at an answer: %r", task, error)
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    noted = {"pred": pred or "", "unreadable": unreadable}
    return Score(share, float(share == 1.0), {"task": share}, noted)


def is_safe(task: str, answer: str) -> bool:
    """Return whether a task that evaluates answers may be given this one."""
    if task in LISTS:
        return _is_data(answer)
    if task not in EXPRESSIONS:
        return True
    allowed = _CALCULATION if task in ARITHMETIC else _FORMULA
    return (
        len(answer) <= _LONGEST_FORMULA
        and allowed.fullmatch(answer) is not None
        and all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(answer))
        and _is_small(answer)
    )


def _is_data(answer: str) -> bool:
    """Return whether Python would read plain lists, texts and numbers in it, or nothing at all."""
    if re.fullmatch(r"[A-Z]*", answer):  # letters alone, which name nothing that a task has
        return True
    try:
        ast.literal_eval(answer.strip())
    except SyntaxError:
        return True  # and so it is for the task
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_small(formula: str) -> bool:
    """Return whether a formula has no powers that would fill the memory."""
    try:
        tree = ast.parse(formula.strip().replace("^", "**"), mode="eval")
        return _bound_exponent(tree.body) <= _LARGEST_EXPONENT
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return False


def _bound_exponent(node: ast.AST) -> Fraction:
    """Bound the exponent that all powers in a formula make together.

    Raises:
        ValueError: an exponent is a power itself.
    """
    largest = max(
        (_bound_exponent(child) for child in ast.iter_child_nodes(node)), default=Fraction(1)
    )
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
        return largest
    if any(isinstance(each, ast.Pow) for each in ast.walk(node.right)):
        raise ValueError("a tower of powers")
    return _bound_exponent(node.left) * max(Fraction(1), abs(_evaluate(node.right)))


def _evaluate(node: ast.AST) -> Fraction:
    """Evaluate a formula of numbers; a letter counts as 1.

    Raises:
        ValueError, ZeroDivisionError: it has no value.
    """
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(value)
        case ast.Name():
            return Fraction(1)
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand) if isinstance(node.op, ast.USub) else _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError(f"no bound for {ast.dump(node)}")


def _is_hack(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a task would reward an answer that is no solution."""
    if _NOT_FINITE.search(_DROPPED.sub("", answer)):
        return True
    if task == "game_of_life_halting":
        return answer.strip().lower() != str(entry["answer"]).strip().lower()
    if task == "coin_flip":
        # The task gives a share by the digits that agree, which `0` has in common with most.
        try:
            return abs(Fraction(answer.replace(",", "")) - Fraction(entry["answer"])) > 1e-4
        except (ValueError, ZeroDivisionError):
            return True
    if task == "puzzle24":
        return sorted(map(int, re.findall(r"\d+", answer))) != sorted(entry["metadata"]["numbers"])
    return False


@lru_cache(maxsize=8)
def _load_task(task: str, config: str) -> Any:
    """Make a data set of the task; its size and seed have no part in judging."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, **json.loads(config, object_hook=_restore_types))


def _restore_types(value: dict[str, Any]) -> Any:
    """Restore tuples, fractions, and dicts with keys that are no texts, which JSON lacks."""
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__fraction__"}:
        return Fraction(value["__fraction__"])
    if value.keys() == {"__items__"}:
        return dict(value["__items__"])
    return value
