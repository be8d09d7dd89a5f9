"""Test cases as rows hold them, and the code in an answer.

| the ground truth (a dict, or its JSON) | what is tested |
|---|---|
| `inputs`, `outputs` (also `input`, `output`) | a program, by standard input and output |
| the same and `fn_name` | a function, by its arguments and results (JSON) |
| `test` with a function `check`, `entry_point` | a function, by the check (HumanEval, MBPP) |
| `assert_case` or `test_list` | functions, by single asserts |

`prompt` holds code that the answer goes on from or may rely on; `entry_point` names the function.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from winnow.sandbox.harness.solution import NAMES

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset({"python", "py", "python3"})
_CHECK = re.compile(r"^def check\b", re.MULTILINE)


@dataclass(frozen=True)
class ProgramTests:
    """Pairs of standard input and output."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class FunctionTests:
    """Calls with results, asserts, or a check: what `sandbox.harness` runs."""

    kind: Literal["calls", "asserts", "check"]
    cases: Sequence[Any]
    entry_point: str | None
    prompt: str


CodeTests = ProgramTests | FunctionTests


def read_tests(ground_truth: Any) -> CodeTests:
    """The tests in a row's ground truth.

    Raises:
        ValueError: there are none, or they are malformed.
    """
    given = _parsed(ground_truth)
    prompt, entry = given.get("prompt") or "", given.get("entry_point") or given.get("fn_name")
    if not isinstance(prompt, str) or not isinstance(entry, str | None):
        raise ValueError("prompt and entry_point of the ground truth must be texts")
    entry = entry.strip() if entry else None
    inputs = given.get("inputs", given.get("input"))
    outputs = given.get("outputs", given.get("output"))
    asserts = given.get("assert_case") or given.get("test_list")
    test = given.get("test")
    if test:
        if not isinstance(test, str):
            raise ValueError("test of the ground truth must be Python code")
        if not _CHECK.search(test):
            return FunctionTests("asserts", [test], entry or _asserted([test]), prompt)
        if entry is None:
            raise ValueError("the ground truth has a check, but no entry_point to check")
        return FunctionTests("check", [test], entry, prompt)
    if asserts:
        if not _are_texts(asserts):
            raise ValueError("assert_case of the ground truth must be a list of Python asserts")
        return FunctionTests("asserts", list(asserts), entry or _asserted(asserts), prompt)
    if not (_is_list(inputs) and _is_list(outputs) and inputs and len(inputs) == len(outputs)):
        raise ValueError(
            "the ground truth has no tests: it needs inputs and outputs of one length, "
            f"assert_case, or test; it has {', '.join(given) or 'nothing'}"
        )
    if entry is not None:
        # JSON on both sides, or on neither: a text beside a list of arguments is a text.
        calls = [
            [_arguments(i), _loaded(o) if isinstance(i, str) else o]
            for i, o in zip(inputs, outputs, strict=True)
        ]
        return FunctionTests("calls", calls, entry, prompt)
    return ProgramTests([(_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True)])


def code_of(answer: str) -> str:
    """The code in an answer: its last block of Python, else its last untagged one, else all of it.

    What stands untagged behind a block of Python is mostly its output.
    """
    answer = answer.rpartition("</think>")[2]
    blocks: list[tuple[str, str]] = _FENCE.findall(answer)
    python = [body for tag, body in blocks if tag.lower() in _PYTHON]
    untagged = [body for tag, body in blocks if not tag]
    return (python or untagged or [answer])[-1]


def same_output(said: str, expected: str) -> bool:
    """Return whether two outputs agree, apart from trailing blanks and trailing empty lines."""
    return _trimmed(said) == _trimmed(expected)


def _trimmed(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _parsed(ground_truth: Any) -> Mapping[str, Any]:
    given = ground_truth
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError("the ground truth must be a JSON object with test cases") from None
    if not isinstance(given, Mapping):
        raise ValueError(f"the ground truth must be an object, got {type(given).__name__}")
    return given


def _asserted(asserts: Sequence[str]) -> str | None:
    """The usual function that asserts are about, where they call no other: it is redefined."""
    called: list[str] = []
    with suppress(SyntaxError, ValueError, RecursionError):  # whose test fails, and says so
        for node in ast.walk(ast.parse("\n".join(asserts))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.append(node.func.id)
    if not all(hasattr(builtins, name) or name in NAMES for name in called):
        return None
    # `abs(sqrt(4.0) - 2) < 1e-6` is about sqrt.
    return next((name for name in called if name in NAMES), called[0] if called else None)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _are_texts(value: Any) -> bool:
    return _is_list(value) and all(isinstance(each, str) for each in value)


def _arguments(given: Any) -> list[Any]:
    """A list of arguments, or a text with one in JSON on each line."""
    if isinstance(given, str):
        return [_loaded(line) for line in given.splitlines() if line.strip()]
    return list(given) if _is_list(given) else [given]


def _loaded(given: Any) -> Any:
    if isinstance(given, str):
        try:
            return json.loads(given)
        except ValueError:
            return given
    return given


def _text(given: Any) -> str:
    if _is_list(given):
        return "\n".join(map(str, given))
    return str(given)
