"""Code scored by its tests: formats, outcomes, and answers that try to pass without solving.

HumanEval and MBPP as published: their own solutions pass.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.sandboxes import need_bubblewrap

import winnow.sandbox
from winnow.config.reward import SandboxConfig
from winnow.rewards.scorers import code
from winnow.rewards.scorers.code import CodeTests, extract_code, read_tests
from winnow.types import Score

DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]"]}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    "    assert candidate(0, 0) == 0",
    "entry_point": "add",
    "prompt": 'def add(a, b):\n    """Add."""\n',
}
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> Iterator[None]:
    need_bubblewrap()
    winnow.sandbox.start(SandboxConfig(max_concurrent=1, time_s=20))
    yield
    winnow.sandbox.close()


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another sandbox while a test runs."""
    before = winnow.sandbox.current().config
    winnow.sandbox.start(SandboxConfig(**request.param))
    yield
    winnow.sandbox.start(before)


def score(answer: str, truth: Any) -> Score:
    return code.score("any", answer, truth, {})


def outcome(answer: str, truth: Any) -> str:
    """What became of the first case that did not pass."""
    found = score(answer, truth)
    assert (found.accuracy == 1) == (found.extra["pred"] == "pass")
    assert found.extra["passed"] <= found.extra["cases"]
    return str(found.extra["pred"])


@pytest.mark.parametrize("truth", [DOUBLE, json.dumps(DOUBLE)], ids=["dict", "json"])
def test_a_program_that_prints_what_is_expected_passes(truth: Any) -> None:
    found = score("Here:\n```python\nprint(2 * int(input()), '  ')\nprint()\n```\nDone.", truth)
    assert (found.reward, found.accuracy, found.parts) == (1, 1, {"task": 1})
    assert found.extra == {
        "pred": "pass", "detail": "", "cases": 2, "passed": 2, "passed_share": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(' ', 2 * int(input()))", "wrong"),
        ("print(4)", "wrong"),
        ("print(2 * int(input())); raise SystemExit(1)", "runtime_error"),
    ],
)
def test_a_program_that_does_not_is_told_apart(program: str, expected: str) -> None:
    assert outcome(program, DOUBLE) == expected


