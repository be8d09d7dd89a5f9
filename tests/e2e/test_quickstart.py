"""`winnow train quickstart`, `eval` and `export`, as a newcomer types them; a shortened run.

All tests of this file share one warm start and one trained run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from tests.winnow_command import Outcome, in_own_process, in_this_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.config.load import load_recipe
from winnow.data.sort_digits import held_out_problems, is_held_out, prompt_text, solution
from winnow.learning.learner import lr_at
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger_diff import check, open_ledger
from winnow.observe.metrics import OUTCOMES
from winnow.observe.rollouts import read_rollouts
from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, GROUPS, ANSWERS, HELD_OUT, EVALUATED = 12, 64, 8, 200, 2
HALF = STEPS // 2
SETTINGS = [
    f"trainer.steps={STEPS}",
    f"trainer.save_every={HALF}",
    "optim.warmup_steps=2",
    f"data.task.eval_problems={HELD_OUT}",
    f"evaluation.n={EVALUATED}",
    "run.threads=1",
]
ONE_STEP = [
    *("trainer.steps=1", "optim.warmup_steps=0", "evaluation.before=false", "run.threads=1"),
    "data.task.eval_problems=20",
]
PASS, GREEDY = "eval/sort_digits/pass@1", "eval/sort_digits/greedy"
CLOCKED = ("time/", "sft/time_s", "start/", "scoring/", "throughput/", "memory/")


@dataclass(frozen=True)
class Home:
    """Where commands of these tests are typed, with a cache of warm starts of its own."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"WINNOW_CACHE": str(self.path / "cache")}

    def winnow(self, *arguments: str) -> Outcome:
        return in_this_process(*arguments, folder=self.path, environment=self.environment)

    def run_of(self, name: str) -> Run:
        return Run(RunFolder.open(self.path / "runs" / name))


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: RunFolder

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return [dict(record) for record in read_metrics(self.folder.metrics)]

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = read_rollouts(self.folder.rollouts).to_pylist()
        return rows

    def evaluation(self, name: str) -> list[dict[str, Any]]:
        """The sampled answers to held-out problems."""
        rows: list[dict[str, Any]]
        rows = read_rollouts(self.folder.evaluations / f"{name}.parquet").to_pylist()
        return [row for row in rows if row["outcome"] == "held_out"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def screen(home: Home) -> Outcome:
    """What the run printed."""
    command = ["train", "quickstart", *SETTINGS, "run.name=demo"]
    return in_own_process(*command, folder=home.path, environment=home.environment)


@pytest.fixture(scope="module")
def run(home: Home, screen: Outcome) -> Run:
    screen.check()
    return home.run_of("demo")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def test_held_out_accuracy_rises_by_a_quarter_at_least(run: Run) -> None:
    before, after = run.records[0], run.records[-1]
    assert after[PASS] - before[PASS] >= 0.25
    assert after[GREEDY] - before[GREEDY] >= 0.15
    assert before[PASS] < 0.45, "the start is deliberately bad"


def test_every_generated_token_is_accounted_for(run: Run) -> None:
    total = defaultdict(int)
    for record in run.records:
        for name in ("generated", *OUTCOMES):
            total[name] += record.get(f"sampling/tokens/{name}", 0)
    in_progress = run.records[-1]["sampling/tokens/in_progress"]
    assert total["generated"] == sum(total[name] for name in OUTCOMES) + in_progress
    assert total["trained"] > 0.5 * total["generated"]


def test_the_ledger_adds_up_and_the_timeline_has_the_phases_of_the_figures(run: Run) -> None:
    report = check(open_ledger(run.folder.path))
    assert report.faults == ()
    assert report.tokens == {
        fate: sum(record.get(f"sampling/tokens/{fate}", 0) for record in run.records)
        for fate in report.tokens
    }
    events = json.loads(run.folder.trace.read_text())
    lasted = [event["dur"] / 1e6 for event in events if event["name"] == "rollout"]
    booked = [record["time/rollout_s"] for record in run.records if "time/rollout_s" in record]
    assert lasted == pytest.approx(booked, abs=2e-6)


def test_the_rollouts_hold_the_tokens_of_the_account_step_by_step(run: Run) -> None:
    written: dict[tuple[int, str], int] = defaultdict(int)
    for row in run.rollouts:
        written[row["step"], row["outcome"]] += row["response_tokens"]
    for record in run.records[1:]:
        for name in OUTCOMES:
            assert written[record["step"], name] == record[f"sampling/tokens/{name}"]


def test_each_step_trains_the_wanted_number_of_whole_groups(run: Run) -> None:
    groups: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in run.rollouts:
        if row["outcome"] == "trained":
            groups[row["step"]][row["group"]].append(row)
    assert sorted(groups) == list(range(1, STEPS + 1))
    for by_group in groups.values():
        assert len(by_group) == GROUPS
        for rows in by_group.values():
            assert [row["answer"] for row in rows] == list(range(ANSWERS))
            assert 0 < sum(row["accuracy"] for row in rows) < ANSWERS, "no signal in this group"
            assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-4)
            assert all(row["staleness"] in (0, 1) for row in rows)


