"""Runs that are repeated, cut off and continued, in this process: the same bits each time.

A run that was killed after step k is a run's folder without its later checkpoints: everything
else that is later must not matter.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.kill import STEPS, contents, differences, figures
from tests.winnow_command import cut_off, train

from winnow.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    _write_manifest,
    checkpoints_in,
    load_state,
    read_manifest,
)
from winnow.checkpoints.state_file import write_state
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    train(home, "calm").check()
    return home


def at(home: Path, name: str) -> Path:
    return home / "runs" / name


@pytest.mark.bits
def test_the_same_seed_gives_the_same_bits_and_another_does_not(home: Path) -> None:
    train(home, "again").check()
    assert differences(at(home, "calm"), at(home, "again")) == []
    train(home, "other", "run.seed=1", "warm_start.seed=0", "trainer.steps=1").check()
    model = "checkpoints/step-1/model/model.safetensors"
    assert (at(home, "calm") / model).read_bytes() != (at(home, "other") / model).read_bytes()


@pytest.mark.parametrize("step", [1, STEPS - 1, STEPS])
def test_a_run_continued_after_any_step_ends_with_the_same_bits(step: int, home: Path) -> None:
    run = cut_off(home, "calm", f"from-{step}", step)
    said = train(home, run.name).check().out
    begins = f"Continuing runs/{run.name} after step {step} of {STEPS}"
    assert (f"runs/{run.name} is finished: nothing to do" if step == STEPS else begins) in said
    assert differences(at(home, "calm"), run) == []


def test_a_run_from_before_there_were_modes_goes_on_with_the_same_bits(home: Path) -> None:
    """Its states have no steps that wait to be learnt, its recipe no `trainer.mode`."""
    run = cut_off(home, "calm", "older", 3)
    newest = checkpoints_in(run / "checkpoints")[-1]
    state = load_state(newest)
    ledger = state["sampler"]["ledger"]
    del state["pending"], ledger["learns"], ledger["next_turn"], ledger["turns_again"]
    write_state(newest.path, state)
    for path in (run / "config.yaml", newest.path / "config.yaml"):
        recipe = yaml.safe_load(path.read_text())
        del recipe["trainer"]["mode"], recipe["observe"]["trace"]
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    manifest = read_manifest(newest)
    (newest.path / MANIFEST).unlink()
    _write_manifest(newest.path, manifest, {})
    assert "after step 3" in train(home, run.name).check().out
    assert differences(at(home, "calm"), run) == []


def test_a_finished_run_is_made_longer_and_each_change_is_told(home: Path) -> None:
    flat = "optim.schedule=constant"
    train(home, "long", flat, "trainer.steps=3").check()
    train(home, "longer", flat, "trainer.steps=2").check()
    said = train(home, "longer", flat, "trainer.steps=3", "evaluation.every=1").check().out
    assert "trainer.steps was 2 and is 3 from now on\n" in said
    assert "evaluation.every was 2 and is 1 from now on\n" in said
    model = "checkpoints/step-3/model/model.safetensors"
    assert (at(home, "longer") / model).read_bytes() == (at(home, "long") / model).read_bytes()
    shorter = train(home, "longer", flat, "trainer.steps=1")
    assert (shorter.code, shorter.err.count("\n")) == (2, 1)
    assert "trainer.steps=1 is below the 3 steps" in shorter.err


def test_passes_over_the_data_are_made_more_and_used_up(home: Path) -> None:
    rows = "data.max_train_prompts=18", "sampling.filter=none", "evaluation.every=null"
    for epochs, steps in ((1, 2), (1.5, 3)):
        said = train(home, "passes", *rows, f"trainer.data_epochs={epochs}").check().out
        left = steps  # 18 - 16, and 27 - 24
        assert f"at most {steps} steps of 8; {left} prompts at their end fill no step" in said
        assert f"\n{left} prompts of the passes over the data are unused" in said
        steps_done = [record["step"] for record in figures(at(home, "passes"))]
        assert steps_done == list(range(steps + 1))
    assert "trainer.data_epochs was 1.0 and is 1.5 from now on\n" in said
    said = train(home, "passes", *rows, "trainer.data_epochs=1.25").check().out
    assert (
        "runs/passes is finished: nothing to do (raise trainer.data_epochs to train longer" in said
    )
    assert [record["step"] for record in figures(at(home, "passes"))] == steps_done


def test_a_fork_that_changes_nothing_ends_as_its_origin(home: Path) -> None:
    before = contents(at(home, "calm"))
    said = train(home, "twin", "run.fork=runs/calm@2").check().out
    assert f"Forked from runs/calm after step 2, to be trained to step {STEPS}\n" in said
    assert not re.search(r" was .+ and is | changed from .+ to ", said)
    assert differences(at(home, "calm"), at(home, "twin")) == []
    assert contents(at(home, "calm")) == before
    assert yaml.safe_load((at(home, "twin") / "config.yaml").read_text())["run"]["fork"] == (
        "runs/calm@2"
    )


def test_a_fork_learns_by_its_own_settings_and_can_be_resumed(home: Path) -> None:
    other = (
        *("run.fork=runs/calm@2", "optim.lr=1e-3", "optim.schedule=constant"),
        *("algorithm/policy_loss=cispo", "algorithm/kl/reward=fixed"),
    )
    said = train(home, "own", *other).check().out
    assert "optim.lr was 0.0008 and is 0.001\n" in said
    rates = [record.get("actor/lr") for record in read_metrics(at(home, "own") / "metrics.jsonl")]
    assert rates[-2:] == [0.001, 0.001]
    assert max(rate for rate in rates[:-2] if rate is not None) == 0.0008
    # Killed before its first checkpoint, it has its origin's alone.
    again = cut_off(home, "own", "own-again", 2)
    assert "Continuing runs/own-again after step 2" in train(home, again.name, *other).check().out
    assert differences(at(home, "own"), again) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["run.seed=1"], "run.seed was 0 and is 1"),
        (["model.dtype=bfloat16"], "model.dtype was 'float32' and is 'bfloat16'"),
        (["algorithm/advantage=gae"], "has none; choose another"),
        (["trainer.steps=3"], "leaves nothing to train after step 3"),
        (["run.fork=runs/calm@99"], "has no checkpoint of step 99; there are: 1, 2,"),
        (
            ["rollout.n=6"],
            "groups in flight, sampled with other settings: rollout.n was 4 and is 6",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_fork_that_the_state_cannot_hold_is_refused_and_leaves_no_folder(
    settings: list[str], words: str, home: Path
) -> None:
    said = train(home, "refused", "run.fork=runs/calm@3", *settings)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert words in said.err
    assert not at(home, "refused").exists()


def test_evaluation_leaves_no_trace_in_training(home: Path) -> None:
    train(home, "unwatched", "evaluation.every=null", "evaluation.before=false").check()
    calm, unwatched = at(home, "calm"), at(home, "unwatched")
    assert contents(calm / "rollouts") == contents(unwatched / "rollouts")
    model = f"checkpoints/step-{STEPS}/model/model.safetensors"
    assert (calm / model).read_bytes() == (unwatched / model).read_bytes()


def test_a_half_precision_model_goes_on_from_its_full_precision_weights(home: Path) -> None:
    train(home, "half", "model.dtype=bfloat16").check()
    state = load_state(Checkpoint(at(home, "half") / "checkpoints/step-3", 3))
    assert {tensor.dtype for tensor in state["masters"].values()} == {torch.float32}
    run = cut_off(home, "half", "half-again", 3)
    train(home, run.name, "model.dtype=bfloat16").check()
    assert differences(at(home, "half"), run) == []


def test_dropped_groups_come_back_as_they_were(home: Path) -> None:
    train(home, "dropped", "sampling.max_staleness=0").check()
    run = cut_off(home, "dropped", "dropped-again", 3)
    train(home, run.name, "sampling.max_staleness=0").check()
    assert differences(at(home, "dropped"), run) == []


def test_greedy_baselines_come_back_as_they_were_and_advantages_are_above_them(home: Path) -> None:
    remax = ["algorithm/advantage=remax", "sampling.lookahead=1"]
    train(home, "remax", *remax).check()
    run = cut_off(home, "remax", "remax-again", 3)
    (*_, last) = checkpoints_in(run / "checkpoints")
    waiting = load_state(last)["sampler"]["ledger"]["groups"].open.values()
    assert any(group.answers[group.n].trajectory for group in waiting)
    assert any(group.answers[group.n].prefix for group in waiting)
    train(home, run.name, *remax).check()
    assert differences(at(home, "remax"), run) == []
    table = read_rollouts(at(home, "remax") / "rollouts").to_pylist()
    trained = [row for row in table if row["outcome"] == "trained"]
    greedy = {row["group"]: row for row in trained if row["kind"] == "greedy"}
    assert len(greedy) == 8 * STEPS
    sampled = [row for row in trained if row["kind"] == "sampled"]
    assert len(sampled) == 4 * len(greedy)
    for row in sampled:
        above = row["reward"] - greedy[row["group"]]["reward"]
        assert row["advantage"] == pytest.approx(above, abs=1e-6)
    assert {row["advantage"] for row in greedy.values()} == {None}
    tokens = sum(r["response_tokens"] for r in table if r["kind"] == "greedy")
    records = read_metrics(at(home, "remax") / "metrics.jsonl")[1:]
    assert sum(r["sampling/tokens/baseline"] for r in records) == tokens


def test_a_best_figure_that_no_evaluation_has_is_refused_before_training(home: Path) -> None:
    said = train(home, "misnamed", "trainer.keep_best=eval/sort_digits/pass@9")
    assert said.code == 2
    assert "trainer.keep_best=eval/sort_digits/pass@9 is not an evaluation metric" in said.err
    assert "eval/sort_digits/pass@1" in said.err
    assert not (at(home, "misnamed") / "rollouts").exists()


def test_a_run_whose_machine_is_lost_goes_on_from_its_copy(home: Path, tmp_path: Path) -> None:
    url = f"trainer.checkpoint_url=file://{tmp_path}/copies"
    train(home, "lost", url).check()
    shutil.rmtree(at(home, "lost"))
    shutil.rmtree(tmp_path / "copies" / "lost" / "checkpoints" / f"step-{STEPS}")
    said = train(home, "lost", url).check().out
    assert "Continuing runs/lost after step 3" in said
    assert differences(at(home, "calm"), at(home, "lost")) == []
