"""A run that trains an adapter: resumed with the same bits, evaluated, exported both ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.kill import SETTINGS, differences
from peft import PeftModel
from tests.winnow_command import Outcome, in_this_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.observe.jsonl import read_metrics
from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6
LORA = ("model/adapter=lora", "model.adapter.rank=4", "optim.lr=5e-3")


def winnow(home: Path, *arguments: str) -> Outcome:
    return in_this_process(
        *arguments, folder=home, environment={"WINNOW_CACHE": str(home / "cache")}
    )


def train(home: Path, name: str, *settings: str) -> Outcome:
    return winnow(
        home,
        *("train", "quickstart", *SETTINGS, f"run.name={name}", "trainer.save_every=1"),
        *("trainer.keep_last=null", "observe.console=plain", *LORA, *settings),
    ).check()


def winnow_fails(home: Path, *settings: str) -> str:
    words = "train", "quickstart", *SETTINGS, "run.name=refused", *LORA, *settings
    said = winnow(home, *words)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert not (home / "runs" / "refused").exists()
    return said.err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run, `whole`."""
    folder = tmp_path_factory.mktemp("home")
    train(folder, "whole")
    return folder


def model_folder(home: Path, run: str, step: int = STEPS) -> Path:
    return home / "runs" / run / "checkpoints" / f"step-{step}" / "model"


def test_a_checkpoint_holds_the_adapter_alone(home: Path) -> None:
    folder = model_folder(home, "whole")
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    (start,) = (home / "cache" / "warm-starts").glob("[!.]*")
    assert json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(start)
    figures = read_metrics(home / "runs" / "whole" / "metrics.jsonl")
    assert [line["step"] for line in figures if "actor/loss" in line] == [*range(1, STEPS + 1)]


def test_a_run_that_was_cut_off_ends_with_the_same_bits(home: Path) -> None:
    run = home / "runs" / "cut"
    shutil.copytree(home / "runs" / "whole", run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > 3:
            shutil.rmtree(checkpoint.path)
    said = winnow(home, "resume", str(run)).check()
    assert "after step 3" in said.out + said.err
    assert differences(home / "runs" / "whole", run) == []


def test_a_fork_trains_the_adapter_of_its_origin_on(home: Path) -> None:
    said = train(home, "fork", f"run.fork=runs/whole@{STEPS - 1}").out
    assert f"Forked from runs/whole after step {STEPS - 1} of now {STEPS}\n" in said
    assert differences(home / "runs" / "whole", home / "runs" / "fork") == []
    rank = winnow_fails(home, "run.fork=runs/whole", "model.adapter.rank=2", "trainer.steps=9")
    assert "model.adapter.rank was 4 and is 2; a fork takes over model, optimizer" in rank


def test_a_run_goes_on_where_its_warm_start_must_be_made_again(home: Path) -> None:
    run = home / "runs" / "moved"
    shutil.copytree(home / "runs" / "whole", run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > 4:
            shutil.rmtree(checkpoint.path)
    away = (home / "cache").rename(home / "gone")
    elsewhere = {"WINNOW_CACHE": str(home / "other")}
    try:
        in_this_process("resume", str(run), folder=home, environment=elsewhere).check()
    finally:
        away.rename(home / "cache")
    whole, moved = (
        (model_folder(home, name) / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "moved")
    )
    assert whole == moved


def test_exported_merged_or_alone_it_answers_alike(home: Path) -> None:
    winnow(home, "export", "runs/whole", "merged").check()
    winnow(home, "export", "runs/whole", "alone", "--adapter").check()
    tokenizer = AutoTokenizer.from_pretrained(home / "merged")
    ids = tokenizer("314159>", return_tensors="pt").input_ids
    base = json.loads((home / "alone" / "adapter_config.json").read_text())
    start = AutoModelForCausalLM.from_pretrained(base["base_model_name_or_path"])
    merged = AutoModelForCausalLM.from_pretrained(home / "merged")
    alone = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base["base_model_name_or_path"]), home / "alone"
    )
    with torch.no_grad():
        logits = [model.eval()(ids).logits for model in (merged, alone, start)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-5)
    assert float((logits[0] - logits[2]).abs().max()) > 1e-2


def test_a_checkpoint_is_evaluated_with_its_adapter(home: Path) -> None:
    said = winnow(home, "eval", "runs/whole").check()
    assert f"whole, step {STEPS}" in said.out


def test_an_adapter_is_not_exported_from_a_run_without_one(home: Path) -> None:
    winnow(
        home,
        *("train", "quickstart", *SETTINGS, "run.name=plain", "trainer.steps=1"),
        *("trainer.save_every=1", "observe.console=plain", "evaluation.every=null"),
    ).check()
    said = winnow(home, "export", "runs/plain", "nothing", "--adapter")
    assert said.code == 2
    assert "runs/plain was trained without an adapter; leave --adapter out" in said.err
    assert not (home / "nothing").exists()


def test_a_base_model_that_is_gone_is_named(home: Path) -> None:
    (start,) = (home / "cache" / "warm-starts").glob("[!.]*")
    away = start.rename(home / "away")
    try:
        said = winnow(home, "export", "runs/whole", "orphan")
        assert said.code == 2
        assert f"is an adapter of {start}, which is gone" in said.err.replace("\n", " ")
    finally:
        away.rename(start)
