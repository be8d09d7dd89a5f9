"""Runs that are repeated, cut off and continued, in this process: the same bits each time.

A run that was killed after step k is a run's folder without its later checkpoints: everything
else that is later must not matter.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from benchmarks.kill import SETTINGS, STEPS, contents, differences, figures
from tests.winnow_command import Outcome, in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.runs.checkpoint import (
    MANIFEST,
    Checkpoint,
    _write_manifest,
    checkpoints_in,
    load_state,
    read_manifest,
)
from winnow.runs.state_file import write_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LATE_SCORER = """
import asyncio, random

dice = random.SystemRandom()


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, delay=0):
    if dice.random() < 0.5:
        await asyncio.sleep(dice.uniform(0, delay))
    return 1.0 if solution_str.rpartition("#")[2] == ground_truth else -1.0
"""


@dataclass(frozen=True)
class Home:
    """Where these commands are typed."""

    path: Path

    def winnow(self, *arguments: str) -> Outcome:
        cache = {"WINNOW_CACHE": str(self.path / "cache")}
        return in_this_process(*arguments, folder=self.path, environment=cache)

    def train(self, name: str, *settings: str) -> Outcome:
        return self.winnow(
            *("train", "quickstart", *SETTINGS, f"run.name={name}", "trainer.save_every=1"),
            *("trainer.keep_last=null", "observe.console=plain", *settings),
        )

    def run(self, name: str) -> Path:
        return self.path / "runs" / name

    def cut_off(self, name: str, copy: str, step: int) -> Path:
        """A copy of a run that died after `step` was saved."""
        run = self.run(copy)
        shutil.copytree(self.run(name), run)
        for checkpoint in checkpoints_in(run / "checkpoints"):
            if checkpoint.step > step:
                shutil.rmtree(checkpoint.path)
        return run


@pytest.fixture(scope="module", autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    (home.path / "calm.txt").write_text(home.train("calm").check().out)
    return home


def closing(out: str, name: str) -> tuple[list[str], list[str]]:
    """The closing screen line by line, without the times, and the phases that it times."""
    screen = out[out.rindex(f"{name}: done") :]
    lines = [line.rstrip().replace(name, "NAME") for line in screen.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.endswith("Time"))
    last = next(i for i in range(first, len(lines)) if "in all" in lines[i][40:])
    edge = lines[first].index("Time")
    phases = [re.sub(r"[\d:.%]+", "", line[edge:]).strip() for line in lines[first : last + 1]]
    left = [line[:edge] for line in lines[first : last + 1]]
    plain = [
        " ".join(line.strip("─ ").split()) for line in lines[:first] + left + lines[last + 1 :]
    ]
    return plain, sorted(phases)


def test_the_same_seed_gives_the_same_bits(home: Home) -> None:
    home.train("again").check()
    assert differences(home.run("calm"), home.run("again")) == []


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_continued_after_any_step_ends_with_the_same_bits(step: int, home: Home) -> None:
    run = home.cut_off("calm", f"from-{step}", step)
    said = home.train(run.name).check().out
    assert f"Continuing runs/{run.name} after step {step} of {STEPS}" in said
    assert differences(home.run("calm"), run) == []


def test_a_run_can_be_continued_by_its_folder_alone(home: Home) -> None:
    run = home.cut_off("calm", "by-folder", 3)
    said = home.winnow("resume", f"runs/{run.name}", "observe.console=plain").check().out
    assert differences(home.run("calm"), run) == []
    # What it proposes as the next command works: its own recipe holds a name that is taken.
    new = f"run.name={run.name}-1 seed=1"
    assert new in said
    config = f"runs/{run.name}/config.yaml"
    home.winnow("train", config, *new.split(), "trainer.steps=1").check()


def test_a_continued_run_closes_with_the_screen_of_an_undisturbed_one(home: Home) -> None:
    wanted = closing((home.path / "calm.txt").read_text(), "calm")
    assert [line for line in wanted[0] if line.startswith("A held-out problem: ")]
    assert {"warm-up", "rollout", "update", "evaluate", "in all"} < set(wanted[1])
    for step in (1, STEPS - 1, STEPS):
        run = home.cut_off("calm", f"at-{step}", step)
        said = home.train(run.name).check().out
        assert closing(said, run.name) == wanted


def test_a_checkpoint_can_be_chosen(home: Home) -> None:
    run = home.cut_off("calm", "chosen", STEPS)
    said = home.train("chosen", f"run.resume=runs/{run.name}/checkpoints/step-2").check()
    assert "after step 2" in said.out
    assert differences(home.run("calm"), run) == []
    said = home.winnow("resume", f"runs/{run.name}/checkpoints/step-4").check()
    assert "after step 4" in said.out
    assert differences(home.run("calm"), run) == []


def test_a_run_from_before_there_were_modes_goes_on_with_the_same_bits(home: Home) -> None:
    """Its states have no steps that wait to be learnt, its recipe no `trainer.mode`."""
    run = home.cut_off("calm", "older", 3)
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
    assert "after step 3" in home.train(run.name).check().out
    assert differences(home.run("calm"), run) == []


def test_a_damaged_newest_checkpoint_costs_one_step_and_no_bit(home: Home) -> None:
    run = home.cut_off("calm", "damaged", 4)
    path = run / "checkpoints/step-4/model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    said = home.train(run.name).check().out
    assert "step-4/model/model.safetensors is damaged" in said
    assert "going on from step 3" in said
    assert differences(home.run("calm"), run) == []


def test_another_recipe_is_refused_and_nothing_is_lost(home: Home) -> None:
    run = home.cut_off("calm", "other", 3)
    before = contents(run)
    said = home.train(run.name, "optim.lr=1e-3")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert "optim.lr was 0.0004 and is 0.001" in said.err
    assert contents(run) == before | {".lock": contents(run)[".lock"]}


def test_a_finished_run_says_so_and_changes_nothing(home: Home) -> None:
    run = home.cut_off("calm", "finished", STEPS)
    said = home.train(run.name).check().out
    assert f"runs/{run.name} is finished: nothing to do" in said
    assert differences(home.run("calm"), run) == []


def test_a_finished_run_is_made_longer_and_each_change_is_told(home: Home) -> None:
    flat = "optim.schedule=constant"
    home.train("long", flat, "trainer.steps=3").check()
    home.train("longer", flat, "trainer.steps=2").check()
    said = home.train("longer", flat, "trainer.steps=3", "evaluation.every=1").check().out
    assert "trainer.steps was 2 and is 3 from here on\n" in said
    assert "evaluation.every was 3 and is 1 from here on\n" in said
    model = "checkpoints/step-3/model/model.safetensors"
    assert (home.run("longer") / model).read_bytes() == (home.run("long") / model).read_bytes()
    shorter = home.train("longer", flat, "trainer.steps=1")
    assert (shorter.code, shorter.err.count("\n")) == (2, 1)
    assert "trainer.steps=1 is less than the 3 steps" in shorter.err


def test_passes_over_the_data_are_made_more_and_used_up(home: Home) -> None:
    rows = "data.max_train_prompts=18", "sampling.filter=none", "evaluation.every=null"
    for epochs, steps in ((1, 2), (1.5, 3)):
        said = home.train("passes", *rows, f"trainer.data_epochs={epochs}").check().out
        left = steps  # 18 - 16, and 27 - 24
        assert f"at most {steps} steps of 8; {left} prompts at their end fill no step" in said
        assert f"\n{left} prompts of the passes over the data were left" in said
        steps_done = [record["step"] for record in figures(home.run("passes"))]
        assert steps_done == list(range(steps + 1))
    assert "trainer.data_epochs was 1.0 and is 1.5 from here on\n" in said
    said = home.train("passes", *rows, "trainer.data_epochs=1.25").check().out
    assert "runs/passes is finished: nothing to do (trainer.data_epochs=N makes it longer" in said
    assert [record["step"] for record in figures(home.run("passes"))] == steps_done


def test_a_fork_that_changes_nothing_ends_as_its_origin(home: Home) -> None:
    before = contents(home.run("calm"))
    said = home.train("twin", "run.fork=runs/calm@4").check().out
    assert f"Forked from runs/calm after step 4 of now {STEPS}\n" in said
    assert " was " not in said
    assert differences(home.run("calm"), home.run("twin")) == []
    assert contents(home.run("calm")) == before
    assert yaml.safe_load((home.run("twin") / "config.yaml").read_text())["run"]["fork"] == (
        "runs/calm@4"
    )


def test_a_fork_learns_by_its_own_settings_and_can_be_resumed(home: Home) -> None:
    other = (
        *("run.fork=runs/calm@4", "optim.lr=1e-3", "optim.schedule=constant"),
        *("algorithm/policy_loss=cispo", "algorithm/kl/reward=fixed"),
    )
    said = home.train("own", *other).check().out
    assert "optim.lr was 0.0004 and is 0.001\n" in said
    rates = [record.get("actor/lr") for record in read_metrics(home.run("own") / "metrics.jsonl")]
    assert rates[-2:] == [0.001, 0.001]
    assert max(rate for rate in rates[:-2] if rate is not None) == 0.0004
    # Killed before its first checkpoint, it has its origin's alone.
    again = home.cut_off("own", "own-again", 4)
    assert "Continuing runs/own-again after step 4" in home.train(again.name, *other).check().out
    assert differences(home.run("own"), again) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["run.seed=1"], "run.seed was 0 and is 1"),
        (["model.dtype=bfloat16"], "model.dtype was 'float32' and is 'bfloat16'"),
        (["algorithm/advantage=gae"], "holds none; choose another"),
        (["trainer.steps=4"], "leaves nothing to train after step 4"),
        (["run.fork=runs/calm@99"], "has no checkpoint of step 99; there are: 1, 2,"),
        (["run.fork=runs/nobody"], "run.fork=runs/nobody is neither a run's folder"),
        (["rollout.n=6"], "groups under way, sampled by other settings: rollout.n was 4 and is 6"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_fork_that_the_state_cannot_hold_is_refused_and_leaves_no_folder(
    settings: list[str], words: str, home: Home
) -> None:
    said = home.train("refused", "run.fork=runs/calm@4", *settings)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert words in said.err
    assert not home.run("refused").exists()


def test_evaluation_leaves_no_trace_in_training(home: Home) -> None:
    home.train("unwatched", "evaluation.every=null", "evaluation.before=false").check()
    calm, unwatched = home.run("calm"), home.run("unwatched")
    assert contents(calm / "rollouts") == contents(unwatched / "rollouts")
    model = f"checkpoints/step-{STEPS}/model/model.safetensors"
    assert (calm / model).read_bytes() == (unwatched / model).read_bytes()


def test_a_half_precision_model_goes_on_from_its_full_precision_weights(home: Home) -> None:
    home.train("half", "model.dtype=bfloat16").check()
    state = load_state(Checkpoint(home.run("half") / "checkpoints/step-3", 3))
    assert {tensor.dtype for tensor in state["masters"].values()} == {torch.float32}
    run = home.cut_off("half", "half-again", 3)
    home.train(run.name, "model.dtype=bfloat16").check()
    assert differences(home.run("half"), run) == []


def test_a_scorer_of_random_delays_changes_no_bit(home: Home, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(LATE_SCORER)
    for name, delay in (("prompt", 0), ("late", 0.003), ("late-again", 0.003)):
        home.train(
            name,
            f"reward.function.path={scorer}",
            f"+reward.function.kwargs={{delay: {delay}}}",
        ).check()
    assert differences(home.run("prompt"), home.run("late")) == []
    assert differences(home.run("late"), home.run("late-again")) == []


def test_as_many_held_out_answers_keep_their_text_as_asked_and_the_same_each_time(
    home: Home,
) -> None:
    home.train("texts", "observe.rollout_text_groups=3", "trainer.steps=3").check()
    kept = []
    for step in (0, 3):
        table = read_rollouts(home.run("texts") / "eval" / f"step-{step}.parquet")
        assert len(set(table["group"].to_pylist())) == 8
        rows = table.to_pylist()
        kept.append({row["group"] for row in rows if row["response"] is not None})
        assert len(kept[-1]) == 3
    assert kept[0] == kept[1]


@pytest.mark.parametrize("settings", [["sampling.max_staleness=0"], ["sampling.lookahead=1"]])
def test_dropped_and_carried_groups_come_back_as_they_were(settings: list[str], home: Home) -> None:
    name = "-".join(settings).replace("=", "-")
    home.train(name, *settings).check()
    run = home.cut_off(name, f"{name}-again", 3)
    home.train(run.name, *settings).check()
    assert differences(home.run(name), run) == []


def test_greedy_baselines_come_back_as_they_were_and_advantages_are_above_them(home: Home) -> None:
    remax = ["algorithm/advantage=remax", "sampling.lookahead=1"]
    home.train("remax", *remax).check()
    run = home.cut_off("remax", "remax-again", 3)
    (*_, last) = checkpoints_in(run / "checkpoints")
    waiting = load_state(last)["sampler"]["ledger"]["groups"].open.values()
    assert any(group.answers[group.n].trajectory for group in waiting)
    assert any(group.answers[group.n].prefix for group in waiting)
    home.train(run.name, *remax).check()
    assert differences(home.run("remax"), run) == []
    table = read_rollouts(home.run("remax") / "rollouts").to_pylist()
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
    records = read_metrics(home.run("remax") / "metrics.jsonl")[1:]
    assert sum(r["sampling/tokens/baseline"] for r in records) == tokens
    booked = sum(r["sampling/tokens/trained"] for r in records)
    assert booked == sum(row["response_tokens"] for row in trained)
    lengths = [row["response_tokens"] for row in sampled if row["step"] == 1]
    assert records[0]["length/response/mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_groups_accepted_before_the_bound_are_kept_for_when_it_is_raised(home: Home) -> None:
    tight = ["sampling.max_groups_per_step=9", "sampling.on_bound=stop"]
    said = home.train("bound", *tight)
    assert said.code == 2
    assert "sampling.on_bound is stop" in said.err
    run = home.run("bound")
    (*_, last) = checkpoints_in(run / "checkpoints")
    accepted = load_state(last)["sampler"]["ledger"]["groups"].qualified
    assert accepted
    home.train("bound", "sampling.max_groups_per_step=200", "sampling.on_bound=stop").check()
    first = next(r for r in read_metrics(run / "metrics.jsonl") if r["step"] == last.step + 1)
    assert first["sampling/groups/trained"] == 8
    assert len(figures(run)) == STEPS + 1


def test_only_as_many_checkpoints_stay_as_asked_and_the_best(home: Home) -> None:
    best = "trainer.keep_best=eval/sort_digits/pass@1"
    home.train("kept", "trainer.keep_last=1", best, "trainer.keep_every=2").check()
    kept = [c.step for c in checkpoints_in(home.run("kept") / "checkpoints")]
    assert {2, 4, 6} <= set(kept) <= {2, 3, 4, 6}


def test_a_best_figure_that_no_evaluation_has_is_refused_before_training(home: Home) -> None:
    said = home.train("misnamed", "trainer.keep_best=eval/sort_digits/pass@9")
    assert said.code == 2
    assert "trainer.keep_best=eval/sort_digits/pass@9 is no figure" in said.err
    assert "eval/sort_digits/pass@1" in said.err
    assert not (home.run("misnamed") / "rollouts").exists()


def test_a_run_whose_machine_is_lost_goes_on_from_its_copy(home: Home, tmp_path: Path) -> None:
    url = f"trainer.checkpoint_url=file://{tmp_path}/copies"
    home.train("lost", url).check()
    shutil.rmtree(home.run("lost"))
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "copies" / "lost" / "checkpoints" / f"step-{step}")
    said = home.train("lost", url).check().out
    assert "Continuing runs/lost after step 3" in said
    assert differences(home.run("calm"), home.run("lost")) == []
