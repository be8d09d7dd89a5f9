"""SmolLM2-135M-Instruct, whose heads have 64 numbers, written by vLLM: one step of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.real_model import REWARD, SMALL, smollm2
from tests.winnow_command import in_own_process

from winnow.observe.jsonl import read_metrics

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_vllm_writes_with_the_weights_that_are_trained(tmp_path: Path) -> None:
    smollm2()
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [word for word in SMALL if not word.startswith("rollout.engine.slots")]
    vllm = "rollout/engine=vllm", "rollout.engine.slots=8", "rollout.engine.cache_gib=0.5"
    words = ("train", "smollm2", "run.name=vllm", *settings, *vllm, "trainer.steps=2")
    in_own_process(*words, folder=tmp_path).check()
    records = read_metrics(tmp_path / "runs" / "vllm" / "metrics.jsonl")
    # The second step samples with weights that were published after the first.
    for record in records[1:]:
        assert record["mismatch/max_delta"] < 1e-3
