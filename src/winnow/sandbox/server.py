"""An HTTP service that speaks SandboxFusion's API over the local sandbox.

    POST /run_code   runs a program        GET /health   says how busy the server is

    {code, language, stdin, run_timeout, memory_limit_MB, files, fetch_files}  ─►  Program, Limits

Python is run as it is; bash, and what leaves files to be fetched, by a few lines of Python before
it. Those lines run as the program's own user and say nothing that the program could not say itself,
so that nothing rests on them.

Beyond the refusals of `winnow.http.service` a request may have wrong fields (422), or find no free
slot of the sandbox in time (503). So what a stranger can make the server hold is a place in the
queue, with one body of `max_body_bytes`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.requests import Request

from winnow.config.reward import SandboxConfig
from winnow.http import first_fault
from winnow.http.service import JsonService, Refusal
from winnow.sandbox.fusion import RunAnswer, RunResult
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.program import Program, Result, SandboxError

_DEFAULT_S = 10.0
_LEAST_MB = 64
_MOST_FILES = 32
_FILES_PER_PROGRAM = 8
"""Descriptors that a running program costs its server, at most."""

# Runs COMMAND; afterwards its files go out behind MARK, at the end of standard output.
_WRAPPER = """
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


def _decode_base64(text: Any) -> bytes | None:
    if text is None:  # SandboxFusion's clients send it for no file
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise ValueError("must be a text in base64") from None


class RunRequest(BaseModel):
    """The fields of a request that are read; null is the same as none."""

    model_config = ConfigDict(strict=True, frozen=True)

    code: str
    language: Literal["python", "bash"] = "python"
    stdin: str = ""
    run_timeout: float | None = None
    memory_limit_MB: float = -1
    """-1 is SandboxFusion's word for no wish."""
    files: dict[str, Annotated[bytes | None, BeforeValidator(_decode_base64)]] = Field(
        default_factory=dict, max_length=_MOST_FILES
    )
    fetch_files: list[str] = Field(default_factory=list, max_length=_MOST_FILES)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("must be a JSON object with code and language")
        return {name: value for name, value in body.items() if value is not None}

    @field_validator("fetch_files")
    @classmethod
    def _are_plain(cls, value: list[str]) -> list[str]:
        Program("", files=dict.fromkeys(value, b""))
        return value


@dataclass(frozen=True)
class Job:
    """A request that can be run."""

    program: Program
    limits: SandboxConfig
    fetch: Sequence[str]
    """Files whose contents the reply holds."""
    mark: bytes | None
    """Text before these files in the output; None where the program is run as it is."""


def parse_job(body: Any, most: SandboxConfig) -> Job:
    """Return the job that a request asks for.

    A request that asks for more than there is is refused, since cutting it down would make the
    server's limit look like the program's fault.

    Args:
        most: the server's limits.

    Raises:
        Refusal: a field is missing or wrong; the line names it, and its value.
    """
    try:
        request = RunRequest.model_validate(body)
        program, mark = _make_program(request)
    except ValidationError as error:
        raise Refusal(422, first_fault(error)) from None
    except ValueError as error:
        raise Refusal(422, f"files: {error}") from None
    time_s = min(_DEFAULT_S, most.time_s) if request.run_timeout is None else request.run_timeout
    if not 0 < time_s <= most.time_s:
        bounds = f"(0, {most.time_s:g}] seconds here (--max-time-s of the server)"
        raise Refusal(422, f"run_timeout: must lie in {bounds}, got {body['run_timeout']}")
    memory_mb = request.memory_limit_MB
    if memory_mb != -1 and not _LEAST_MB <= memory_mb <= most.memory_mb:
        bounds = f"[{_LEAST_MB}, {most.memory_mb}] here (--memory-mb of the server)"
        raise Refusal(422, f"memory_limit_MB: must lie in {bounds}, got {body['memory_limit_MB']}")
    memory_mb = most.memory_mb if memory_mb == -1 else int(memory_mb)
    limits = most.model_copy(update={"time_s": time_s, "memory_mb": memory_mb})
    return Job(program, limits, request.fetch_files, mark)


