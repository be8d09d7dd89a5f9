"""Plans of a run's recipe on other GPUs: `winnow plan` as a process of its own, one at a time."""

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
"""Most bytes of a request's body."""
_PROGRAM = (
    "from winnow.dashboard.planning import limit_process; limit_process(); "
    "from winnow.cli.main import main; raise SystemExit(main())"
)
_MOST_MEMORY, _MOST_SECONDS = 16 << 30, 1800
"""Memory and CPU time of a plan: a run's folder may ask for any number of layers and answers."""
_NEWEST = 8
"""Steps whose lengths of answers are read."""


class PlanForm(BaseModel):
    """GPUs to plan on, and how long answers are; as a page posts it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    nodes: int = Field(ge=1, le=1000)
    gpus: int = Field(ge=1, le=72)
    gpu: Literal[GPU_NAMES]  # type: ignore[valid-type]
    lengths: Literal["drawn", "run"]
    mean_response: float | None = Field(None, ge=1, le=1e7)
    price: float | None = Field(None, ge=0, le=1e6)

    @classmethod
    def parse(cls, body: bytes) -> PlanForm:
        """Read a request's body.

        Raises:
            WinnowError: names the fields that are wrong.
        """
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise WinnowError("; ".join(lines)[:300]) from error

    def arguments(self, folder: Path) -> list[str]:
        """Return the words of the command, for files that `_write_inputs` wrote into a folder."""
        words = ["plan", str(folder / CONFIG), "--json", f"--gpu={self.gpu}"]
        words += [f"--nodes={self.nodes}", f"--gpus={self.gpus}"]
        # A run's folder may be a stranger's, whose model's own code is not run.
        words.append("model.trust_remote_code=false")
        if (folder / CONFIG_OF_MODEL).is_file():
            words += [f"model.path={folder}", "warm_start=none"]
        if self.lengths == "run":
            words.append(f"--lengths={folder}")
        elif self.mean_response is not None:
            words.append(f"--mean-response={self.mean_response}")
        return words if self.price is None else [*words, f"--price-per-gpu-hour={self.price}"]


CONFIG_OF_MODEL = "config.json"


class Planner:
    """Runs one plan at a time, for one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn, self._is_closing = asyncio.Lock(), False

    def close(self) -> None:
        """End the plan that is being made, and those that wait."""
        self._is_closing = True
        self._kill_process()

    def _kill_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def stream(self, files: RunFiles, form: PlanForm) -> AsyncGenerator[str]:
        """Plan a run's recipe; yields lines of JSON, and ends the process if nobody reads on.

        Yields:
            `{"told": …}` as it goes on, then `{"plan": …}` or `{"error": …}`.
        """
        if self._turn.locked():
            yield _json_line(told="another plan is running; waiting for it to finish")
        async with self._turn:
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
                start_new_session=True,  # a Ctrl-C is the dashboard's, which ends it
            )
        if self._is_closing:  # meanwhile
            self._kill_process()
        assert process.stderr is not None
        told = ""
        async for each in process.stderr:
            told = each.decode("utf-8", "replace").strip().removeprefix("winnow: ")
            yield _json_line(told=told)
        if await process.wait():
            yield _json_line(error=told or "the plan was terminated")
        else:
            yield _json_line(plan=json.loads((folder / "plan.json").read_bytes()))


def limit_process() -> None:
    """Bound this process, which runs `winnow plan` and ends with the dashboard.

    A run's folder may be a stranger's: none of the code that it names is run.
    """
    exit_with_parent()
    disable_user_code("is code that a run names, which the dashboard does not run; use winnow plan")
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))


def _json_line(**body: Any) -> str:
    return json.dumps(body) + "\n"


def _write_inputs(files: RunFiles, form: PlanForm, folder: Path) -> None:
    """Write what a plan needs of a run: its recipe, its model's config, lengths of answers."""
    (folder / CONFIG).write_bytes(files.read(CONFIG))
    kept = [each for each in files.entries("checkpoints") if each.startswith("step-")]
    for name in (MODEL, *(f"checkpoints/{each}/model/{CONFIG_OF_MODEL}" for each in kept[-1:])):
        with suppress(UnreadableError):
            (folder / CONFIG_OF_MODEL).write_bytes(files.read(name))
            break
    if form.lengths == "run":
        (folder / "rollouts").mkdir()
        for step in list(files.steps("rollouts"))[-_NEWEST:]:
            with files.parquet(f"rollouts/step-{step}.parquet") as file:
                table = file.read(columns=["outcome", "kind", "prompt_tokens", "response_tokens"])
            pq.write_table(table, folder / f"rollouts/step-{step}.parquet")
