"""From demonstrations to a model that training by rewards takes up: a real run of each."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_folder
from tests.winnow_command import in_forked_process, winnow

from winnow.data.sort_digits import is_held_out
from winnow.evaluation.evaluator import Evaluator
from winnow.observe.jsonl import read_metrics

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 64}
ASKED = (
    *("data/task=sort_digits", "data.task.min_digits=2", "data.task.max_digits=2"),
    *("data.task.eval_problems=9", "evaluation.n=8", "rollout.max_response_tokens=8"),
    *("rollout.engine.slots=64", "run.threads=1", "observe.console=plain"),
)
SFT = (
    *("sft.train_files=[train.jsonl]", "sft.eval_files=[held_out.jsonl]", "model.path=base"),
    *("optim.lr=2e-2", "evaluation.every=20", "trainer.save_every=20", "trainer.keep_last=null"),
)


SINK = """
class Sink:
    def start(self, info): ...
    def log(self, step, record): ...
    def mark_complete(self):
        open("complete", "w").close()
    def close(self):
        open("closed", "w").close()
"""
OWN = "observe.sinks=[{path: sinks.py:Sink}]"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run, `whole`, of 40 steps."""
    folder = tmp_path_factory.mktemp("home")
    digits_folder(folder / "base", **SHAPE)
    texts = [f"{number:02}" for number in range(100)]
    for name, wanted in (("train", False), ("held_out", True)):
        rows = [
            {"prompt": f"{text}:", "completion": f"#{''.join(sorted(text))}"}
            for text in texts
            if is_held_out(text) == wanted
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    words = ("run.name=whole", "trainer.data_epochs=14", "sft.batch_size=32", *SFT, *ASKED)
    said = winnow(folder, "sft", "sft", *words).check()
    assert "91 demonstrations, 14.1 epochs in 40 steps" in said.out
    assert "winnow train RECIPE model.path=runs/whole/checkpoints/step-40/model" in said.out
    return folder


def test_held_out_demonstrations_become_likely_and_answers_right(home: Path) -> None:
    lines = read_metrics(home / "runs" / "whole" / "metrics.jsonl")
    losses = [line["sft/held_out_loss"] for line in lines if "sft/held_out_loss" in line]
    right = [line["eval/sort_digits/pass@1"] for line in lines if "sft/held_out_loss" in line]
    assert [line["step"] for line in lines] == [*range(41)]
    assert losses[0] > 3 > losses[1] > losses[2]
    assert losses[2] < 0.5
    assert right[0] < 0.1 < 0.3 < right[2]
    assert lines[40]["sft/loss"] < 0.5


def test_a_run_that_was_cut_off_ends_with_the_same_bits(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = home / "runs" / "cut"
    shutil.copytree(home / "runs" / "whole", run)
    shutil.rmtree(run / "checkpoints" / "step-40")

    async def stopped(self: Evaluator, step: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "evaluate", stopped)
        said = winnow(home, "resume", "runs/cut")
    assert "after step 20" in said.out
    assert "Stopped by SIGTERM after step 40, saved" in said.out
    assert "after step 40" in winnow(home, "resume", "runs/cut").check().out
    ends = [read_metrics(home / "runs" / name / "metrics.jsonl")[-1] for name in ("whole", "cut")]
    timeless = [{k: v for k, v in end.items() if "time" not in k} for end in ends]
    assert timeless[0] == timeless[1]
    whole, cut = (
        load_file(home / "runs" / name / "checkpoints" / "step-40" / "model" / "model.safetensors")
        for name in ("whole", "cut")
    )
    assert all(bool((whole[name] == cut[name]).all()) for name in whole)


def test_training_by_rewards_goes_on_where_imitation_ended(home: Path) -> None:
    model = "model.path=runs/whole/checkpoints/step-40/model"
    winnow(
        home,
        *("train", "quickstart", "warm_start=none", model, "run.name=rewards", *ASKED),
        *("trainer.steps=4", "sampling.groups_per_step=16", "trainer.mini_batch_groups=null"),
        *("evaluation.every=null", "reward.overlong.enabled=false", "optim.lr=2e-3"),
        "optim.warmup_steps=0",
    ).check()
    lines = read_metrics(home / "runs" / "rewards" / "metrics.jsonl")
    name = "eval/sort_digits/pass@1"
    assert lines[4][name] > lines[0][name] > 0.3
    said = winnow(home, "eval", "runs/whole").check()
    assert "whole, step 40" in said.out


def test_an_adapter_imitates_in_a_process_of_its_own(home: Path, server: Server) -> None:
    words = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=1")
    lora = ("model/adapter=lora", "trainer.steps=2")
    ranks = "sft", "sft", "run.name=ranks", *SFT, *lora, *words
    in_forked_process(server, *ranks, folder=home, spares=SPARES).check()
    (home / "sinks.py").write_text(SINK)
    more = ("trainer.profile.steps=[2,7]", OWN)
    said = winnow(home, "sft", "sft", "run.name=one", *SFT, *lora, *more).check().out
    assert (home / "complete").exists()
    assert "No profile of step 7: the run trains steps 1 to 2 (trainer.profile.steps)" in said
    with gzip.open(home / "runs/one/profile/driver-0-step-2.json.gz", "rt") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"winnow.update", "aten::mm"} <= names
    ranks, one = (read_metrics(home / "runs" / n / "metrics.jsonl") for n in ("ranks", "one"))
    for name in ("sft/held_out_loss", "sft/loss", "sft/grad_norm"):
        assert ranks[2][name] == pytest.approx(one[2][name], rel=1e-4), name
    assert (home / "runs/ranks/checkpoints/step-2/model/adapter_model.safetensors").is_file()
