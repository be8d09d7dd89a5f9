"""The tools `python` and `python_session`: programs of a policy in a real sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.sandboxes import need_bubblewrap, served

from winnow.config.environment import ToolsEnvironment, host_arguments
from winnow.config.load import load_recipe
from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.environments import ToolCall, Turn
from winnow.environments.pool import EnvironmentPool, start_pools
from winnow.errors import ConfigError
from winnow.rewards.task import PoolLimits
from winnow.types import Prompt

LIMITS = {"time_s": 2.0, "output_kb": 64}
ROW = Prompt("0", np.array([1]), "", "x", 0)
TOOLS = ToolsEnvironment(tools=("python", "python_session"), output_chars=300)
ATTACK = """
import os, socket

def attempt(call, *values):
    try:
        return call(*values)
    except OSError:
        return None

print([attempt(open, "%s"), attempt(open, "/etc/passwd"), attempt(socket.socket),
       attempt(os.kill, os.getppid(), 9), attempt(os.listdir, "/proc"), os.environ.get("SECRET")])
"""


def make(sandbox: SandboxConfig | FusionConfig) -> EnvironmentPool:
    limits = PoolLimits(1, 60.0, 2048, "environment", "environment", "reply")
    return EnvironmentPool(start_pools(limits, host_arguments(TOOLS, sandbox, 1)))


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    need_bubblewrap()
    os.environ["SECRET"] = "s"
    with closing(make(SandboxConfig(**LIMITS))) as pool:
        yield pool
    del os.environ["SECRET"]


def ask(pool: EnvironmentPool, tool: str, conversation: int, programs: Sequence[str]) -> list[str]:
    """Return the outputs that the last programs of a conversation get, one at least."""
    turns = [Turn("", (ToolCall(tool, {"code": program}),)) for program in programs]
    steps = asyncio.run(pool.step(conversation, ROW, turns))
    return [message["content"] for step in steps for message in step.observation]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print('a')\nx = 6\nx * 7", "a\n42"),
        ("x = 1", "(no output)"),
        (12, "12"),
        (
            "input()",
            'Traceback (most recent call last):\n  File "program0.py", line 1, in <module>',
        ),
        ("print(1", "SyntaxError: '(' was never closed"),
        ("import time; print('a', flush=True); time.sleep(9)", "within 2 s"),
        ("print('x' * 100_000)", "error: the program wrote more than 64 KiB"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import os; os._exit(3)", "error: the program ended with exit code 3"),
        ("print('a' * 200); print('b' * 200)", f"{'a' * 150}\n… (cut) …\n{'b' * 150}"),
    ],
)
def test_output_last_value_errors_and_limits_are_the_policys(pool, program, text):
    assert text in ask(pool, "python", 1, [program])[0]


def test_a_session_has_the_variables_of_programs_that_succeeded_and_is_replayed(pool):
    programs = ["import random\nx = random.random()\nprint('first')", "x = 0\n1 / 0", "x"]
    before = [ask(pool, "python_session", 2, programs[: n + 1])[-1] for n in range(3)]
    assert (before[0], before[1].splitlines()[-1]) == (
        "first",
        "ZeroDivisionError: division by zero",
    )
    assert 0 < float(before[2]) < 1
    pool.close_conversation(2)
    assert ask(pool, "python_session", 2, programs) == before
    assert "NameError" in ask(pool, "python", 3, [programs[0], "x"])[-1]


def test_a_hostile_program_reaches_no_file_process_network_or_variable_of_ours(
    pool, tmp_path: Path
):
    secret = tmp_path / "secret"
    secret.write_text("s")
    assert ask(pool, "python", 4, [ATTACK % secret]) == ["[None, None, None, None, None, None]"]
    assert ask(pool, "python", 4, ["1", "6 * 7"])[-1] == "42"


def test_programs_run_at_a_service():
    with served(SandboxConfig(**LIMITS)) as (url, _):
        sandbox = FusionConfig(url=url, **LIMITS, sample_s=2, memory_mb=512)
        with closing(make(sandbox)) as pool:
            assert ask(pool, "python_session", 1, ["x = 6", "x * 7"]) == ["(no output)", "42"]


def test_a_tool_of_no_place_or_of_a_name_taken_is_refused_in_one_line():
    for tools, line in (
        (["pyton"], r"environment.tools.*must be FILE.py:NAME, .* python or python_session"),
        (["python", "mine.py:python"], "environment.tools has python twice; rename"),
    ):
        with pytest.raises(ConfigError, match=line):
            load_recipe("gsm8k", ["environment=tools", f"environment.tools=[{','.join(tools)}]"])


def test_without_a_sandbox_the_start_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^[^\n]*reward.sandbox.python[^\n]*$"):
        make(SandboxConfig(python="/none/python3"))
