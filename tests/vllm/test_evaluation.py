"""`winnow eval` of runs whose answers vLLM writes, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill import LONGEST_S
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def evaluated(server: Server, run: Path, to: Path, *overrides: str) -> tuple[str, list[Any]]:
    """The engine that the report names, and the tokens of all answers."""
    words = "evaluation.n=4", "evaluation.max_prompts=8", "run.threads=1"
    asked = ["eval", str(run), "--out", str(to), *words, *overrides]
    assert server.start("winnow.cli.main", asked, spares=SPARES).wait(LONGEST_S) == 0
    rows = read_rollouts(to / "answers.parquet").to_pylist()
    keys = ("prompt_uid", "answer", "token_ids", "finish_reason")
    engine: str = json.loads((to / "report.json").read_text())["engine"]
    return engine, [[row[key] for key in keys] for row in rows]


def test_the_engine_of_a_run_writes_and_the_torch_engine_gives_the_same_tokens(
    server: Server, calm: Path, tmp_path: Path
) -> None:
    engine, own = evaluated(server, calm, tmp_path / "own")
    other, wanted = evaluated(server, calm, tmp_path / "torch", "rollout/engine=torch")
    assert (engine, other) == ("vllm", "torch")
    assert len(own) == 8 * 4
    assert own == wanted


def test_an_adapter_is_merged_into_what_vllm_holds(server: Server, tmp_path: Path) -> None:
    model = digits_folder(tmp_path / "model", **SHAPE, initializer_range=0.2)
    settings = (
        *("warm_start=none", f"model.path={model}", "model/adapter=lora", "model.adapter.rank=4"),
        *("trainer.steps=1", "sampling.groups_per_step=4", "sampling/filter=none", "run.name=mine"),
        *("trainer.mini_batch_groups=4", "data.max_prompt_tokens=64", "optim.lr=1e-1"),
        *("optim.warmup_steps=0", "evaluation.before=false", "evaluation.max_prompts=4"),
        "run.threads=1",
    )
    in_this_process("train", "quickstart", *settings, folder=tmp_path).check()
    run = tmp_path / "runs" / "mine"
    _, wanted = evaluated(server, run, tmp_path / "torch")
    engine, own = evaluated(server, run, tmp_path / "vllm", "rollout/engine=vllm")
    assert engine == "vllm"
    assert own == wanted
    _, started = evaluated(
        server, run / "checkpoints/step-1/model", tmp_path / "peft", "rollout/engine=vllm",
        *("--recipe", str(run / "config.yaml"), "model.adapter=none"),
    )  # fmt: skip
    assert started == wanted, "a PEFT folder as a start is merged as well"
    _, plain = evaluated(server, model, tmp_path / "plain", "--recipe", str(run / "config.yaml"),
                         "model.adapter=none")  # fmt: skip
    assert plain != wanted