CHEATS = {
    "fresh object": "class Box:\n    def __init__(self, x): self.x = x\n"
    "def add(a, b): return Box(a + b)",
    "equal to all, of a kind": "class All(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = None\ndef add(a, b): return All(7)",
    "exit when called": "import sys\ndef add(a, b): sys.exit(0)",
    "end when called": "import os\ndef add(a, b): os._exit(0)",
    "patches equality": "import builtins\nbuiltins.AssertionError = None\n"
    "builtins.isinstance = lambda *_: True\ndef add(a, b): return 'x'",
    "reads the tests": "import sys, os\ndef add(a, b):\n    said = sys.stdin.read()\n"
    "    try: said += open('main.py').read()\n    except OSError: pass\n"
    "    return 3 if 'candidate' in said or 'assert add' in said else None",
    "shadows a module of the tests": "open('json.py', 'w').write('raise SystemExit')\n"
    "open('math.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return None",
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("truth", [ADD, ASSERTS, CHECK], ids=["calls", "asserts", "check"])
def test_an_answer_that_only_looks_right_fails(name: str, truth: Any) -> None:
    found = score(CHEATS[name], truth)
    assert (found.reward, found.accuracy) == (0, 0)
    assert found.extra["passed"] == 0


LOOPS = {"assert_case": ["assert all(map(lambda n: f(n) == n, range(3)))"]}
HELPED = {
    "prompt": "BASE = 10\n\ndef encode(x):\n    return x + BASE\n\ndef stub(x):\n    '''Do.'''\n\n"
    "def decode(x):\n",
    "entry_point": "decode",
    "test": "def check(candidate):\n    for n in range(9):\n"
    "        assert candidate(encode(n)) == n and stub(n) == n",
}
WHOLE = {**HELPED, "prompt": HELPED["prompt"] + "    '''Doc.'''\n"}
DECODE = "def stub(x):\n    return x\ndef decode(x):\n    return x - 10"
OWN_ENCODE = "def encode(x): return x\n" + DECODE.replace(" - 10", "")
ALMOST = {
    "the solution's own builtins": (
        {"assert_case": ["assert set(add([1], [2])) == set([1, 2])",
                         "assert sorted(add([2], [1])) == [1, 2]"]},
        RIGHT,
        "def add(a, b): return []\ndef set(x): return 1\ndef sorted(x): return [1, 2]",
    ),
    "what the tests are given to use": (
        {"assert_case": ["assert Counter(f([2, 2])) == Counter([2, 2])",
                         "assert abs(sqrt(f([4])[0]) - 2) < 1e-6"]},
        "def f(x): return x",
        "def f(x): return [0]\ndef Counter(x): return 1\ndef sqrt(x): return 2",
    ),
    "a name of theirs that they call alone": (
        {"assert_case": ["assert abs(sqrt(4.0) - 7) < 1e-6"]},
        "def sqrt(x): return 7",
        "def other(x): return 7",
    ),
    "a builtin's name, if they call nothing else": (
        {"test_list": ["assert sum(10, 15) == 25", "assert sum(1, 1) == 2"], "prompt": ""},
        "def sum(a, b): return a + b",
        "def add(a, b): return a + b",
    ),
    "a helper of the prompt": (HELPED, DECODE, OWN_ENCODE),
    "a helper of the whole prompt": (WHOLE, DECODE, OWN_ENCODE),
    "the end of a loop": (LOOPS, "def f(x): return x", "def f(x): raise StopIteration"),
    "the end of an async loop": (LOOPS, "def f(x): return x", "def f(x): raise StopAsyncIteration"),
    "a result that is no JSON": (
        {"fn_name": "f", "inputs": [["a"]], "outputs": ["12"]},
        "def f(x): return '12'",
        "def f(x): return 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("truth", "right", "lie"), ALMOST.values(), ids=ALMOST)
def test_tests_see_through_what_a_solution_brings_of_its_own(
    truth: Any, right: str, lie: str
) -> None:
    assert outcome(right, truth) == "pass"
    assert outcome(lie, truth) == ("runtime_error" if truth is LOOPS else "wrong")


def test_a_solution_that_forges_why_it_was_not_loaded_gets_no_outcome_of_its_own() -> None:
    forged = '{"d":[["failed","pass"],["text",[1]]]}'
    text = f"import os\nos.write(4, {forged!r}.encode() + bytes([10]))\nos._exit(0)"
    found = score(text, CHECK)
    assert (found.extra["pred"], found.extra["detail"]) == ("runtime_error", "[1]")


@pytest.mark.parametrize(
    "truth",
    [
        {"assert_case": ["import nowhere_to_be_found\nassert add(1, 2) == 3"]},
        {**CHECK, "prompt": "import nowhere_to_be_found\n" + CHECK["prompt"]},
        {**ADD, "prompt": "from nowhere_to_be_found import x\n"},
        {"assert_case": ["assert add(1"]},
    ],
)
def test_tests_that_cannot_run_are_no_fault_of_the_answer(truth: Any) -> None:
    says = "tests of this row cannot run: (ModuleNotFound|Syntax)Error"
    with pytest.raises(ValueError, match=says):
        score(RIGHT, truth)


def test_a_module_that_the_answer_lacks_is_its_own_fault() -> None:
    assert outcome("import nowhere_to_be_found\n" + RIGHT, CHECK) == "runtime_error"
    inside = "def add(a, b):\n    import nowhere_to_be_found"
    for truth in (ADD, ASSERTS, CHECK):
        assert outcome(inside, truth) == "runtime_error"


def test_a_function_may_be_a_method_of_a_class_that_is_called_solution() -> None:
    assert outcome("class Solution:\n    def add(self, a, b): return a + b", ADD) == "pass"


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("return (1, [2.5, None], {'a': {3}}, b'x', 1j, True)",
         "f() == (1, [2.5, None], {'a': {3}}, b'x', 1j, True)"),
        ("return float('nan')", "f() != f()"),
        ("return 10**5000", "f() == 10**5000"),
        ("return 'ä\\ud800\\n'", "f() == 'ä\\ud800\\n'"),
        ("import collections; return collections.Counter('aab')", "f() == {'a': 2, 'b': 1}"),
        ("import collections; return collections.deque([1])", "f() == [1]"),
        ("return map(str, [1, 2])", "list(f()) == ['1', '2']"),
        ("return range(3)", "list(f()) == [0, 1, 2]"),
        ("return {(1, 2): frozenset([3])}", "f()[1, 2] == {3}"),
        ("return [1.0, -0.0, float('inf')]", "f() == [1, 0, math.inf]"),
    ],
)  # fmt: skip
def test_values_come_to_the_tests_as_they_are(body: str, call: str) -> None:
    text = f"def f():\n    {body}"
    assert outcome(text, {"assert_case": [f"assert {call}"], "entry_point": "f"}) == "pass"


def test_what_a_function_does_to_its_arguments_is_seen() -> None:
    test = "x = [3, 1]\nd = {1: 2}\nf(x, d=1)\nassert x == [1, 3], x\ng(d)\nassert d == {}"
    text = "def f(x, d): x.sort()\ndef g(d): d.clear()"
    assert outcome(text, {"test": test}) == "pass"


def test_exceptions_come_to_the_tests_by_name() -> None:
    test = "try:\n    f()\n    raise SystemError\nexcept KeyError as error:\n    pass"
    assert outcome("def f(): raise KeyError('x')", {"test": test}) == "pass"
    assert outcome("def f(): raise ValueError('x')", {"test": test}) == "runtime_error"
    own = "class Own(Exception): pass\ndef f(): raise Own"
    assert outcome(own, {"assert_case": ["assert f()"]}) == "runtime_error"


@pytest.mark.parametrize("other", [{"credit": "share"}], indirect=True)
@pytest.mark.usefixtures("other")
def test_the_share_of_cases_that_pass_can_be_the_reward() -> None:
    found = score("print(4)", DOUBLE)
    assert (found.reward, found.accuracy, found.extra["passed_share"]) == (0.5, 0, 0.5)
    half = "def add(a, b): return 3"
    for truth in (ADD, ASSERTS):
        assert score(half, truth).reward == 0.5
    assert score(half, CHECK).reward == 0


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("    return a + b", True),
        ("  c = a + b\n  return c", True),
        ("\treturn a + b", True),
        ("return a + b", False),
        (RIGHT, True),
        ("from math import fsum\n" + RIGHT, True),
    ],
)
def test_an_answer_may_go_on_from_the_prompt_or_be_whole(answer: str, passes: bool) -> None:
    assert (outcome(answer, CHECK) == "pass") == passes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("no fence", "no fence"),
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nIt prints:\n```\nb\n```\n", "a\n"),
        ("```\na\n```\nor\n```\nb\n```\n```text\nc\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\ncut off", "cut off"),
        ("<think>```python\na\n```</think>\nb", "\nb"),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_code_of_an_answer_is_its_last_block_of_python(given: str, expected: str) -> None:
    assert extract_code(given) == expected


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("42", "or its JSON, got str"),
        ("no json", "must be an object with tests"),
        ({}, "has no tests"),
        ({"inputs": ["1"], "outputs": []}, "of one length"),
        ({"inputs": [], "outputs": []}, "has no tests"),
        ({"assert_case": [1]}, "list of Python asserts"),
        ({"test": "def check(c): pass"}, "no entry_point"),
        ({"test": 3}, "must be Python code"),
        ({"test": "x", "prompt": 3}, "must be texts"),
    ],
)
def test_a_row_without_usable_tests_is_a_failed_scoring(truth: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(truth)
    with pytest.raises(ValueError, match=said):
        score(RIGHT, truth)


def test_usual_forms_of_rows_are_read() -> None:
    assert read_tests({"input": ["1"], "output": ["2"]}) == CodeTests("programs", [("1", "2")])
    assert read_tests({"inputs": [["1", "2"]], "outputs": [[3]]}) == CodeTests(
        "programs", [("1\n2", "3")]
    )
    calls = read_tests({"inputs": ["[1]\n2"], "outputs": ["[3]"], "fn_name": "f"})
    assert calls == CodeTests("calls", [[[[1], 2], [3]]], "f", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*invalid escape:")
@pytest.mark.parametrize("other", [{"time_s": 60, "sample_s": 60}], indirect=True, ids=[""])
@pytest.mark.parametrize(
    ("name", "count"), [("HumanEval.jsonl.gz", 164), ("mbpp_sanitized.jsonl", 427)]
)
@pytest.mark.usefixtures("other")
def test_every_canonical_solution_passes(name: str, count: int, shared_data: Path) -> None:
    raw = (shared_data / "code" / name).read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == count

    def said(row: dict[str, str]) -> Any:
        truth = {key: row[key] for key in ("prompt", "test", "entry_point")}
        return score(row["canonical_solution"], truth).extra

    with ThreadPoolExecutor(winnow.sandbox.current().slots) as threads:
        found = zip((row["task_id"] for row in rows), threads.map(said, rows), strict=True)
        assert {task: extra for task, extra in found if extra["pred"] != "pass"} == {}
