"""HumanEval and MBPP as published: what solves them passes, what only looks like it does not."""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.sandboxes import need_bubblewrap, served

import winnow.sandbox
from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.rewards.scorers import code

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*invalid escape:"),
]

Problem = dict[str, str]
FILES = {"HumanEval": ("HumanEval.jsonl.gz", 164), "MBPP": ("mbpp_sanitized.jsonl", 427)}
FRESH = "class Fresh:\n    def __init__(self, value):\n        self.value = value\n\n"


EVERY = {"local": 1, "fusion": 25}
"""All problems in the local sandbox; of those that go over a socket, one in so many."""


@pytest.fixture(scope="module", params=EVERY)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    need_bubblewrap()
    kind = str(request.param)
    local = SandboxConfig(time_s=60, sample_s=60)
    with ExitStack() as stack:
        config: SandboxConfig | FusionConfig = local
        if kind == "fusion":
            url, _ = stack.enter_context(served(local.model_copy(update={"memory_mb": 1024})))
            config = FusionConfig(url=url, max_concurrent=4, time_s=60, sample_s=60)
        winnow.sandbox.start(config)
        stack.callback(winnow.sandbox.close)
        yield kind


@pytest.fixture(scope="module", params=FILES)
def problems(request: pytest.FixtureRequest, kind: str, shared_data: Path) -> list[Problem]:
    name, count = FILES[request.param]
    raw = (shared_data / "code" / name).read_bytes()
    text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == count
    return rows[:: EVERY[kind]]


def truth(problem: Problem) -> dict[str, str]:
    return {key: problem[key] for key in ("prompt", "test", "entry_point")}


def outcomes(problems: list[Problem], answer: Callable[[Problem], str]) -> dict[str, Any]:
    """Score an answer to each; what did not pass, and what did."""
    with ThreadPoolExecutor(winnow.sandbox.current().slots) as threads:
        scores = threads.map(
            lambda p: code.score("humaneval", answer(p), truth(p), {}).extra, problems
        )
        said = dict(zip((p["task_id"] for p in problems), scores, strict=True))
    assert len(said) == len(problems)
    return {task: extra for task, extra in said.items() if extra["pred"] != "pass"}


def whole(problem: Problem) -> ast.Module:
    """Prompt and canonical solution as one piece of code, the prompt's docstring dropped."""
    prompt = ast.parse(problem["prompt"])
    function = prompt.body[-1]
    assert isinstance(function, ast.FunctionDef)
    docstring = function.body[0]
    lines = problem["prompt"].splitlines(keepends=True)
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    return ast.parse("".join(lines) + problem["canonical_solution"])


def asked(problem: Problem, tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions that the tests call."""
    names = {problem["entry_point"].strip(), *re.findall(r"\w+", problem["test"])}
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert found
    return found


def returning_none(problem: Problem) -> str:
    """Each function that is tested does nothing but return None."""
    tree = whole(problem)
    for function in asked(problem, tree):
        function.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(ast.fix_missing_locations(tree))


def wrapping(problem: Problem) -> str:
    """Each function that is tested returns its result in an object of its own."""
    tree = whole(problem)
    wrapped = [
        f"def {f.name}(*args, _function={f.name}, **kwargs):\n"
        "    return Fresh(_function(*args, **kwargs))\n"
        for f in asked(problem, tree)
    ]
    return "\n".join([FRESH, ast.unparse(tree), *wrapped])


def test_every_canonical_solution_passes(problems: list[Problem]) -> None:
    failed = outcomes(problems, lambda p: p["canonical_solution"])
    assert failed == {}


@pytest.mark.parametrize("mutant", [returning_none, wrapping])
def test_every_mechanical_mutant_fails(
    problems: list[Problem], mutant: Callable[[Problem], str]
) -> None:
    failed = outcomes(problems, mutant)
    assert {p["task_id"] for p in problems} - failed.keys() == set()
    assert {extra["pred"] for extra in failed.values()} <= {"wrong", "runtime_error"}