def test_a_reward_is_right_or_wrong_plus_a_penalty_for_length(run: Run) -> None:
    for row in run.rollouts:
        assert row["part/task"] == (1 if row["accuracy"] else -1)
        assert -1 <= row["part/overlong"] <= 0
        assert (row["part/overlong"] < 0) == (row["response_tokens"] > 128 - 48)
        assert row["reward"] == pytest.approx(row["part/task"] + row["part/overlong"])


def test_the_text_of_all_answers_of_a_small_run_is_kept(run: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints_in(run.folder.checkpoints)[-1].model)
    for row in run.rollouts:
        assert len(row["token_ids"]) == len(row["logprobs"]) == row["response_tokens"]
        assert all(logprob <= 0 for logprob in row["logprobs"])
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == row["response"]
        digits = row["prompt"].removesuffix(":")
        assert not is_held_out(digits), "trained on a held-out problem"
        assert bool(row["accuracy"]) == row["response"].endswith(f"#{solution(digits)}")


def test_the_saved_config_loads_back_to_an_equal_one(run: Run) -> None:
    typed = load_recipe("quickstart", [*SETTINGS, "run.name=demo"])
    assert load_recipe(str(run.folder.config)) == typed


def test_metrics_hold_one_line_a_step(run: Run) -> None:
    lines = run.folder.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(STEPS + 1))
    for record in run.records[1:]:
        assert record["actor/updates"] == 4
        assert record["actor/skipped_updates"] == 0
        assert np.isfinite([record["actor/loss"], record["actor/grad_norm"]]).all()
        phases = [v for k, v in record.items() if k.startswith("time/") and k.endswith("_s")]
        assert sum(phases) == pytest.approx(2 * record["time/step_s"], rel=1e-3)


def test_the_learning_rate_warms_up_and_falls_to_zero(run: Run) -> None:
    rates = [record["actor/lr"] for record in run.records[1:]]
    course = [
        lr_at(step, total_steps=STEPS, lr=4e-4, warmup_steps=2, schedule="linear")
        for step in range(1, STEPS + 1)
    ]
    assert rates == pytest.approx(course)
    assert rates[1] == max(rates)


def test_evaluation_files_hold_the_answers_behind_the_figures(run: Run) -> None:
    for step in (0, STEPS):
        rows = run.evaluation(f"step-{step}")
        assert len(rows) == HELD_OUT * EVALUATED
        assert np.mean([row["accuracy"] for row in rows]) == pytest.approx(run.records[step][PASS])
        assert all(row["part/task"] == row["reward"] for row in rows), "shaped in training only"


