"""A judge on vLLM's engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.kill import LONGEST_S, differences
from tests.fault.quick_lab import QuickLab
from tests.judges import DIGITS, judge_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def test_a_judge_gives_the_scores_on_vllm_that_it_gives_on_the_torch_engine(
    lab: QuickLab, tmp_path: Path
) -> None:
    folder = judge_folder(tmp_path / "judge", **SHAPE, initializer_range=0.2)
    judged = "reward/judge=engine", f"reward.judge.path={folder}", *DIGITS
    engines = {"torch": (), "vllm": ("reward/judge/engine=vllm",)}
    for name, more in engines.items():
        run = f"judged-{name}"
        assert (
            lab.start(run, *judged, "reward.judge.engine.processes=1", *more).wait(LONGEST_S) == 0
        )
    assert differences(lab.run("judged-torch"), lab.run("judged-vllm")) == []
    assert "judge 0[0]" in (lab.run("judged-vllm") / "log.txt").read_text()
