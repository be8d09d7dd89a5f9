"""Profiles of chosen steps."""

from __future__ import annotations

import gzip
import json
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from winnow.config.trainer import ProfileConfig
from winnow.errors import ConfigError, WinnowError
from winnow.observe.metrics import Stopwatch
from winnow.observe.profile import StepProfiler, check_profile, nsight_options, profile_notes


def work() -> None:
    """A step: it rolls out here, and learns in a thread of its own."""
    watch = Stopwatch()
    with watch.phase("rollout"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    thread = threading.Thread(target=learn, args=[watch])
    thread.start()
    thread.join()


def learn(watch: Stopwatch) -> None:
    with watch.phase("update"):
        torch.ones(8, 8).exp()


def run(profiler: StepProfiler, steps: range) -> None:
    for step in steps:
        profiler.move_to(step)
        work()
    profiler.close()


def events(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file) as trace:
        return list(json.load(trace)["traceEvents"])


def of(folder: Path, **settings: Any) -> StepProfiler:
    role, rank = settings.pop("role", "learner"), settings.pop("rank", 0)
    profiler = StepProfiler(ProfileConfig(**settings), folder, role, rank)
    return pickle.loads(pickle.dumps(profiler))  # as it comes to another process


def test_a_trace_has_the_phases_of_its_steps_and_their_operations_by_thread(tmp_path: Path) -> None:
    run(of(tmp_path, steps=(2, 3, 5)), range(1, 7))
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == [f"learner-0-step-{step}.json.gz" for step in (2, 3, 5)]
    for file in tmp_path.iterdir():
        found = {e["name"]: e for e in events(file) if e.get("ph") == "X"}
        names = Counter(e["name"] for e in events(file))
        assert (names["winnow.rollout"], names["winnow.update"]) == (1, 1)
        for operation, phase in (("aten::mm", "winnow.rollout"), ("aten::exp", "winnow.update")):
            outer, inner = found[phase], found[operation]
            assert outer["tid"] == inner["tid"]
            assert outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]


def test_steps_that_follow_each_other_may_share_a_file(tmp_path: Path) -> None:
    run(of(tmp_path, steps=(2, 3, 5), continuous=True), range(1, 5))
    assert [file.name for file in tmp_path.iterdir()] == ["learner-0-step-2-3.json.gz"]
    (file,) = tmp_path.iterdir()
    assert Counter(e["name"] for e in events(file))["winnow.update"] == 2


def test_a_folder_that_cannot_be_made_is_told_before_a_profile_is_begun(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiler = of(tmp_path / "file" / "profile", steps=(1,))
    with pytest.raises(WinnowError, match="file/profile"):
        profiler.begin(1)
    assert Stopwatch.make_range("x").__enter__() == "x"
    profiler.close()


def test_other_roles_and_ranks_are_left_alone(tmp_path: Path) -> None:
    run(of(tmp_path, steps=(1,), rank=1), range(1, 3))
    run(of(tmp_path, steps=(1,), roles=("driver", "engine")), range(1, 3))
    assert not any(tmp_path.iterdir())
    run(of(tmp_path, steps=(1,), rank=1, ranks=None), range(1, 3))
    run(of(tmp_path, steps=(1,), role="engine", rank=2, ranks=(2,)), range(1, 3))
    run(of(tmp_path, steps=(1,), role="driver", ranks=(5,)), range(1, 3))
    names = sorted(file.name.partition("-step")[0] for file in tmp_path.iterdir())
    assert names == ["driver-0", "engine-2", "learner-1"]


def test_a_gpus_memory_is_recorded_and_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    whole = tmp_path / "learner-0-step-1.pickle"

    def dump(name: str) -> None:
        assert Path(name) != whole
        Path(name).write_text("a snapshot")
        said.append("dumped")

    record = "_record_memory_history"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    monkeypatch.setattr(torch.cuda.memory, record, lambda **given: said.append(given))
    run(of(tmp_path, steps=(1,), tool="memory"), range(1, 2))
    assert said == [{"max_entries": 100_000}, "dumped", {"enabled": None}]
    assert [(file, file.read_text()) for file in tmp_path.iterdir()] == [(whole, "a snapshot")]


def test_nsight_is_begun_and_ended_and_phases_are_its_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda: said.append("synchronize"))
    monkeypatch.setattr(cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(cuda.profiler, "stop", lambda: said.append("stop"))
    monkeypatch.setattr(cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(cuda.nvtx, "range_pop", lambda: said.append("pop"))
    run(of(tmp_path, steps=(2,), tool="nsight"), range(1, 4))
    ranges = ["winnow.rollout", "pop", "winnow.update", "pop"]
    assert said == ["start", *ranges, "synchronize", "stop"]


def test_nsights_command_and_what_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ProfileConfig(steps=(3, 4, 8), tool="nsight")
    assert nsight_options(config)["capture-range-end"] == "repeat:3"
    together = config.model_copy(update={"continuous": True})
    assert nsight_options(together)["capture-range-end"] == "repeat:2"
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    command = profile_notes(config, 1, 8)[0].partition("prefix the command with: ")[2].split()
    assert command[:3] == ["nsys", "profile", "--trace=cuda,nvtx,osrt,cublas"]
    assert "--capture-range=cudaProfilerApi" in command
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert profile_notes(config, 1, 8) == []
    assert profile_notes(config, 4, 7) == [
        "No profile of step 3, 8: the run trains steps 4 to 7 (trainer.profile.steps)"
    ]
    for tool in ("nsight", "memory"):
        with pytest.raises(ConfigError, match=rf"trainer\.profile\.tool={tool} requires a GPU"):
            check_profile(config.model_copy(update={"tool": tool}), has_gpu=False)
    check_profile(config, has_gpu=True)
    check_profile(ProfileConfig(tool="nsight"), has_gpu=False)
