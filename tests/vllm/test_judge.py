"""A judge on vLLM's engine."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.builders.test_judge import judge_of, replies
from tests.judges import judge_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def test_a_judge_writes_on_vllm_what_it_writes_on_the_torch_engine(tmp_path: Path) -> None:
    folder = judge_folder(tmp_path / "judge", **SHAPE, initializer_range=0.2)
    found = []
    for engine in ("torch", "vllm"):
        with closing(judge_of(folder, f"reward/judge/engine={engine}")) as judge:
            found.append(replies(judge))
    assert len(set(found[0])) > 3
    assert found[0] == found[1]