def _make_program(request: RunRequest) -> tuple[Program, bytes | None]:
    code, mark = request.code, None
    files = {name: data for name, data in request.files.items() if data is not None}
    if request.language == "bash" or request.fetch_files:
        name = "script.sh" if request.language == "bash" else "program.py"
        shell = "'/bin/bash'" if request.language == "bash" else "sys.executable, '-s'"
        if name in files:
            raise ValueError(f"must not contain {name}, the program itself")
        files[name] = code.encode("utf-8", "surrogatepass")
        text = f"\n--- files {secrets.token_hex(16)}\n"
        mark = text.encode()
        command = f"[{shell}, {name!r}]"
        header = f"COMMAND, FETCH, MARK = {command}, {request.fetch_files!r}, {text!r}"
        code = f"import sys\n{header}\n{_WRAPPER}"
    return Program(code, request.stdin.encode("utf-8", "surrogatepass"), files), mark


def make_response(result: Result, job: Job) -> dict[str, Any]:
    """Return the reply to a request whose program has run, in SandboxFusion's words."""
    out, files = result.stdout, {}
    if job.mark is not None and job.mark in out and result.ending == "finished":
        out, _, listing = out.rpartition(job.mark)
        files = _parse_files(listing, job.fetch)
    is_late = result.ending == "time_limit"
    run = RunResult(
        status="TimeLimitExceeded" if is_late else "Finished",
        execution_time=result.seconds,
        return_code=None if is_late else result.exit_code,
        stdout=out.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
    )
    message = "" if result.ending in ("finished", "time_limit") else result.ending
    status: Literal["Success", "Failed"] = "Success" if result.is_clean else "Failed"
    return RunAnswer(status=status, message=message, run_result=run, files=files).model_dump()


def _parse_files(listing: bytes, names: Sequence[str]) -> dict[str, str]:
    """Parse the listing that the program's own user wrote: texts by the requested names."""
    try:
        parsed = json.loads(listing)
    except (ValueError, RecursionError):
        return {}
    texts = parsed if isinstance(parsed, dict) else {}
    texts = {name: text for name, text in texts.items() if name in names and isinstance(text, str)}
    return {name: text for name, text in texts.items() if text.isascii()}


class SandboxServer:
    """Runs programs for the clients of its `service`; all in one event loop.

    Args:
        sandbox: its limits are the most that a request may ask for.
        max_queued: requests that wait while the sandbox is full.
        max_wait_s: seconds that one waits: a client's patience is 10 s beyond its program's time.
    """

    def __init__(
        self,
        sandbox: LocalSandbox,
        token: str | None,
        max_body_bytes: int,
        max_queued: int,
        max_wait_s: float = 8.0,
    ) -> None:
        self._sandbox, self._max_wait_s = sandbox, max_wait_s
        self._running = 0
        slots = sandbox.slots
        self._free = asyncio.Semaphore(slots)
        self._threads = ThreadPoolExecutor(slots, "programs")
        self.service = JsonService(
            "/run_code",
            self._answer,
            self._health,
            slots + max_queued,
            max_body_bytes,
            token,
            "detail",
            sandbox.close,
            slots * _FILES_PER_PROGRAM,
        )

    def close(self) -> None:
        """Shut the threads down, after the event loop has ended."""
        self._sandbox.close()
        self._threads.shutdown()

    def _health(self) -> dict[str, Any]:
        return {
            "status": "closing" if self.service.is_closing else "ok",
            "sandbox": self._sandbox.backend,
            "max_concurrent": self._sandbox.slots,
            "running": self._running,
            "waiting": self.service.active_requests - self._running,
        }

    async def _answer(self, body: Any, request: Request) -> dict[str, Any]:
        job = parse_job(body, self._sandbox.config)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Refusal(503, "no slot became free in time") from None
        self._running += 1
        try:
            if self.service.is_closing or await request.is_disconnected():
                raise Refusal(503, "the service is closing")
            loop = asyncio.get_running_loop()
            run = self._sandbox.run
            result = await loop.run_in_executor(self._threads, run, job.program, job.limits)
            return make_response(result, job)
        except (SandboxError, OSError) as error:
            if self.service.is_closing:
                raise Refusal(503, "the service is closing") from None
            message = " ".join(str(error).split())
            return RunAnswer(status="SandboxError", message=message, files={}).model_dump()
        finally:
            self._running -= 1
            self._free.release()
