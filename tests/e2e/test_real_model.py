"""SmolLM2-135M-Instruct trained as a user does: by rewards, with an adapter, on ranks, by SFT.

Each run is a step of four answers or two demonstrations.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.real_model import REWARD, SMALL, URL, smollm2
from tests.winnow_command import in_own_process, in_this_process
from transformers import AutoModelForCausalLM, AutoTokenizer

import winnow
from winnow.models.lora import adapter_base
from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run, `whole`."""
    smollm2()
    folder = tmp_path_factory.mktemp("home")
    # So few answers are right so seldom that they would teach nothing.
    (folder / "reward.py").write_text(REWARD)
    words = ("train", "smollm2", "run.name=whole", *SMALL)
    said = in_this_process(*words, folder=folder).check().out.replace("\n", " ")
    assert f"{URL}: weights dequantised from Q4_1 and Q8_0" in said
    return folder


def last(home: Path, name: str) -> Record:
    return read_metrics(home / "runs" / name / "metrics.jsonl")[-1]


def test_the_tutorials_evaluation_comparison_export_and_chat(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "evaluation.n=1", "data.task.eval_problems=3", "rollout.max_response_tokens=8"
    asked += ("reward.function.path=null",)
    for model, out in ((URL, "base"), ("runs/whole", "trained")):
        recipe = ("--recipe", "smollm2") if model == URL else ()
        words = ("eval", model, *recipe, "--out", out, "run.threads=1", *asked)
        in_this_process(*words, folder=home).check()
        report = json.loads((home / out / "report.json").read_text())
        assert report["dequantised_from"] == "Q4_1 and Q8_0"
    assert report["sources"]["arithmetic"]["problems"] == 3
    assert "arithmetic" in in_this_process("compare", "base", "trained", folder=home).check().out
    in_this_process("export", "runs/whole", "model", folder=home).check()
    config = json.loads((home / "model" / "config.json").read_text())
    assert (config["dequantised_from"], config["model_type"]) == ("Q4_1 and Q8_0", "llama")
    monkeypatch.chdir(home)
    with winnow.LLM("model", ["run.threads=1", "rollout.engine.slots=2"]) as llm:
        [[answer]] = llm.generate(["What is 7 + 8?"], temperature=0, max_tokens=8)
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained("model").apply_chat_template(
        [{"role": "user", "content": "What is 7 + 8?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    theirs = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    assert theirs[0, prompt["input_ids"].shape[1] :].tolist() == list(answer.token_ids)


def test_log_probs_of_engine_and_trainer_agree_in_the_run(home: Path) -> None:
    record = last(home, "whole")
    assert record["mismatch/max_delta"] < 1e-4
    assert record["actor/entropy"] > 0.5


def test_an_adapter_is_trained_on_the_model_that_its_url_names(home: Path) -> None:
    words = "model/adapter=lora", "model.adapter.rank=4", "evaluation.before=false"
    in_this_process("train", "smollm2", "run.name=lora", *SMALL, *words, folder=home).check()
    assert last(home, "lora")["mismatch/max_delta"] < 1e-4
    assert adapter_base(home / "runs/lora/checkpoints/step-1/model") == URL


def test_two_ranks_and_an_engine_apart_take_the_same_step(home: Path) -> None:
    ranks = "trainer/strategy=fsdp2", "trainer.strategy.ranks=2", "rollout.engine.processes=1"
    words = ("train", "smollm2", "run.name=ranks", *SMALL, *ranks, "evaluation.before=false")
    in_own_process(*words, folder=home).check()
    one, two = last(home, "whole"), last(home, "ranks")
    assert two["mismatch/max_delta"] < 1e-4
    assert one["actor/grad_norm"] > 0
    assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-3)


def test_demonstrations_are_imitated_through_the_chat_template(home: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "completion": str(n + 1)} for n in (2, 3)]
    (home / "demos.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = (
        *("sft.train_files=[demos.jsonl]", "sft.eval_files=[demos.jsonl]", "sft.batch_size=2"),
        *(f"model.path={URL}", "trainer.steps=2", "optim.lr=1e-4", "optim.warmup_steps=0"),
        *("run.name=sft", "run.threads=1", "observe.console=plain", "trainer.data_epochs=null"),
    )
    in_this_process("sft", "sft", *words, folder=home).check()
    records = read_metrics(home / "runs" / "sft" / "metrics.jsonl")
    losses = [r["sft/held_out_loss"] for r in records if "sft/held_out_loss" in r]
    assert losses[-1] < losses[0]
