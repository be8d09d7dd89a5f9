"""Runs of three steps with the choices of `benchmarks.support`, on tiny models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.support import CHOICES, settings_of
from tests.faulty_http import serving
from tests.forked import Server
from tests.generate_server import GenerateServers
from tests.judges import judge_folder, judging
from tests.reward_models import classifier_folder
from tests.small_models import digits_folder
from tests.winnow_command import in_forked_process

from winnow.observe.jsonl import read_metrics

SPARES = 9
"""As many processes as any of these runs starts, or more."""
_ENGINE = """
from winnow.rollout.embedded.torch_engine import TorchEngine

class Mine(TorchEngine):
    def __init__(self, *, model, **options):
        super().__init__(model, 8, 64, **options)
"""
_TALK = """
from winnow.environments import Step

def double(digit: str) -> str:
    return str(2 * int(digit))

class Talk:
    def reset(self, row):
        return row["prompt"][::-1]

    def step(self, turn):
        return Step("5", reward=len(turn.text))
"""
_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def support_home(folder: Path, **shape: int) -> Path:
    """A folder with the files that the choices name."""
    for name, experts in (("dense", False), ("mixture", True)):
        changes = {"num_hidden_layers": 2, "initializer_range": 0.3, **shape}
        digits_folder(folder / name, experts=experts, **changes)
    judge_folder(folder / "judge", **shape)
    classifier_folder(folder / "classifier")
    (folder / "mine.py").write_text(_ENGINE)
    (folder / "talk.py").write_text(_TALK)
    (folder / "chat.jinja").write_text(_TEMPLATE)
    (folder / "small.yaml").write_text("trainer: {steps: 3}\n")
    return folder


def train_three_steps(home: Path, server: Server, names: Sequence[str], *settings: str) -> None:
    """Train three steps with a choice of each axis, and see that each choice had an effect."""
    with ExitStack() as stack:
        served = list(settings)
        if "http" in names:
            servers = GenerateServers(home, server)
            stack.callback(servers.close)
            model = "dense" if "dense" in names else "mixture"
            served.append(f"rollout.engine.url={servers.start(home / model)[0]}")
        if "judge, openai" in names:
            judge = stack.enter_context(serving([judging(lambda _: "7")]))
            served.append(f"reward.judge.base_url={judge.url}/v1")
        if "custom" in names and "routing replay" in names:
            served.append("rollout.engine.options={routes: true}")
        words = "train", "small.yaml", *settings_of(names), *served, "run.name=short"
        in_forked_process(server, *words, folder=home, spares=SPARES).check()
    steps = [line for line in read_metrics(home / "runs/short/metrics.jsonl") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3]
    figures = {CHOICES[name].figure for name in names} - {""}
    for line in steps:
        assert [figure for figure in figures if not math.isfinite(line.get(figure, math.nan))] == []
    assert max(line["actor/grad_norm"] for line in steps) > 0
