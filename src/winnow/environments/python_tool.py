"""Tools that run Python programs of the policy in the sandbox of the recipe (`reward.sandbox`).

    code ─► files of a `Program` ─► bubblewrap, Landlock or a service ─► output, last error ─► text

A program prints, or ends with an expression, whose value is printed, too. `python` starts anew at
each call. `python_session` has the variables of a conversation's earlier programs: they run again
before each new one, without their output, so that a conversation which is resumed, or is replayed
by another process, goes on as it was. `random` is seeded for the same reason.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from winnow.errors import EnvironmentFault
from winnow.sandbox import current
from winnow.sandbox.program import Program, Result, SandboxError

if TYPE_CHECKING:
    from winnow.sandbox import Sandbox

_LAST_LINES = 10
"""Lines of the error output that the policy sees."""
_RUNNER = """
import ast, os, sys, types

names = []
while os.path.exists("program%d.py" % len(names)):
    names.append("program%d.py" % len(names))
sources = [open(name, encoding="utf-8").read() for name in names]
module = sys.modules["__main__"] = types.ModuleType("__main__")
if any("random" in source for source in sources):
    import random
    random.seed(0)


def run(name, source):
    body = ast.parse(source, name)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, name, "exec"), module.__dict__)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)
        if value is not None:
            print(repr(value))


outputs = [os.dup(1), os.dup(2)]
nothing = os.open("/dev/null", os.O_WRONLY)
os.dup2(nothing, 1), os.dup2(nothing, 2)
for name, source in zip(names[:-1], sources):
    try:
        run(name, source)
    except SystemExit:
        pass
sys.stdout.flush(), sys.stderr.flush()
os.dup2(outputs[0], 1), os.dup2(outputs[1], 2)
try:
    run(names[-1], sources[-1])
except Exception as error:
    import traceback
    trace = error.__traceback__
    while trace and not trace.tb_frame.f_code.co_filename.startswith("program"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.exit(1)
"""


class python:
    """The tool `python`: each program starts anew."""

    limits_its_time = True

    async def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints. Each program starts anew.

        Args:
            code: The program; if it ends with an expression, the value is printed.
        """
        return _describe(await _run([_source_of(code)]))


class python_session:
    """The tool `python_session`: variables remain for later programs of the conversation."""

    limits_its_time = True

    def __init__(self) -> None:
        self._earlier: list[str] = []

    async def __call__(self, code: str) -> str:
        """Run a Python program and return what it prints. Variables of earlier programs remain.

        Args:
            code: The program; if it ends with an expression, the value is printed.
        """
        source = _source_of(code)
        result = await _run([*self._earlier, source])
        if result.is_clean:
            self._earlier.append(source)
        return _describe(result)


def _source_of(code: object) -> str:
    """Return the text of a program, of which a call's parser may have made a number or a list."""
    return code if isinstance(code, str) else json.dumps(code)


async def _run(sources: Sequence[str]) -> Result:
    """Run programs one after the other; only the last one's output is kept.

    Raises:
        EnvironmentFault: the sandbox failed.
    """
    files = {
        f"program{number}.py": source.encode("utf-8", "replace")
        for number, source in enumerate(sources)
    }
    program, sandbox = Program(_RUNNER, files=files, compile_once=True), current()
    run = functools.partial(sandbox.run_for, program, sandbox.config.time_s)
    try:
        return await asyncio.get_running_loop().run_in_executor(_threads(sandbox), run)
    except SandboxError as error:
        raise EnvironmentFault(f"the sandbox failed: {error}") from error


@functools.cache
def _threads(sandbox: Sandbox) -> ThreadPoolExecutor:
    """Return threads that wait for the sandbox, one for each of its slots."""
    return ThreadPoolExecutor(sandbox.slots, "programs")


def _describe(result: Result) -> str:
    """Return the output of a program and the last lines of its errors."""
    limits = current().config
    parts = [result.stdout.decode(errors="replace").rstrip("\n")]
    parts += result.stderr.decode(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
    if result.ending == "time_limit":
        parts.append(f"error: the program did not finish within {limits.time_s:g} s")
    elif result.ending == "output_limit":
        parts.append(f"error: the program wrote more than {limits.output_kb} KiB")
    elif result.exit_code and not result.stderr:
        parts.append(f"error: the program ended with exit code {result.exit_code}")
    return "\n".join(part for part in parts if part) or "(no output)"
