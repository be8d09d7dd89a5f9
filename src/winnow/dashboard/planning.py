"""Plans of a run's recipe on other GPUs: runs `winnow plan` in one subprocess at a time."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import anyio.to_thread
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from winnow.dashboard.runs import CONFIG, RunFiles, UnreadableError
from winnow.dashboard.sidecar import exit_with_parent
from winnow.errors import WinnowError
from winnow.observe.files import MODEL
from winnow.observe.gpus import GPU_NAMES
from winnow.user_code import disable_user_code

MOST_BYTES = 10_000
"""Limit of a request's body."""
_PROGRAM = (
    "from winnow.dashboard.planning import limit_process; limit_process(); "
    "from winnow.cli.main import main; raise SystemExit(main())"
)
_MOST_MEMORY, _MOST_SECONDS = 16 << 30, 1800
"""Limits of memory and CPU time: a recipe may have any number of layers and answers."""
_NEWEST = 8
"""Newest steps whose answer lengths are read."""


class PlanForm(BaseModel):
    """Request of the planning page: GPUs, and lengths of answers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: int = Field(ge=1, le=1000)
    gpus: int = Field(ge=1, le=72)
    gpu: Literal[GPU_NAMES]  # type: ignore[valid-type]
    lengths: Literal["drawn", "run"]
    mean_response: float | None = Field(None, ge=1, le=1e7)
    price: float | None = Field(None, ge=0, le=1e6)

    @classmethod
    def parse(cls, body: bytes) -> PlanForm:
        """Parse a request's body.

        Raises:
            WinnowError: fields are invalid.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise WinnowError("; ".join(lines)[:300]) from error

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments of the command for a folder that `_write_inputs` filled."""
        args = ["plan", str(folder / CONFIG), "--json", f"--gpu={self.gpu}"]
        # The run may be another user's: code of its model is not executed.
        args += [f"--nodes={self.nodes}", f"--gpus={self.gpus}", "model.trust_remote_code=false"]
        if (folder / CONFIG_OF_MODEL).is_file():
            args += [f"model.path={folder}", "warm_start=none"]
        if self.lengths == "run":
            args.append(f"--lengths={folder}")
        elif self.mean_response is not None:
            args.append(f"--mean-response={self.mean_response}")
        return args if self.price is None else [*args, f"--price-per-gpu-hour={self.price}"]


CONFIG_OF_MODEL = "config.json"


class Planner:
    """Runs one plan at a time in an event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock, self._is_closing = asyncio.Lock(), False

    def close(self) -> None:
        """Kill the running plan and cancel waiting ones."""
        self._is_closing = True
        self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def stream(self, files: RunFiles, form: PlanForm) -> AsyncGenerator[str]:
        """Plan a run's recipe as lines of JSON; closing the stream kills the process.

        Yields:
            `{"told": …}` for progress, then `{"plan": …}` or `{"error": …}`.
        """
        if self._lock.locked():
            yield _json_line(told="another plan is running; waiting for it to finish")
        async with self._lock:
            try:
                with TemporaryDirectory(prefix="winnow-plan-") as name:
                    async for line in self._run_plan(files, form, Path(name)):
                        yield line
            except WinnowError as error:
                yield _json_line(error=str(error))
            finally:
                self._kill_process()

    async def _run_plan(self, files: RunFiles, form: PlanForm, folder: Path) -> AsyncGenerator[str]:
        await anyio.to_thread.run_sync(_write_inputs, files, form, folder)
        with (folder / "plan.json").open("wb") as out:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _PROGRAM, *form.arguments(folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.PIPE,
                limit=1 << 20,
                start_new_session=True,  # Ctrl-C goes to the dashboard, which kills it
            )
        if self._is_closing:  # closed during the start
            self._kill_process()
        assert process.stderr is not None
        message = ""
        async for each in process.stderr:
            message = each.decode("utf-8", "replace").strip().removeprefix("winnow: ")
            yield _json_line(told=message)
        if await process.wait():
            yield _json_line(error=message or "the plan was terminated")
        else:
            yield _json_line(plan=json.loads((folder / "plan.json").read_bytes()))


def limit_process() -> None:
    """Set the limits of this process, and end it with the dashboard.

    The run may be another user's: code that its recipe names is refused.
    """
    exit_with_parent()
    disable_user_code("is code of the run, which the dashboard does not execute; use winnow plan")
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))


def _json_line(**body: Any) -> str:
    return json.dumps(body) + "\n"


def _write_inputs(files: RunFiles, form: PlanForm, folder: Path) -> None:
    """Copy the inputs of a plan from a run: recipe, the model's configuration, answer lengths."""
    (folder / CONFIG).write_bytes(files.read(CONFIG))
    kept = [each for each in files.entries("checkpoints") if each.startswith("step-")]
    of_model = CONFIG_OF_MODEL, "preprocessor_config.json"
    copies = {f"checkpoints/{step}/model/{name}": name for step in kept[-1:] for name in of_model}
    for path, name in {**copies, MODEL: CONFIG_OF_MODEL}.items():
        with suppress(UnreadableError):
            (folder / name).write_bytes(files.read(path))
    if form.lengths == "run":
        (folder / "rollouts").mkdir()
        for step in list(files.steps("rollouts"))[-_NEWEST:]:
            with files.parquet(f"rollouts/step-{step}.parquet") as file:
                table = file.read(columns=["outcome", "kind", "prompt_tokens", "response_tokens"])
            pq.write_table(table, folder / f"rollouts/step-{step}.parquet")
