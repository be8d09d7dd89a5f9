"""A judge on vLLM's engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.judges import DIGITS, judge_folder
from tests.recipes import recipe
from tests.scoring import PROMPT

from winnow.runs.judge_engines import make_judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2}
ASKED = "1", "12", "3|4", "99#1", "5;5"


def judgements(folder: Path, engine: str) -> list[str]:
    own = "reward/judge=engine", f"reward.judge.path={folder}", f"reward/judge/engine={engine}"
    judge = make_judge(recipe("quickstart", *own, *DIGITS, "run.threads=1"), None)
    client = judge._client
    try:
        bodies = [
            {"messages": judge._prompt.messages(PROMPT, answer), **client.settings()}
            for answer in ASKED
        ]
        waiting = [client.submit(client.reply(body)) for body in bodies]
        return [each.result().text for each in waiting]
    finally:
        judge.close()


def test_a_judge_writes_on_vllm_what_it_writes_on_the_torch_engine(tmp_path: Path) -> None:
    folder = judge_folder(tmp_path / "judge", **SHAPE, initializer_range=0.2)
    wanted = judgements(folder, "torch")
    assert len(set(wanted)) == len(ASKED)
    assert judgements(folder, "vllm") == wanted
