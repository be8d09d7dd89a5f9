"""Requests to the SandboxFusion server: their fields, and the programs that answer them.

    {code, language, stdin, run_timeout, memory_limit_MB, files, fetch_files}  ─►  Program, Limits

Python is run as it is; bash, and whatever leaves files to be fetched, by a few lines of Python
before it. Those lines run as the program's own user and say nothing that the program could not
say itself, so that nothing rests on them.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winnow.http.service import Refusal
from winnow.sandbox.program import Limits, Program, Result

LANGUAGES = ("python", "bash")
_DEFAULT_S = 10.0
_MOST_FILES = 32
_MIB = 1 << 20
_TYPES: Mapping[str, tuple[type, ...]] = {
    "code": (str,),
    "language": (str,),
    "stdin": (str, type(None)),
    "compile_timeout": (int, float, type(None)),
    "run_timeout": (int, float, type(None)),
    "memory_limit_MB": (int, float, type(None)),
    "files": (dict, type(None)),
    "fetch_files": (list, type(None)),
}
_NAMES = {str: "a text", int: "a number", dict: "an object", list: "a list"}

# Runs COMMAND; afterwards its files go out behind MARK, at the end of standard output.
_FETCH = """
import json, os, sys
child = os.fork()
if child == 0:
    os.execv(COMMAND[0], COMMAND)
status = os.waitpid(child, 0)[1]
import base64
found = {}
for name in FETCH:
    try:
        with open(name, "rb") as file:
            found[name] = base64.b64encode(file.read()).decode()
    except OSError:
        pass
sys.stdout.write(MARK + json.dumps(found))
sys.stdout.flush()
os._exit(status >> 8 if status & 127 == 0 else 128 + (status & 127))
"""


@dataclass(frozen=True)
class Job:
    """A request that can be run."""

    program: Program
    limits: Limits
    fetch: Sequence[str]
    """Files whose contents the reply holds."""
    mark: bytes | None
    """Text before these files in the output; None where none are asked for."""


def job_of(given: Any, most: Limits) -> Job:
    """Return the job that a request asks for.

    Args:
        most: the server's limits; a request that asks for more is refused, since cutting it down
            would make the server's limit look like the program's fault.

    Raises:
        Refusal: a field is missing or wrong; the line names it, and its value.
    """
    if not isinstance(given, Mapping):
        raise Refusal(422, "the body must be a JSON object with code and language")
    for name, types in _TYPES.items():
        value = given.get(name, "" if name in ("code", "language") else None)
        if not isinstance(value, types) or isinstance(value, bool):
            raise Refusal(422, f"{name} must be {_NAMES[types[0]]}, got {_shown(value)}")
    if "code" not in given:
        raise Refusal(422, "code is missing; it must be a text")
    language = given.get("language", "python")
    if language not in LANGUAGES:
        raise Refusal(422, f"language must be {' or '.join(LANGUAGES)}, got {_shown(language)}")
    files = _files(given.get("files") or {})
    fetch = _fetched(given.get("fetch_files") or [])
    stdin = (given.get("stdin") or "").encode("utf-8", "surrogatepass")
    program, mark = _program(given["code"], language, stdin, files, fetch)
    return Job(program, _limits(given, most), fetch, mark)


def response_of(result: Result, job: Job) -> dict[str, Any]:
    """Return the reply to a request whose program has run, in SandboxFusion's words."""
    out, files = result.stdout, {}
    if job.mark is not None and result.ending == "finished":
        out, mark, said = result.stdout.rpartition(job.mark)
        if mark:
            files = _told_files(said, job.fetch)
        else:
            out = result.stdout
    run: dict[str, Any] = {
        "status": "TimeLimitExceeded" if result.ending == "time_limit" else "Finished",
        "execution_time": result.seconds,
        "return_code": None if result.ending == "time_limit" else result.exit_code,
        "stdout": out.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
    }
    return {
        "status": "Success" if result.is_clean else "Failed",
        "message": "" if result.ending in ("finished", "time_limit") else result.ending,
        "compile_result": None,
        "run_result": run,
        "files": files,
    }


def sandbox_failed(message: str) -> dict[str, Any]:
    """Return the reply to a request where the sandbox itself failed."""
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "files": {},
    }


def _limits(given: Mapping[str, Any], most: Limits) -> Limits:
    time_s = given.get("run_timeout")
    time_s = min(_DEFAULT_S, most.time_s) if time_s is None else time_s
    if not 0 < time_s <= most.time_s:
        raise Refusal(
            422,
            f"run_timeout must lie in (0, {most.time_s:g}] seconds here, got {_shown(time_s)}; "
            "--max-time-s of the server is the limit",
        )
    asked = given.get("memory_limit_MB")
    if asked is None or asked == -1:  # SandboxFusion's word for no wish
        return replace(most, time_s=float(time_s))
    most_mb = most.memory_bytes // _MIB
    if not 64 <= asked <= most_mb:
        raise Refusal(
            422,
            f"memory_limit_MB must lie in [64, {most_mb}] here, got {_shown(asked)}; "
            "--memory-mb of the server is the limit",
        )
    return replace(most, time_s=float(time_s), memory_bytes=int(asked) * _MIB)


def _files(given: Mapping[str, Any]) -> dict[str, bytes]:
    if len(given) > _MOST_FILES:
        raise Refusal(422, f"files must be at most {_MOST_FILES}, got {len(given)}")
    files = {}
    for name, text in given.items():
        if text is None:  # SandboxFusion's clients send it for no file
            continue
        try:
            files[name] = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise Refusal(422, f"files[{_shown(name)}] must be a text in base64") from None
    return files


def _fetched(given: list[Any]) -> list[str]:
    if len(given) > _MOST_FILES:
        raise Refusal(422, f"fetch_files must be at most {_MOST_FILES}, got {len(given)}")
    for name in given:
        if not isinstance(name, str):
            raise Refusal(422, f"fetch_files must hold names of files, got {_shown(name)}")
    try:
        Program("", files=dict.fromkeys(given, b""))
    except ValueError as error:
        raise Refusal(422, f"fetch_files: {error}") from None
    return given


def _program(
    code: str, language: str, stdin: bytes, files: Mapping[str, bytes], fetch: list[str]
) -> tuple[Program, bytes | None]:
    own: dict[str, bytes] = {}
    command = ["/bin/bash", "script.sh"]
    mark = None
    if language == "bash":
        own["script.sh"] = code.encode("utf-8", "surrogatepass")
        code = f"import os\nos.execv({command[0]!r}, {command!r})\n"
    if fetch:
        if language == "python":
            own["program.py"] = code.encode("utf-8", "surrogatepass")
        words = "[sys.executable, '-s', 'program.py']" if language == "python" else repr(command)
        text = f"\n--- files {secrets.token_hex(16)}\n"
        mark = text.encode()
        code = f"import sys\nCOMMAND, FETCH, MARK = {words}, {fetch!r}, {text!r}\n{_FETCH}"
    taken = own.keys() & files.keys()
    if taken:
        raise Refusal(422, f"files must not hold {min(taken)}, the program's own text")
    try:
        return Program(code, stdin, {**files, **own}), mark
    except ValueError as error:
        raise Refusal(422, f"files: {error}") from None


def _told_files(said: bytes, asked: Sequence[str]) -> dict[str, str]:
    """Files as the program's own user tells them: texts by the names asked for."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    texts = {name: found[name] for name in asked if isinstance(found.get(name), str)}
    return {name: text for name, text in texts.items() if text.isascii()}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
