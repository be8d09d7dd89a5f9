"""Tests a solution by calling it, inside the sandbox.

    standard input: length, solution, tests (JSON)  ─►  a verdict (JSON) on standard output

The solution runs in a process of its own, and the tests in another, which calls it over a pipe:
values go there and come back as plain data. So a solution can neither read the tests nor reach
what writes the verdict: `sys.exit(0)`, an object that equals everything, a patched builtin or a
forged output pass nothing.

The modules of this package go into the sandbox as one file, since Winnow is not there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from winnow.sandbox.harness.values import decode
from winnow.sandbox.program import Program

_OWN_IMPORT = re.compile(
    r"^from (?:winnow\S*|__future__) import (?:\([^)]*\)|[^\n]*)\n", re.MULTILINE
)
_PARTS = ("values", "solution", "tests")


def _joined() -> str:
    folder = Path(__file__).parent
    texts = [folder.joinpath(f"{part}.py").read_text(encoding="utf-8") for part in _PARTS]
    joined = "\n".join(_OWN_IMPORT.sub("", text) for text in texts)
    return f"from __future__ import annotations\n{joined}\nmain()\n"


_MAIN = _joined()


def program(solution: dict[str, Any], tests: dict[str, Any]) -> Program:
    """Make the program that tests a solution.

    Args:
        solution: `code`, `prompt` (code that it goes on from), `entry_point` or None.
        tests: `kind` (calls, asserts, check), `cases`, `entry_point`, `prompt`, `call_s`
            (seconds a call), `stop_early` (at the first case that does not pass).
    """
    first = json.dumps(solution).encode()
    stdin = b"%010d" % len(first) + first + json.dumps(tests).encode()
    return Program(_MAIN, stdin, is_ours=True)


def verdict(stdout: bytes) -> dict[str, Any] | None:
    """`passed`, `of`, `outcome` and `text`, or `broken` for tests that cannot run.

    None: there is no verdict, the tests' process came to grief.
    """
    try:
        report = decode(json.loads(stdout))
    except ValueError:
        return None
    return report if isinstance(report, dict) else None
