"""Runs with images: on ranks, cut off, with an adapter and an environment; what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks.kill import differences
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_folder
from tests.winnow_command import cut_off, in_forked_process, winnow
from transformers import AutoModelForImageTextToText, LlavaConfig, Qwen3VLMoeConfig

from winnow.observe.jsonl import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 2
SETTINGS = (
    *("data.task.eval_problems=4", "warm_start.steps=20", "rollout.n=4", "evaluation.n=1"),
    *("sampling.groups_per_step=4", "sampling/filter=none", "rollout.engine.slots=16"),
    *(f"trainer.steps={STEPS}", "trainer.save_every=1", "trainer.keep_last=null"),
    *("trainer.mini_batch_groups=2", "evaluation.every=null", "optim.warmup_steps=1"),
    *("run.threads=1", "observe.console=plain"),
)
ENVIRONMENT = """
from winnow.data.shapes import draw
from winnow.environments import Step

class Twice:
    def reset(self, row):
        self.asked = False
        return ()

    def step(self, turn):
        if self.asked:
            return Step(reward=float(turn.text == "=2"), done=True)
        self.asked = True
        cells = "scc." if len(turn.text) % 2 else "ss.c"
        png = draw(f"s/{cells}/{len(turn.text)}").png
        parts = {"type": "image", "image": png}, {"type": "text", "text": "s?"}
        return Step([{"role": "user", "content": list(parts)}])
"""
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<|before|><|image|><|behind|>' if p.type == 'image' else p.text }}"
    "{% endfor %}{% endif %}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def arguments(name: str, *settings: str) -> list[str]:
    return ["train", "quickstart-images", *SETTINGS, f"run.name={name}", *settings]


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A finished run in one process."""
    winnow(home, *arguments("whole")).check()
    return home / "runs" / "whole"


def model_folder(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS}" / "model"


def test_a_run_that_is_cut_off_ends_with_the_same_bits(home: Path, whole: Path) -> None:
    run = cut_off(home, "whole", "resumed", STEPS - 1)
    winnow(home, "resume", str(run)).check()
    assert differences(whole, run, STEPS) == []


def test_on_ranks_it_learns_the_same_and_transformers_loads_the_result(
    home: Path, whole: Path, server: Server
) -> None:
    settings = "trainer/strategy=fsdp2", "rollout.engine.processes=1", "algorithm/kl/loss=fixed"
    more = "algorithm.kl.loss.coef=1e-9", "model.gradient_checkpointing=true"
    cache = {"WINNOW_CACHE": str(home / "cache")}
    words = arguments("ranks", *settings, *more)
    in_forked_process(server, *words, folder=home, environment=cache, spares=SPARES).check()
    for run in (whole, home / "runs" / "ranks"):
        lines = [line for line in read_metrics(run / "metrics.jsonl") if "actor/loss" in line]
        assert lines[0]["mismatch/max_delta"] < 1e-5
    norms = [
        [line.get("actor/grad_norm") for line in read_metrics(run / "metrics.jsonl")][1:]
        for run in (whole, home / "runs" / "ranks")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    folder = model_folder(home / "runs" / "ranks")
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert (folder / "preprocessor_config.json").is_file()


def test_an_adapter_learns_from_images_that_an_environment_shows(home: Path) -> None:
    (home / "twice.py").write_text(ENVIRONMENT)
    (home / "chat.jinja").write_text(CHAT_TEMPLATE)
    settings = "environment=custom", "environment.path=twice.py:Twice", "model/adapter=lora"
    more = "environment.history=fork", "rollout.max_response_tokens=24"
    chat = "data.chat_template=chat.jinja"
    winnow(home, *arguments("shown", *settings, *more, chat)).check()
    lines = read_metrics(home / "runs" / "shown" / "metrics.jsonl")
    first = next(line for line in lines if "actor/loss" in line)
    assert first["mismatch/max_delta"] < 1e-5
    assert first["environment/faults"] == 0
    winnow(home, "export", "runs/shown", "adapter", "--adapter").check()
    of_task = "data.task.eval_problems=4", "warm_start=none", "rollout.max_response_tokens=8"
    recipe = "--recipe", "quickstart-images"
    winnow(home, "eval", "adapter", *recipe, *of_task).check()


@pytest.fixture(scope="module")
def models(home: Path, whole: Path) -> Path:
    """Folders of models that cannot be trained on images."""
    place = home / "models"
    digits_folder(place / "text")
    for name in ("nothing", "moe", "llava"):
        shutil.copytree(model_folder(whole), place / name)
    (place / "nothing" / "preprocessor_config.json").unlink()
    Qwen3VLMoeConfig().save_pretrained(place / "moe")
    LlavaConfig().save_pretrained(place / "llava")
    return place


REFUSED = {
    "model.path=models/text": "has images, and the model takes text alone; set model.path to a",
    "model.path=models/nothing": "cannot read its preprocessor_config.json: ",
    "model.path=models/moe": "vision-language models of type qwen3_vl_moe are not supported; give",
    "model.path=models/llava": "vision-language models of type llava are not supported; give one",
    "algorithm/advantage=gae": "takes text alone, and ",
    "trainer/strategy=fsdp2 trainer.strategy.sequence=2": "set trainer.strategy.sequence=1",
    "rollout.routing_replay=true": "has none; set it to false",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_takes_no_images_is_refused_in_one_line(
    home: Path, whole: Path, models: Path, setting: str
) -> None:
    start = "warm_start=none", f"model.path={model_folder(whole)}"
    without = [each for each in SETTINGS if not each.startswith("warm_start")]
    name = "run.name=refused"
    words = ["train", "quickstart-images", *without, name, *start, *setting.split()]
    outcome = winnow(home, *words)
    assert outcome.code == 2, outcome
    (line,) = outcome.err.splitlines()[-1:]
    assert REFUSED[setting] in line
    assert "Traceback" not in outcome.err
    shutil.rmtree(home / "runs" / "refused", ignore_errors=True)
