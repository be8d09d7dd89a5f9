"""On a cluster the driver has lengths, scores and handles: tokens and weights go past it."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.workers.ray.group import RayHandle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = (
    *("warm_start=none", "model.path=model", "run.name=far", "run.threads=1"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "data.task.eval_problems=2"),
    *("rollout.n=4", "rollout.max_response_tokens=16", "rollout.engine.slots=8"),
    *("sampling.groups_per_step=2", "sampling/filter=none", "trainer.steps=2"),
    *("trainer.mini_batch_groups=2", "optim.warmup_steps=0", "evaluation.n=1"),
    *("observe.console=off", "observe.rollout_text_groups=0", "reward.overlong.enabled=false"),
    *("cluster=ray", "cluster.cpus=0.5", "trainer/strategy=fsdp2", "trainer.strategy.ranks=1"),
    *("rollout.engine.processes=1", "reward.processes=1"),
)


def test_no_token_and_no_weight_comes_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    read_by: list[str] = []
    instance: dict[str, Any] = {}
    init, get = RayHandle.__init__, RayHandle.get

    def note_made(self: RayHandle, *args: Any) -> None:
        if not made:
            instance.update(ray.cluster_resources(), folder=[*sockets.iterdir()])
        made.append(args[1])
        init(self, *args)

    def note_read(self: RayHandle) -> Any:
        read_by.append(threading.current_thread().name)
        return get(self)

    digits_folder(tmp_path / "model")
    monkeypatch.setattr(RayHandle, "__init__", note_made)
    monkeypatch.setattr(RayHandle, "get", note_read)
    with tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as name:  # short, as Ray wants it
        sockets = Path(name)
        given = f"cluster.init={{num_cpus: 3, object_store_mb: 128, temp_dir: {name}}}"
        timeline = "cluster.timeline_file=ray/timeline.json"
        in_this_process("train", "quickstart", *SETTINGS, given, timeline, folder=tmp_path).check()
        assert list(sockets.iterdir()) == []
    assert (instance["CPU"], instance["object_store_memory"]) == (3.0, 128 << 20)
    assert len(instance["folder"]) == 1
    tasks = {event["cat"] for event in json.loads((tmp_path / "ray/timeline.json").read_text())}
    assert "task::RayWorker.call" in tasks
    lines = read_metrics(tmp_path / "runs/far/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[-1]["length/response/mean"] > 0
    assert made.count("engine 0") >= 4, "answers to held-out prompts, and those of two steps"
    assert made.count("learner") >= 3, "weights of the start and of two steps"
    # Of groups that are carried over, when a checkpoint is written.
    assert set(read_by) <= {"checkpoint"}
