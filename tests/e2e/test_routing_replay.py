"""Runs that train a mixture with the experts that the engine chose, cut off and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill import STEPS, differences
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, cut_off, in_forked_process, winnow

from winnow.checkpoints.checkpoint import checkpoints_in, load_state
from winnow.observe.jsonl import read_metrics
from winnow.types import PROMPT_ROUTES, ROUTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SETTINGS = (
    *("model.path=model", "warm_start=none", "rollout.routing_replay=true"),
    *("data.task.min_digits=2", "data.task.max_digits=4", "evaluation.before=false"),
    *("data.task.eval_problems=2", "sampling/filter=none", "sampling.groups_per_step=3"),
    "trainer.mini_batch_groups=null",
    *("sampling.max_staleness=1", "sampling.lookahead=1", "rollout.n=2"),
    *("rollout.max_response_tokens=12", "rollout.engine.slots=5", "reward.overlong.enabled=false"),
    *(f"trainer.steps={STEPS}", "trainer.save_every=1", "trainer.keep_last=null"),
    *("optim.lr=0.01", "run.threads=1", "observe.console=plain"),
)


def train(home: Path, name: str, *settings: str) -> Outcome:
    return winnow(home, "train", "quickstart", *SETTINGS, f"run.name={name}", *settings)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    digits_folder(home / "model", experts=True, num_hidden_layers=2, initializer_range=0.3)
    train(home, "whole").check()
    return home


def figures(home: Path, name: str) -> list[dict[str, Any]]:
    lines = read_metrics(home / "runs" / name / "metrics.jsonl")
    return [line for line in lines if "actor/loss" in line]


def test_the_engines_choice_is_the_trainers_while_both_compute_alike(home: Path) -> None:
    lines = figures(home, "whole")
    assert len(lines) == STEPS
    for line in lines:
        assert line["experts/max_load"] >= 1
        assert 0 <= line["experts/unused"] < 1
        assert line["experts/rerouted"] < 0.5
    # Of the first step no router has moved.
    assert lines[0]["experts/rerouted"] == 0


def test_groups_that_are_carried_over_keep_their_routes(home: Path) -> None:
    run = cut_off(home, "whole", "cut", 1)
    (kept,) = (each for each in checkpoints_in(run / "checkpoints") if each.step == 1)
    groups = load_state(kept)["sampler"]["ledger"]["groups"]
    answers = [a for group in groups.qualified.values() for a in group.answers]
    carried = [answer.trajectory for answer in answers]
    assert carried
    for trajectory in carried:
        assert trajectory.extras[ROUTES].shape == (len(trajectory.token_ids), 2, 2)
    assert len({id(each.extras[PROMPT_ROUTES]) for each in carried}) < len(carried)
    winnow(home, "resume", str(run)).check()
    assert differences(home / "runs" / "whole", run) == []


def test_routes_reach_ranks_from_an_engine_in_a_process_of_its_own(
    home: Path, server: Server
) -> None:
    apart = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=2", "rollout.engine.processes=1")
    words = "train", "quickstart", *SETTINGS, "run.name=apart", *apart, "trainer.steps=2"
    in_forked_process(server, *words, folder=home, spares=SPARES).check()
    here, there = figures(home, "whole"), figures(home, "apart")
    for name in ("experts/max_load", "experts/unused", "experts/rerouted"):
        assert there[0][name] == here[0][name], name
    assert there[0]["mismatch/abs_delta"] < 1e-5


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("model.path=dense", "and Qwen3ForCausalLM has none"),
        (
            "rollout/engine=http rollout.engine.url=http://127.0.0.1:9 run.deterministic=false",
            "does not support rollout.routing_replay=true",
        ),
    ],
)
def test_what_cannot_replay_is_refused_in_one_line(home: Path, settings: str, line: str) -> None:
    if not (home / "dense").exists():
        digits_folder(home / "dense")
    said = train(home, "refused", *settings.split())
    assert said.code == 2
    assert line in said.err
    assert "rollout.routing_replay=true" in said.err
    assert "set it to false" in said.err or "set one of them to false" in said.err
