"""Code, scored by its tests in the sandbox.

Each case passes or not; the reward is 1 for all of them, or with `reward.sandbox.credit=share`
the share that passes, and the accuracy is 1 for all of them. A sandbox that fails is no fault of
the answer's: that scoring fails, and the service decides what it means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow.rewards.scorers.code_tests import (
    FunctionTests,
    ProgramTests,
    code_of,
    read_tests,
    same_output,
)
from winnow.sandbox import harness
from winnow.sandbox.current import current
from winnow.sandbox.program import Program, Result, Sandbox
from winnow.types import Score

_SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")
_LEAST_S = 0.05
_TOLD = 100
"""Characters of a text that people see."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a row's tests."""

    passed: int
    cases: int
    outcome: str
    """`pass`, or what became of the first case that did not: `wrong`, `runtime_error`,
    `compile_error`, `time_limit`, `output_limit`."""
    text: str = ""
    """A short explanation for people."""


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Run the code of an answer against the tests of its row, in the sandbox of this run.

    Raises:
        ValueError: the row has no usable tests.
        SandboxError: the sandbox failed.
    """
    tests = read_tests(ground_truth)
    sandbox = current()
    verdict = judged(code_of(text), tests, sandbox)
    share = verdict.passed / verdict.cases
    accuracy = float(verdict.passed == verdict.cases)
    reward = share if sandbox.config.credit == "share" else accuracy
    said = {
        "pred": verdict.outcome,
        "detail": verdict.text,
        "cases": verdict.cases,
        "passed": verdict.passed,
        "passed_share": share,
    }
    return Score(reward, accuracy, {"task": reward}, said)


def judged(code: str, tests: ProgramTests | FunctionTests, sandbox: Sandbox) -> Verdict:
    """Run code against tests.

    Raises:
        ValueError: the tests are no Python, or import what the sandbox lacks.
        SandboxError: the sandbox failed.
    """
    if not code.strip():
        cases = tests.pairs if isinstance(tests, ProgramTests) else tests.cases
        return Verdict(0, len(cases), "compile_error", "no code")
    if isinstance(tests, ProgramTests):
        return _run_program(code, tests, sandbox)
    return _call_functions(code, tests, sandbox)


def _run_program(code: str, tests: ProgramTests, sandbox: Sandbox) -> Verdict:
    passed, first, text = 0, "", ""
    left = sandbox.config.sample_s  # of what programs took, not of waiting for a busy sandbox
    for number, (stdin, expected) in enumerate(tests.pairs, start=1):
        if left < _LEAST_S:
            first = first or "time_limit"
            break
        program = Program(code, stdin.encode("utf-8", "surrogatepass"))
        result = sandbox.run_for(program, min(sandbox.config.time_s, left))
        left -= result.seconds
        outcome = _outcome(result, expected)
        passed += outcome == "pass"
        if outcome == "pass":
            continue
        if not first:
            first, text = outcome, f"case {number}: {_told(result, outcome, expected)}"
        if sandbox.config.credit == "all" or outcome == "compile_error":
            break
    return Verdict(passed, len(tests.pairs), first or "pass", text)


def _told(result: Result, outcome: str, expected: str) -> str:
    """Explain for people why a case did not pass."""
    if outcome == "wrong":
        got = result.stdout[:_TOLD].decode(errors="replace").rstrip()
        return f"printed {got!r}, expected {expected[:_TOLD].rstrip()!r}"
    if result.ending != "finished":
        return f"ended after {result.seconds:.2g} s with {len(result.stdout)} bytes printed"
    return _last_line(result)[:_TOLD] or f"exit code {result.exit_code}"


def _last_line(result: Result) -> str:
    return result.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]


def _outcome(result: Result, expected: str) -> str:
    if result.ending != "finished":
        return result.ending
    if result.exit_code != 0:
        return "compile_error" if _last_line(result).startswith(_SYNTAX_ERRORS) else "runtime_error"
    return "pass" if same_output(result.stdout.decode(errors="replace"), expected) else "wrong"


def _call_functions(code: str, tests: FunctionTests, sandbox: Sandbox) -> Verdict:
    config = sandbox.config
    solution = {"prompt": tests.prompt, "code": code, "entry_point": tests.entry_point}
    asked = {
        "kind": tests.kind,
        "cases": list(tests.cases),
        "entry_point": tests.entry_point,
        "prompt": tests.prompt,
        "call_s": config.time_s,
        "stop_early": config.credit == "all",
    }
    result = sandbox.run_for(harness.program(solution, asked), config.sample_s)
    count = len(tests.cases)
    if result.ending != "finished":
        return Verdict(0, count, result.ending)
    report = harness.verdict(result.stdout) if result.exit_code == 0 else None
    if report is None:  # memory that the solution's values took from the tests, or forgery
        return Verdict(0, count, "runtime_error", result.stderr[-200:].decode(errors="replace"))
    if "broken" in report:
        raise ValueError(f"the tests of this row cannot run: {report['broken']}")
    return Verdict(report["passed"], count, str(report["outcome"]), str(report["text"]))