def test_each_checkpoint_is_whole(run: Run) -> None:
    found = checkpoints_in(run.folder.checkpoints)
    assert [checkpoint.step for checkpoint in found] == [HALF, STEPS]
    for checkpoint in found:
        manifest = json.loads((checkpoint.path / "manifest.json").read_text())
        files = [p for p in checkpoint.path.rglob("*") if p.is_file() and p.name != "manifest.json"]
        assert {str(f.relative_to(checkpoint.path)) for f in files} == set(manifest["files"])
        for name, entry in manifest["files"].items():
            content = (checkpoint.path / name).read_bytes()
            assert (len(content), sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    assert not list(run.folder.path.rglob("*.partial"))


def test_the_curve_is_a_picture(run: Run) -> None:
    assert run.folder.curve.read_bytes().startswith(b"\x89PNG")
    picture = matplotlib.image.imread(run.folder.curve)
    assert picture.shape[0] > 200
    assert picture.shape[1] > 300
    assert picture.std() > 0.01, "an empty picture"


def test_the_log_says_when_it_finished(run: Run) -> None:
    assert "finished in" in run.folder.log.read_text().splitlines()[-1]


def test_the_first_lines_say_what_will_happen_and_how_long_it_takes(screen: Outcome) -> None:
    first = screen.out.partition("\n     step")[0]
    for words in ("runs/demo", "toy task", "bad", "Warm-up", "DAPO", "minutes"):
        assert words in first
    assert screen.err == ""


def test_warm_up_and_training_show_figures_as_they_go(screen: Outcome) -> None:
    assert "1000/1000" in screen.out, "the warm-up's progress"
    for step in (1, STEPS):
        assert f"{step}/{STEPS} " in screen.out
    assert "held out, start: sort_digits" in screen.out
    for title in ("accuracy", "reward", "kept", "length", "entropy", "tokens/s", "left"):
        assert title in screen.out


def test_the_closing_screen_sums_the_run_up(run: Run, screen: Outcome) -> None:
    closing = screen.out[screen.out.rindex("demo: done") :]
    before, after = run.records[0], run.records[-1]
    figures = {line[:24].strip(): line[24:].split("  ") for line in closing.splitlines()}
    for title, name in (("right, sampled (pass@1)", PASS), ("right, greedy", GREEDY)):
        shown = [figure.strip() for figure in figures[title] if figure.strip()]
        assert shown == [percent(before[name]), percent(after[name])]
    trained = sum(record.get("sampling/tokens/trained", 0) for record in run.records)
    for words in (
        f"{HELD_OUT} held-out problems",
        "A held-out problem: ",
        "before  wrong  ",
        "after   right  ",
        "Tokens generated",
        f"{trained:,}",
        "in progress at the end",
        "warm-up",
        "rollout",
        "update",
        "runs/demo/curve.png",
        "runs/demo/rollouts",
        "winnow eval runs/demo",
        "winnow train runs/demo/config.yaml run.name=demo-1 seed=1",
        "winnow train quickstart --help-config",
    ):
        assert words in closing


def test_evaluating_again_reproduces_the_last_evaluation(home: Home, run: Run) -> None:
    said = home.winnow("eval", "runs/demo").check()
    again, was = run.evaluation(f"checkpoint-{STEPS}"), run.evaluation(f"step-{STEPS}")
    for figure in ("prompt_uid", "answer", "response_tokens", "accuracy", "pred"):
        assert [row[figure] for row in again] == [row[figure] for row in was]
    pairs = list(zip(again, was, strict=True))
    assert len(pairs) == HELD_OUT * EVALUATED
    assert [a["token_ids"] for a, _ in pairs] == [b["token_ids"] for _, b in pairs]
    logprobs = [[x for pair in pairs for x in pair[side]["logprobs"]] for side in (0, 1)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    for words in (f"{HELD_OUT} held-out prompts", percent(run.records[-1][PASS])):
        assert words in said.out
    report = json.loads((run.folder.evaluations / f"checkpoint-{STEPS}.json").read_text())
    figures = report["sources"]["sort_digits"]
    for name in (f"avg@{EVALUATED}", "pass@1", f"pass@{EVALUATED}", f"maj@{EVALUATED}", "greedy"):
        assert figures[name]["mean"] == run.records[-1][f"eval/sort_digits/{name}"]
    assert all(row["response"] is not None for row in again)


def test_the_models_folder_alone_answers_a_file_of_the_problems_as_its_run_did(
    home: Home, run: Run
) -> None:
    task = load_recipe(str(run.folder.config)).data.task
    with (home.path / "held-out.jsonl").open("w") as file:
        for digits in held_out_problems(task, HELD_OUT):
            asked = [{"content": prompt_text(digits), "role": "user"}]
            truth = {"ground_truth": solution(digits)}
            line = {"data_source": "sort_digits", "prompt": asked, "reward_model": truth}
            file.write(json.dumps(line) + "\n")
    model = str(run.folder.checkpoints / f"step-{STEPS}" / "model")
    like_the_run = [
        *(f"evaluation.n={EVALUATED}", "evaluation.greedy=true", "run.threads=1"),
        *("evaluation.max_response_tokens=128", "rollout.engine.slots=512"),
    ]
    command = ["eval", model, "--data", "held-out.jsonl", "--out", "alone", *like_the_run]
    home.winnow(*command).check()
    figures = json.loads((home.path / "alone/report.json").read_text())["sources"]["sort_digits"]
    for name in (f"avg@{EVALUATED}", f"pass@{EVALUATED}", f"maj@{EVALUATED}", "greedy"):
        assert figures[name]["mean"] == run.records[-1][f"eval/sort_digits/{name}"]
    rows = read_rollouts(home.path / "alone/answers.parquet").to_pylist()
    again = [row for row in rows if row["outcome"] == "held_out"]
    was = run.evaluation(f"step-{STEPS}")
    for figure in ("answer", "response_tokens", "accuracy", "pred", "finish_reason"):
        assert [row[figure] for row in again] == [row[figure] for row in was]
    said = home.winnow("compare", "alone", str(run.folder.evaluation(STEPS))).check()
    assert f"did equally well on each of the {HELD_OUT} problems" in " ".join(said.out.split())


def test_a_checkpoint_before_and_after_are_compared_by_problem(home: Home, run: Run) -> None:
    before, after = (str(run.folder.evaluation(step)) for step in (0, STEPS))
    said = home.winnow("compare", before, after).check()
    rise = 100 * (run.records[-1][PASS] - run.records[0][PASS])
    assert f"B is better: by {rise:.1f} points on these {HELD_OUT} problems" in " ".join(
        said.out.split()
    )
    whole = home.winnow("compare", before, "runs/demo", "--json").check()
    (figures,) = json.loads(whole.out)["sources"].values()
    assert figures["a"] == pytest.approx(run.records[0][PASS])
    assert figures["won"] + figures["tied"] + figures["lost"] == HELD_OUT


def test_an_earlier_checkpoint_can_be_evaluated_with_other_settings(home: Home, run: Run) -> None:
    settings = ["evaluation.n=3", "evaluation.max_prompts=10", "evaluation.greedy=false"]
    said = home.winnow("eval", "runs/demo", *settings, "--step", str(HALF)).check()
    assert len(run.evaluation(f"checkpoint-{HALF}")) == 30
    assert "avg@3" in said.out
    assert "greedy" not in said.out
    rows = run.evaluation(f"checkpoint-{HALF}")
    assert len({row["problem"] for row in rows}) == 10


def test_an_exported_model_writes_in_transformers_what_it_wrote_here(home: Home, run: Run) -> None:
    said = home.winnow("export", "runs/demo", "exported").check()
    assert said.out == "Exported to exported\n"
    greedy = ["evaluation.temperature=0", "evaluation.n=1", "evaluation.max_prompts=8"]
    home.winnow("eval", "runs/demo", *greedy, "--out", "greedily").check()
    model = AutoModelForCausalLM.from_pretrained(home.path / "exported").eval()
    tokenizer = AutoTokenizer.from_pretrained(home.path / "exported")
    for row in read_rollouts(home.path / "greedily/answers.parquet").to_pylist():
        asked = tokenizer(row["prompt"], return_tensors="pt")
        assert asked["input_ids"][0].tolist() == row["prompt_ids"]
        with torch.no_grad():
            written = model.generate(**asked, do_sample=False, max_new_tokens=128)[0]
        assert written[len(row["prompt_ids"]) :].tolist() == row["token_ids"]


def test_a_second_run_takes_the_warm_start_from_the_cache(home: Home, run: Run) -> None:
    said = home.winnow("train", "quickstart", *ONE_STEP, "run.name=second").check()
    assert "Warm start: taken from" in said.out
    assert "1000/1000" not in said.out


def test_the_same_seed_gives_the_same_bits_and_another_does_not(home: Home, run: Run) -> None:
    def learnt(name: str, *more: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        settings = [*ONE_STEP, f"run.name={name}", *more]
        home.winnow("train", "quickstart", *settings).check()
        done = home.run_of(name)
        records = [
            {k: v for k, v in record.items() if not k.startswith(CLOCKED)}
            for record in done.records
        ]
        model = AutoModelForCausalLM.from_pretrained(
            checkpoints_in(done.folder.checkpoints)[-1].model
        )
        return records, model.state_dict()

    records, weights = learnt("one")
    same_records, same_weights = learnt("one-again")
    other_records, other_weights = learnt("other", "run.seed=1", "warm_start.seed=0")
    assert records == same_records
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert records != other_records
    assert not all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_fresh_makes_the_warm_start_anew(home: Home) -> None:
    command = ["sft", "quickstart", "warm_start.steps=3", "warm_start.warmup_steps=0"]
    made, taken, anew = (
        home.winnow(*command, "run.threads=1", *more).check().out for more in ([], [], ["--fresh"])
    )
    for said in (made, anew):
        assert "3/3" in said
        assert "taken from" not in said
    assert "taken from" in taken
    assert "3/3" not in taken
    assert made.splitlines()[-1] == taken.splitlines()[-1] == anew.splitlines()[-1]


def test_the_settings_of_a_section_are_listed_with_their_meaning(home: Home) -> None:
    said = home.winnow("train", "quickstart", "--help-config", "optim").check().out
    assert "optim.lr=0.0004  (" in said
    assert "Peak learning rate." in said
    assert all(line.startswith(("optim.", "    ")) for line in said.splitlines())
