"""Programs run by a service that speaks SandboxFusion's HTTP API.

    POST URL/run_code: code, language, stdin, limits, files  ─►  run_result: status, output, code

The tests of an answer go there as they go into the local sandbox: one Python file, and on its
standard input the values to test it with. A verdict comes back as standard output.

A fault of the service is never the program's: no connection, a refusal, an answer that is late,
cut off, or not of this API all raise `SandboxError`, and that scoring fails.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, StrictInt, ValidationError

from winnow.config.reward import FusionConfig
from winnow.errors import RewardError
from winnow.http import first_fault
from winnow.http.client import JsonClient, RemoteError, read_token
from winnow.sandbox.program import OUTPUT_LIMIT, Ending, Program, Result, SandboxError

_SLACK_S = 10.0
"""Time of a request beyond those of its program: waiting, the way there and back."""
_TRIAL = """import sys
print(sys.version_info >= (3, 8), sys.stdin.read())
print("x" * {fill})
"""
_TRIAL_SPARED = 512
"""Bytes below `output_kb` that the trial writes: what it says, and line ends of two."""
_SHOWN = 200


class FusionSandbox:
    """Runs programs at a service; safe to use from any thread.

    Raises:
        RewardError: the service does not run a program as it should.
    """

    def __init__(self, config: FusionConfig) -> None:
        self.config = config
        self.slots = config.max_concurrent
        self._http = JsonClient(
            config.url,
            token=read_token(config.token_env, "reward.sandbox.token_env"),
            max_concurrent=config.max_concurrent,
            # Six characters of JSON for a byte, at worst.
            max_bytes=(config.output_kb << 10) * 8 + (1 << 20),
        )
        try:
            self._run_trial()
        except BaseException:
            self.close()
            raise

    @property
    def description(self) -> str:
        """One line for people."""
        return f"SandboxFusion at {self.config.url}, {self.config.max_concurrent} requests at once"

    def run_for(self, program: Program, time_s: float) -> Result:
        """Run a program; waits while `max_concurrent` others are under way.

        Args:
            time_s: its time limit.

        Raises:
            SandboxError: the service failed.
        """
        config = self.config
        body = {
            "code": program.code,
            "language": "python",
            "stdin": program.stdin.decode("utf-8", "surrogatepass"),
            "compile_timeout": config.compile_s,
            "run_timeout": time_s,
            "memory_limit_MB": config.memory_mb,
            "files": {n: base64.b64encode(data).decode() for n, data in program.files.items()},
            "fetch_files": [],
        }
        patience_s = config.compile_s + time_s + _SLACK_S
        try:
            answer = self._http.post_blocking("run_code", body, patience_s)
        except RemoteError as error:
            raise SandboxError(error.line) from error
        result = parse_answer(answer)
        # The service may let a program write more than we would.
        is_long = len(result.stdout) + len(result.stderr) > config.output_kb << 10
        return replace(result, ending="output_limit") if is_long else result

    def close(self) -> None:
        """End what is under way."""
        self._http.close()

    def _run_trial(self) -> None:
        """Check before training that programs are run, with the most that will be asked for."""
        where = f"reward.sandbox.url is {self.config.url}"
        fill = (self.config.output_kb << 10) - _TRIAL_SPARED
        trial = Program(_TRIAL.format(fill=fill), b"42")
        try:
            result = self.run_for(trial, max(self.config.time_s, self.config.sample_s))
        except SandboxError as error:
            raise RewardError(
                f"{where}, which runs no program: {error}; start `winnow sandbox serve` there, "
                "or fix reward.sandbox"
            ) from error
        begun = result.stdout[:_TRIAL_SPARED].split()[:2] == [b"True", b"42"]
        is_cut = begun and result.is_clean and result.stdout.count(b"x") < fill
        if result.ending == "output_limit" or is_cut:
            raise RewardError(
                f"{where}, but its output limit is below reward.sandbox.output_kb="
                f"{self.config.output_kb}; start it with a larger --output-kb, or lower this one"
            )
        if not result.is_clean or not begun:
            output = result.stderr or result.stdout.partition(b"\nx")[0]
            message = " ".join(output.decode(errors="replace").split())
            raise RewardError(
                f"{where}, but a trial program ended there with exit code {result.exit_code} "
                f"({result.ending}): {message[-_SHOWN:]!r}; it must run Python 3.8 or newer"
            )


class RunResult(BaseModel):
    """Outcome of compiling or running, as the service tells it."""

    status: Literal["Finished", "TimeLimitExceeded", "Error"]
    execution_time: Any = None
    return_code: StrictInt | None = None
    stdout: str | None = None
    stderr: str | None = None

    def to_result(self, message: str) -> Result:
        """Convert it to a `Result`.

        Raises:
            SandboxError: the service could not run the program.
        """
        if self.status == "Error":
            reason = " ".join((message or self.stderr or "no reason given").split())
            raise SandboxError(f"the service could not run the program: {reason[:_SHOWN]}")
        ending: Ending = "output_limit" if message == OUTPUT_LIMIT else "finished"
        code = self.return_code
        if self.status == "TimeLimitExceeded":
            ending, code = "time_limit", -9 if code is None else code
        if code is None:
            raise SandboxError("the service's response has no return code")
        seconds = self.execution_time
        if not isinstance(seconds, int | float) or not seconds >= 0:
            seconds = 0.0
        out, err = (
            (each or "").encode("utf-8", "surrogatepass") for each in (self.stdout, self.stderr)
        )
        return Result(ending, code, out, err, float(min(seconds, 1e6)))


class RunAnswer(BaseModel):
    """Answer of the service."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: Any = None
    compile_result: RunResult | None = None
    run_result: RunResult | None = None
    files: Any = None
    """Contents of the files asked for, in base64 by name; our client asks for none."""


def parse_answer(answer: Any) -> Result:
    """Parse an answer of the service into the program's result.

    Raises:
        SandboxError: the sandbox failed, or the answer is none of this API.
    """
    try:
        reply = RunAnswer.model_validate(answer)
    except ValidationError as error:
        fault = first_fault(error)
        raise SandboxError(f"the service's response is not SandboxFusion's: {fault}") from None
    message = str(reply.message or "")
    if reply.status == "SandboxError":
        raise SandboxError(f"the service says: {message[:_SHOWN] or 'SandboxError'}")
    if reply.compile_result is not None:
        compiled = reply.compile_result.to_result(message)
        if not compiled.is_clean:
            return replace(compiled, ending="compile_error")
    if reply.run_result is None:
        raise SandboxError("the service's response has no run_result")
    return reply.run_result.to_result(message)
