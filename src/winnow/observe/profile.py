"""Profiles of chosen steps (`trainer.profile`), a file for each process: torch's, Nsight's, memory.

A process has a `StepProfiler`, and says when a step begins and ends there. While one is open, the
phases of the step (`Stopwatch`) are ranges in it: `winnow.rollout`, `winnow.update`, … Without
steps to profile nothing is imported and a phase costs what it always did.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config.trainer import ProfileConfig, ProfileRole
from winnow.errors import ConfigError
from winnow.observe.files import PARTIAL, explain_write_errors
from winnow.observe.metrics import Stopwatch

Finish = Callable[[Path], None]
"""Ends what was begun, and writes it to a file whose ending is still to be added."""
_MOST_ALLOCATIONS = 100_000


@dataclass
class StepProfiler:
    """The profiles of a process; it may travel to that process before the first step."""

    config: ProfileConfig
    folder: Path
    role: ProfileRole
    rank: int = 0

    def __post_init__(self) -> None:
        config = self.config
        is_chosen = self.role in config.roles and (
            config.ranks is None or self.role == "driver" or self.rank in config.ranks
        )
        self._steps = frozenset(config.steps if is_chosen else ())
        self._finish: Finish | None = None
        self._first = self._step = 0

    def begin(self, step: int) -> None:
        """Begin a step; a profile that is open goes on.

        Raises:
            WinnowError: there can be no folder for its file.
        """
        self._step = step
        if step in self._steps and self._finish is None:
            self._first = step
            with explain_write_errors(self.folder):  # first: a profile that began must be ended
                self.folder.mkdir(parents=True, exist_ok=True)
            self._finish = _BEGIN[self.config.tool]()

    def end(self) -> None:
        """End the step: its file is written, unless it has a part of the next step as well."""
        if not (self.config.continuous and self._step + 1 in self._steps):
            self.close()

    def move_to(self, step: int) -> None:
        """End the step that is under way and begin another, where they are not the same."""
        if step != self._step:
            self.end()
            self.begin(step)

    def close(self) -> None:
        """Write the open profile, if there is one.

        Raises:
            WinnowError: the disk refuses.
        """
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        last = "" if self._step == self._first else f"-{self._step}"
        name = f"{self.role}-{self.rank}-step-{self._first}{last}"
        with explain_write_errors(self.folder):
            finish(self.folder / name)


def make_profiler(profile: ProfileConfig, role: ProfileRole, rank: int = 0) -> StepProfiler | None:
    """Make the profiler of a process; None where no step is to be profiled."""
    if not profile.steps:
        return None
    assert profile.save_path is not None, "set when the run's folder is known"
    return StepProfiler(profile, Path(profile.save_path), role, rank)


def check_profile(config: ProfileConfig, has_gpu: bool) -> None:
    """Refuse a tool that has nothing to record.

    Raises:
        ConfigError: Nsight or a memory snapshot without a GPU.
    """
    if config.steps and config.tool != "torch" and not has_gpu:
        raise ConfigError(
            f"trainer.profile.tool={config.tool} requires a GPU, and the run has none; set it to "
            "torch"
        )


def profile_notes(config: ProfileConfig, first: int, last: int) -> list[str]:
    """Return notes for the user about a profiled run that trains steps first to last."""
    notes, never = [], [str(step) for step in config.steps if not first <= step <= last]
    if never:
        which = f"the run trains steps {first} to {last} (trainer.profile.steps)"
        notes.append(f"No profile of step {', '.join(never)}: {which}")
    if config.steps and config.tool == "nsight" and "NSYS_PROFILING_SESSION_ID" not in os.environ:
        options = [f"--{name}={value}" for name, value in nsight_options(config).items()]
        command = " ".join(["nsys", "profile", *options])
        notes.append(
            "Warning: trainer.profile.tool=nsight, but this process does not run under nsys: only "
            f"Ray workers are profiled; prefix the command with: {command}"
        )
    return notes


def ray_nsight_options(profile: ProfileConfig, role: str) -> dict[str, str] | None:
    """Return the options of nsys for the workers of a role on Ray; None where they run without."""
    of = {"policy": "learner", "rollout": "engine"}.get(role)
    is_recorded = profile.steps and profile.tool == "nsight" and of in profile.roles
    return nsight_options(profile) if is_recorded else None


def nsight_options(config: ProfileConfig) -> dict[str, str]:
    """Return long options of `nsys profile`, also those of an actor's runtime_env on Ray."""
    ranges = sum(not (config.continuous and step - 1 in config.steps) for step in {*config.steps})
    return {
        "trace": "cuda,nvtx,osrt,cublas",
        "cuda-memory-usage": "true",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat:{ranges}",
        "kill": "none",
    }


def _begin_torch() -> Finish:
    import torch
    from torch._C._profiler import _ExperimentalConfig

    torch_profiler: Any = torch.profiler
    activities = [torch_profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch_profiler.ProfilerActivity.CUDA)
    profiler = torch_profiler.profile(
        activities=activities,
        # Learning has its own thread.
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    Stopwatch.make_range = lambda name: torch_profiler.record_function(f"winnow.{name}")

    def finish(file: Path) -> None:
        Stopwatch.make_range = nullcontext
        profiler.stop()
        draft = f"{file}{PARTIAL}.gz"  # by this ending it is packed
        profiler.export_chrome_trace(draft)
        os.replace(draft, f"{file}.json.gz")

    return finish


def _begin_memory() -> Finish:
    """Record what is allocated on the GPU; pytorch.org/memory_viz shows it."""
    import torch

    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)

    def finish(file: Path) -> None:
        memory._dump_snapshot(f"{file}{PARTIAL}")
        os.replace(f"{file}{PARTIAL}", f"{file}.pickle")
        memory._record_memory_history(enabled=None)

    return finish


def _begin_nsight() -> Finish:
    """Have nsys record until the end, with phases as NVTX ranges; it writes its own file."""
    import torch

    cuda: Any = torch.cuda
    cuda.profiler.start()
    Stopwatch.make_range = lambda name: cuda.nvtx.range(f"winnow.{name}")

    def finish(file: Path) -> None:
        Stopwatch.make_range = nullcontext
        cuda.synchronize()
        cuda.profiler.stop()

    return finish


_BEGIN: dict[str, Callable[[], Finish]] = {
    "torch": _begin_torch,
    "memory": _begin_memory,
    "nsight": _begin_nsight,
}
