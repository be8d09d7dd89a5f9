"""A run that trains an adapter: resumed with the same bits, evaluated, exported both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.kill import contents
from peft import PeftModel
from tests.winnow_command import cut_off, in_this_process, train, winnow
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.observe.jsonl import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 3
LORA = (
    *("model/adapter=lora", "model.adapter.rank=4", "optim.lr=5e-3", f"trainer.steps={STEPS}"),
    "warm_start.steps=30",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run, `whole`."""
    folder = tmp_path_factory.mktemp("home")
    train(folder, "whole", *LORA).check()
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


def test_a_run_ends_with_the_same_bits_where_its_warm_start_must_be_made_again(
    home: Path,
) -> None:
    run = cut_off(home, "whole", "moved", STEPS - 1)
    away = (home / "cache").rename(home / "gone")
    elsewhere = {"WINNOW_CACHE": str(home / "other")}
    try:
        in_this_process("resume", str(run), folder=home, environment=elsewhere).check()
    finally:
        away.rename(home / "cache")
    weights, rollouts = (
        [contents(home / "runs" / name / part) for name in ("whole", "moved")]
        for part in (f"checkpoints/step-{STEPS}/model", "rollouts")
    )
    name = "adapter_model.safetensors"
    assert (weights[0][name], rollouts[0]) == (weights[1][name], rollouts[1])


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


def test_a_base_model_that_is_gone_is_named(home: Path) -> None:
    (start,) = (home / "cache" / "warm-starts").glob("[!.]*")
    away = start.rename(home / "away")
    try:
        said = winnow(home, "export", "runs/whole", "orphan")
        assert said.code == 2
        assert f"is an adapter of {start}, which does not exist" in said.err.replace("\n", " ")
    finally:
        away.rename(start)
