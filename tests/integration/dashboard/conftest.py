"""Runs as their files alone, written by what writes those of a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.types import (
    Answer,
    FinishReason,
    Group,
    Prompt,
    Score,
    Segment,
    Trajectory,
    VersionSpan,
)

CONFIG = """
run: {name: NAME, seed: 3}
optim: {lr: 0.001, betas: [0.9, 0.999]}
trainer: {steps: 4, mode: {name: sync}}
rollout: {max_response_tokens: 15}
"""


def answer(length: int, accuracy: float, finish: FinishReason = "stop", error: str = "") -> Answer:
    """An answer of tokens 0, 1, 2 …, the first two written by version 4, the rest by 5."""
    ids = np.arange(length)
    spans = (VersionSpan(4, min(2, length)), VersionSpan(5, length))
    segment = Segment(ids, np.linspace(-1, 0, length).astype(np.float32), spans)
    parts = {"task": 2 * accuracy - 1, "overlong": -0.5 if finish == "length" else 0.0}
    score = Score(sum(parts.values()), accuracy, parts, {"pred": "7"}, error)
    return Answer(Trajectory((segment,), finish), score)


def group(number: int, uid: str, *answers: Answer, baseline: Answer | None = None) -> Group:
    """A group of answers to a prompt of two tokens."""
    return Group(number, Prompt(uid, np.arange(2), f"ask {uid}", "sums", "7"), answers, baseline)


def write_step(folder: Path, step: int, groups: Sequence[RolloutGroup], where: str) -> None:
    """Write the answers of a step, all with their texts."""
    write_rollouts(
        folder / where / f"step-{step}.parquet",
        step,
        groups,
        version=step + 4,
        text_groups={each.group.id for each in groups},
        decode=lambda ids: "said " + " ".join(map(str, ids)),
    )


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], RunFolder]:
    """A run of four steps; step 2 has three groups, the others one, of the same prompt."""

    def make(name: str) -> RunFolder:
        folder = RunFolder(tmp_path / "runs" / name)
        (folder.path / "eval").mkdir(parents=True)
        folder.rollouts.mkdir()
        folder.save_config(CONFIG.replace("NAME", name))
        metrics = MetricsLog(folder.metrics)
        for step in range(1, 5):
            metrics.log(step, {
                "sampling/accuracy": step / 4, "sampling/tokens/generated": 10 * step,
                "time/step_s": 1.5, "eval/sums/pass@1": step / 8,
            })  # fmt: skip
            kept = RolloutGroup(
                group(step, "row-1", answer(3, 1.0), answer(15, 0.0, "length")),
                "trained",
                np.array([1.0, -1.0]),
            )
            others = [
                RolloutGroup(group(90, "row-9", answer(1, 0.0), answer(2, 0.0)), "all_wrong"),
                RolloutGroup(
                    group(80, "row-8", answer(5, 1.0), answer(7, 0.5, error="boom"),
                          baseline=answer(9, 0.0)),
                    "failed",
                ),
            ]  # fmt: skip
            write_step(folder.path, step, [kept, *(others if step == 2 else [])], "rollouts")
        metrics.close()
        return folder

    return make
