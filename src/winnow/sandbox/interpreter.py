"""The Python that runs the programs, and where its parts lie."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from winnow.sandbox.process import ENVIRONMENT
from winnow.sandbox.program import SandboxError

_ASK = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, "
    "sys.base_exec_prefix, *sys.version_info[:2]]))"
)
_COMPILE = (
    "import marshal, sys; read = sys.stdin.buffer.read; "
    "sys.stdout.buffer.write(marshal.dumps(compile(read(), 'main.py', 'exec')))"
)
_OLDEST = (3, 8)
_ASK_S = 30.0


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the folders that it needs."""

    path: str
    folders_outside_usr: tuple[str, ...]


def compiled(python: str, code: str) -> bytes:
    """Code of our own as an interpreter loads it with `marshal`; it is not run.

    Raises:
        SandboxError: it cannot be compiled.
    """
    try:
        return subprocess.run(
            [python, "-I", "-S", "-c", _COMPILE],
            input=code.encode(),
            env=dict(ENVIRONMENT),
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{python} compiles nothing ({type(error).__name__})") from error


def find_interpreter(path: str) -> Interpreter:
    """Ask an interpreter for its parts.

    Raises:
        SandboxError: it is missing, is no Python, or is too old.
    """
    where = f"reward.sandbox.python is {path}"
    file = os.path.expanduser(path)
    if not os.path.isabs(file) or not os.access(file, os.X_OK) or os.path.isdir(file):
        raise SandboxError(f"{where}: no such program; give the absolute path of a Python")
    try:
        told = subprocess.run(
            [file, "-I", "-c", _ASK],
            env=dict(ENVIRONMENT),
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        ).stdout
        executable, prefix, base, base_exec, major, minor = json.loads(told)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"{where}: no Python ({type(error).__name__})") from error
    if (major, minor) < _OLDEST:
        raise SandboxError(f"{where}: Python {major}.{minor}, but 3.8 is the oldest that will do")
    real = os.path.realpath(executable)
    needed = {prefix, base, base_exec, os.path.dirname(executable), os.path.dirname(real)}
    outside = {os.path.abspath(folder) for folder in needed if not _is_below(folder, "/usr")}
    outside -= {"/bin"}  # a link into /usr, or bound as it is
    if "/" in outside:
        raise SandboxError(f"{where}: its library lies in /; give one of /usr or of its own folder")
    tops = [f for f in outside if not any(f != other and _is_below(f, other) for other in outside)]
    return Interpreter(executable, tuple(sorted(tops)))


def _is_below(folder: str, top: str) -> bool:
    return os.path.commonpath([os.path.abspath(folder), top]) == top
