"""Code, scored by its tests in the sandbox.

Each case passes or not; the reward is 1 for all of them, or with `reward.sandbox.credit=share`
the share that passes, and the accuracy is 1 for all of them. A sandbox that fails is no fault of
the answer's: that scoring fails, and the service decides what it means. The tests of a row:

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from winnow.rewards.scorers.markers import Extra, decode_json
from winnow.sandbox import current, harness
from winnow.sandbox.program import Program, Result
from winnow.types import Score

if TYPE_CHECKING:
    from winnow.sandbox import Sandbox

_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")
_LEAST_S = 0.05
_SHOWN = 100
"""Characters of a text that people see."""
_HARNESS = Path(harness.__file__).read_text(encoding="utf-8")
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = frozenset({"python", "py", "python3"})
_CHECK = re.compile(r"^def check\b", re.MULTILINE)


@dataclass(frozen=True)
class CodeTests:
    """The tests of a row."""

    kind: Literal["programs", "calls", "asserts", "check"]
    """Pairs of standard input and output; the others are what `sandbox.harness` runs."""
    cases: list[Any]
    entry_point: str | None = None
    prompt: str = ""


TestOutcome = tuple[int, str, str]
"""Cases passed; `pass`, or what became of the first that did not (`wrong`, `runtime_error`,
`compile_error`, `time_limit`, `output_limit`); a short explanation for people."""


def score(data_source: str, text: str, ground_truth: Any, extra: Extra) -> Score:
    """Run the code of an answer against the tests of its row, in the sandbox of this run.

    Raises:
        ValueError: the row has no usable tests: they are no Python, or import what is not there.
        SandboxError: the sandbox failed.
    """
    tests, code, sandbox = read_tests(ground_truth), extract_code(text), current()
    if not code.strip():
        passed, outcome, detail = 0, "compile_error", "no code"
    elif tests.kind == "programs":
        passed, outcome, detail = _run_programs(code, tests, sandbox)
    else:
        passed, outcome, detail = _run_in_harness(code, tests, sandbox)
    cases = len(tests.cases)
    share, accuracy = passed / cases, float(passed == cases)
    reward = share if sandbox.config.credit == "share" else accuracy
    counts = {"cases": cases, "passed": passed, "passed_share": share}
    return Score(reward, accuracy, {"task": reward}, {"pred": outcome, "detail": detail, **counts})


def _run_programs(code: str, tests: CodeTests, sandbox: Sandbox) -> TestOutcome:
    passed, first, text = 0, "", ""
    remaining_s = sandbox.config.sample_s  # of programs' time, not of waiting for a busy sandbox
    for number, (stdin, expected) in enumerate(tests.cases, start=1):
        if remaining_s < _LEAST_S:
            first = first or "time_limit"
            break
        program = Program(code, stdin.encode("utf-8", "surrogatepass"))
        result = sandbox.run_for(program, min(sandbox.config.time_s, remaining_s))
        remaining_s -= result.seconds
        outcome = _classify_result(result, expected)
        passed += outcome == "pass"
        if outcome == "pass":
            continue
        if not first:
            first, text = outcome, f"case {number}: {_explain(result, outcome, expected)}"
        if sandbox.config.credit == "all" or outcome == "compile_error":
            break
    return passed, first or "pass", text


def _explain(result: Result, outcome: str, expected: str) -> str:
    """Explain for people why a case did not pass."""
    if outcome == "wrong":
        got = result.stdout[:_SHOWN].decode(errors="replace").rstrip()
        return f"printed {got!r}, expected {expected[:_SHOWN].rstrip()!r}"
    if result.ending != "finished":
        return f"ended after {result.seconds:.2g} s with {len(result.stdout)} bytes printed"
    return _last_line(result)[:_SHOWN] or f"exit code {result.exit_code}"


def _last_line(result: Result) -> str:
    return result.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]


def _classify_result(result: Result, expected: str) -> str:
    if result.ending != "finished":
        return result.ending
    if result.exit_code != 0:
        return "compile_error" if _last_line(result).startswith(_SYNTAX_ERRORS) else "runtime_error"
    printed = result.stdout.decode(errors="replace")
    return "pass" if _trim_lines(printed) == _trim_lines(expected) else "wrong"


def _run_in_harness(code: str, tests: CodeTests, sandbox: Sandbox) -> TestOutcome:
    config = sandbox.config
    solution = {"prompt": tests.prompt, "code": code, "entry_point": tests.entry_point}
    request = {**vars(tests), "call_s": config.time_s, "stop_early": config.credit == "all"}
    files = {harness.SOLUTION: json.dumps(solution).encode()}
    program = Program(_HARNESS, json.dumps(request).encode(), files, compile_once=True)
    result = sandbox.run_for(program, config.sample_s)
    if result.ending != "finished":
        return 0, result.ending, ""
    report = None
    if result.exit_code == 0:
        with suppress(ValueError):
            report = harness.decode(json.loads(result.stdout))
    if not isinstance(report, dict):  # the solution's values took the tests' memory, or forgery
        return 0, "runtime_error", result.stderr[-200:].decode(errors="replace")
    if "broken" in report:
        raise ValueError(f"the tests of this row cannot run: {report['broken']}")
    return report["passed"], str(report["outcome"]), str(report["text"])


def read_tests(ground_truth: Any) -> CodeTests:
    """Read the tests in a row's ground truth.

    Raises:
        ValueError: there are none, or they are malformed.
    """
    truth = decode_json(ground_truth)
    if not isinstance(truth, Mapping):
        name = type(truth).__name__
        raise ValueError(f"the ground truth must be an object with tests, or its JSON, got {name}")
    prompt, entry = truth.get("prompt") or "", truth.get("entry_point") or truth.get("fn_name")
    if not isinstance(prompt, str) or not isinstance(entry, str | None):
        raise ValueError("prompt and entry_point of the ground truth must be texts")
    entry = entry.strip() if entry else None
    inputs = truth.get("inputs", truth.get("input"))
    outputs = truth.get("outputs", truth.get("output"))
    asserts = truth.get("assert_case") or truth.get("test_list")
    if test := truth.get("test"):
        if not isinstance(test, str):
            raise ValueError("test of the ground truth must be Python code")
        if _CHECK.search(test):
            if entry is None:
                raise ValueError("the ground truth has a check, but no entry_point to check")
            return CodeTests("check", [test], entry, prompt)
        asserts = [test]
    if asserts:
        if not (_is_list(asserts) and all(isinstance(each, str) for each in asserts)):
            raise ValueError("assert_case of the ground truth must be a list of Python asserts")
        return CodeTests("asserts", list(asserts), entry or _asserted_function(asserts), prompt)
    if not (_is_list(inputs) and _is_list(outputs) and inputs and len(inputs) == len(outputs)):
        raise ValueError(
            "the ground truth has no tests: it needs inputs and outputs of one length, "
            f"assert_case, or test; it has {', '.join(truth) or 'nothing'}"
        )
    if entry is not None:
        # JSON on both sides, or on neither: a text beside a list of arguments is a text.
        calls = [
            [_parse_arguments(i), _load_json(o) if isinstance(i, str) else o]
            for i, o in zip(inputs, outputs, strict=True)
        ]
        return CodeTests("calls", calls, entry, prompt)
    return CodeTests(
        "programs", [(_join_lines(i), _join_lines(o)) for i, o in zip(inputs, outputs, strict=True)]
    )


def extract_code(answer: str) -> str:
    """The code in an answer: its last block of Python, else its last untagged one, else all of it.

    What stands untagged behind a block of Python is mostly its output.
    """
    answer = answer.rpartition("</think>")[2]
    blocks: list[tuple[str, str]] = _FENCE.findall(answer)
    python = [body for tag, body in blocks if tag.lower() in _PYTHON]
    untagged = [body for tag, body in blocks if not tag]
    return (python or untagged or [answer])[-1]


def _trim_lines(text: str) -> list[str]:
    """Split an output into lines, without trailing blanks and trailing empty lines."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _asserted_function(asserts: Sequence[str]) -> str | None:
    """The usual function that asserts are about, where they call no other: it is redefined."""
    called: list[str] = []
    with suppress(SyntaxError, ValueError, RecursionError):  # whose test fails, and says so
        for node in ast.walk(ast.parse("\n".join(asserts))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.append(node.func.id)
    if not all(hasattr(builtins, name) or name in harness.NAMES for name in called):
        return None
    # `abs(sqrt(4.0) - 2) < 1e-6` is about sqrt.
    return next((name for name in called if name in harness.NAMES), called[0] if called else None)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _parse_arguments(value: Any) -> list[Any]:
    """A list of arguments, or a text with one in JSON on each line."""
    if isinstance(value, str):
        return [_load_json(line) for line in value.splitlines() if line.strip()]
    return list(value) if _is_list(value) else [value]


def _load_json(value: Any) -> Any:
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _join_lines(value: Any) -> str:
    return "\n".join(map(str, value)) if _is_list(value) else str(value)
