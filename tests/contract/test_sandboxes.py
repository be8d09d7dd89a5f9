"""What every sandbox keeps: code scored in the local one, and by a server over a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from tests.sandboxes import need_bubblewrap, served

import winnow.sandbox
from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.rewards.scorers import code
from winnow.sandbox.program import Program, SandboxError
from winnow.types import Score

LOCAL = SandboxConfig(max_concurrent=2, time_s=20)
DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    "    assert candidate(0, 0) == 0",
    "entry_point": "add",
    "prompt": 'def add(a, b):\n    """Add."""\n',
}
FUNCTIONS = {"calls": ADD, "asserts": ASSERTS, "check": CHECK}
RIGHT = "def add(a, b):\n    return a + b\n"


each_function = pytest.mark.parametrize(
    ("start", "kind"),
    [*(("local", kind) for kind in FUNCTIONS), ("fusion", "calls")],
    indirect=["start"],
)
"""How functions are called is the harness's, which each sandbox runs alike."""


@pytest.fixture(scope="module", params=["local", "fusion"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Starts the run's sandbox of a kind, with other settings if they are given."""
    need_bubblewrap()
    with ExitStack() as stack:
        config: SandboxConfig | FusionConfig = LOCAL
        if request.param == "fusion":
            server = SandboxConfig(max_concurrent=2, memory_mb=1024, time_s=30)
            url, _ = stack.enter_context(served(server))
            config = FusionConfig(url=url, max_concurrent=2, time_s=20)
        stack.callback(winnow.sandbox.close)
        yield lambda **changes: winnow.sandbox.start(config.model_copy(update=changes))


@pytest.fixture(autouse=True)
def _sandbox(start: Callable[..., None]) -> None:
    start()


def score(answer: str, truth: Any) -> Score:
    return code.score("any", answer, truth, {})


@pytest.mark.parametrize(
    ("program", "outcome", "passed"),
    [
        ("print(2 * int(input()))", "pass", 2),
        ("print(2 * int(input()) + 1)", "wrong", 0),
        ("raise ValueError('ä')", "runtime_error", 0),
        ("print(2 * int(input())); raise SystemExit(1)", "runtime_error", 0),
        ("import os, signal; print(4, flush=True); os.abort()", "runtime_error", 0),
        ("print(", "compile_error", 0),
        ("", "compile_error", 0),
        ("  x = 1\n y = 2", "compile_error", 0),
        ("x = '\ud800'", "compile_error", 0),
        ("while True: print('x' * 1000)", "output_limit", 0),
        ("bytearray(1 << 40)", "runtime_error", 0),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "wrong", 0),
    ],
)
def test_programs_are_told_apart(program: str, outcome: str, passed: int) -> None:
    found = score(program, DOUBLE)
    assert (found.extra["pred"], found.extra["passed"]) == (outcome, passed)
    assert found.accuracy == (outcome == "pass")


@each_function
@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (f"```python\n{RIGHT}```", "pass"),
        ("def add(a, b): return None", "wrong"),
        ("def add(a, b): return open('main.py')", "wrong"),
        ("class All:\n    __eq__ = lambda *_: True\ndef add(a, b): return All()", "wrong"),
        ("import os\nos._exit(0)", "runtime_error"),
        ("def add(a, b): raise AssertionError", "runtime_error"),
        ("def add(a, b: return", "compile_error"),
    ],
)
def test_functions_are_told_apart(kind: str, answer: str, outcome: str) -> None:
    found = score(answer, FUNCTIONS[kind])
    assert (found.extra["pred"], found.accuracy) == (outcome, outcome == "pass")


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getppid(), 9)"])
@each_function
def test_a_verdict_cannot_be_forged(kind: str, end: str) -> None:
    forgery = (
        "import os\ndef add(a, b):\n    for n in range(64):\n        try:\n"
        '            os.write(n, b\'{"d":[["passed",2],["of",2],["outcome","pass"],\'\n'
        '                        b\'["text",""]]}\\n\')\n'
        f"        except OSError: pass\n    {end}"
    )
    found = score(forgery, FUNCTIONS[kind])
    assert (found.reward, found.extra["passed"]) == (0, 0)


def test_endless_programs_and_calls_end_at_their_time(start: Callable[..., None]) -> None:
    start(time_s=2.5, sample_s=9.0, credit="share")
    program = "x = int(input())\nwhile x == 2: pass\nprint(2 * x)"
    found = score(program, DOUBLE)
    assert (found.extra["pred"], found.extra["passed"], found.reward) == ("time_limit", 1, 0.5)
    found = score("def add(a, b):\n    while a == 1: pass", ADD)
    assert (found.extra["pred"], found.reward) == ("time_limit", 0)


def test_cases_beyond_the_time_of_a_sample_are_not_passed(start: Callable[..., None]) -> None:
    start(sample_s=5.0, credit="share")
    slow = "import time; time.sleep(2.7); print(2 * int(input()))"
    found = score(slow, {"inputs": ["1"] * 4, "outputs": ["2"] * 4})
    assert (found.extra["pred"], found.extra["passed"]) == ("time_limit", 1)


def test_files_and_bytes_reach_a_program_as_they_are() -> None:
    program = (
        "import sys\nsys.stdout.buffer.write(open('a/b', 'rb').read())\n"
        "sys.stderr.write(sys.stdin.read())"
    )
    data = bytes(range(128)) * 2000
    result = winnow.sandbox.current().run_for(Program(program, "ä€\n".encode(), {"a/b": data}), 20)
    assert (result.stdout, result.stderr) == (data, "ä€\n".encode())
    assert result.is_clean
    assert result.seconds > 0


def test_many_answers_at_once_do_not_mix() -> None:
    with ThreadPoolExecutor(8) as threads:
        truths = [{"inputs": [f"{n}"], "outputs": [f"{2 * n}"]} for n in range(16)]
        found = threads.map(lambda t: score("print(2 * int(input()))", t).accuracy, truths)
        assert list(found) == [1.0] * 16


def test_a_sandbox_that_is_closed_is_no_fault_of_the_answer(start: Callable[..., None]) -> None:
    sandbox = winnow.sandbox.current()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(sandbox.run_for, Program("import time; time.sleep(60)"), 4)
        running2 = threads.submit(sandbox.run_for, Program("print(1)"), 4)
        winnow.sandbox.close()
        for each in (running, running2):
            with pytest.raises(SandboxError):
                each.result(30)
    start()
    assert score(RIGHT, ADD).accuracy == 1
