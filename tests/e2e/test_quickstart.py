"""`winnow train quickstart`, `eval` and `export`, as a newcomer types them; a shortened run.

All tests of this file share one warm start and one trained run.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from tests.winnow_command import Outcome, in_own_process, winnow
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.data.sort_digits import is_held_out, solution
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.types import FATES
from winnow.views.ledger_diff import check_ledger, open_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, GROUPS, ANSWERS, HELD_OUT, EVALUATED = 6, 32, 8, 100, 2
HALF, WARM_UP = STEPS // 2, 200
LONGEST, OVERLONG = 64, 24
"""Tokens of an answer, and of them those that cost reward."""
SETTINGS = [
    *("data.task.min_digits=3", "data.task.max_digits=4", f"warm_start.steps={WARM_UP}"),
    *(f"rollout.max_response_tokens={LONGEST}", f"reward.overlong.buffer_tokens={OVERLONG}"),
    *(f"sampling.groups_per_step={GROUPS}", "trainer.mini_batch_groups=8", "optim.lr=8e-4"),
    f"trainer.steps={STEPS}",
    f"trainer.save_every={HALF}",
    "optim.warmup_steps=2",
    f"data.task.eval_problems={HELD_OUT}",
    f"evaluation.n={EVALUATED}",
    "run.threads=1",
]
PASS, GREEDY = "eval/sort_digits/pass@1", "eval/sort_digits/greedy"


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
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def screen(home: Path) -> Outcome:
    """What the run printed."""
    command = ["train", "quickstart", *SETTINGS, "run.name=demo", "observe.examples=1"]
    return in_own_process(*command, folder=home, environment={"WINNOW_CACHE": str(home / "cache")})


@pytest.fixture(scope="module")
def run(home: Path, screen: Outcome) -> Run:
    screen.check()
    return Run(RunFolder.open(home / "runs/demo"))


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def test_held_out_accuracy_rises(run: Run) -> None:
    before, after = run.records[0], run.records[-1]
    assert after[PASS] - before[PASS] >= 0.15
    assert after[GREEDY] > before[GREEDY]
    assert before[PASS] < 0.45, "the start is deliberately bad"


def test_tokens_add_up_in_ledger_rollouts_and_figures_and_the_timeline_has_the_phases(
    run: Run,
) -> None:
    report = check_ledger(open_ledger(run.folder.path))
    assert report.faults == ()
    total = {
        name: sum(record.get(f"sampling/tokens/{name}", 0) for record in run.records)
        for name in {"generated", *FATES, *report.tokens}
    }
    assert report.tokens == {fate: total[fate] for fate in report.tokens}
    in_progress = run.records[-1]["sampling/tokens/in_progress"]
    assert total["generated"] == sum(total[name] for name in FATES) + in_progress
    written: dict[tuple[int, str], int] = defaultdict(int)
    for row in run.rollouts:
        written[row["step"], row["outcome"]] += row["response_tokens"]
    for record in run.records[1:]:
        for name in FATES:
            assert written[record["step"], name] == record[f"sampling/tokens/{name}"]
    events = json.loads(run.folder.trace.read_text())
    lasted = [event["dur"] / 1e6 for event in events if event["name"] == "rollout"]
    booked = [record["time/rollout_s"] for record in run.records if "time/rollout_s" in record]
    assert lasted == pytest.approx(booked, abs=2e-6)


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


def test_rewards_belong_to_the_texts_which_are_all_kept_in_a_small_run(run: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints_in(run.folder.checkpoints)[-1].model)
    for row in run.rollouts:
        assert len(row["token_ids"]) == len(row["logprobs"]) == row["response_tokens"]
        assert all(logprob <= 0 for logprob in row["logprobs"])
        assert tokenizer.decode(row["token_ids"], skip_special_tokens=True) == row["response"]
        digits = row["prompt"].removesuffix(":")
        assert not is_held_out(digits), "trained on a held-out problem"
        assert bool(row["accuracy"]) == row["response"].endswith(f"#{solution(digits)}")
        assert row["part/task"] == (1 if row["accuracy"] else -1)
        assert -1 <= row["part/overlong"] <= 0
        assert (row["part/overlong"] < 0) == (row["response_tokens"] > LONGEST - OVERLONG)
        assert row["reward"] == pytest.approx(row["part/task"] + row["part/overlong"])


def test_the_screen_shows_progress_and_at_the_end_sums_the_run_up(
    run: Run, screen: Outcome
) -> None:
    assert screen.err == ""
    for words in (f"{WARM_UP}/{WARM_UP}", f"1/{STEPS} ", f"{STEPS}/{STEPS} ", "tokens/s"):
        assert words in screen.out
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
    assert matplotlib.image.imread(run.folder.curve).std() > 0.01, "an empty picture"


def test_the_first_step_says_its_signal_and_each_step_shows_an_answer(
    run: Run, screen: Outcome
) -> None:
    lines, log = screen.out.splitlines(), run.folder.log.read_text()
    first = [row for row in run.rollouts if row["step"] == 1]
    rewards, cut_off = [row["reward"] for row in first], [r["finish_reason"] for r in first]
    qualified = {row["group"] for row in first if row["outcome"] in ("trained", "surplus")}
    shares = (
        f"first step: {len(qualified)} of {len({row['group'] for row in first})} prompts have "
        f"better and worse answers; rewards {min(rewards):.2f} to {max(rewards):.2f}; "
        f"{100 * cut_off.count('length') / len(first):.0f} % cut off"
    )
    (line,) = (line for line in lines if "first step" in line)
    assert line.startswith(shares)
    assert lines.index(line) < next(n for n, each in enumerate(lines) if f"1/{STEPS} " in each)
    for step in range(1, STEPS + 1):
        rows = [row for row in run.rollouts if row["step"] == step and row["answer"] == 0]
        row = min(rows, key=lambda row: row["group"])
        place, right = lines.index(f"step {step}, sort_digits"), f"{row['accuracy']:g}"
        assert lines[place + 1 : place + 5] == [
            f"  prompt  {row['prompt']}",
            f"  answer  {row['response'] or '(nothing)'}",
            f"  truth   {solution(row['prompt'].removesuffix(':'))}",
            f"  score   {row['reward']:g} (task {row['part/task']:g}, overlong "
            f"{row['part/overlong'] + 0:g}), accuracy {right}",
        ]
        assert all(each in log for each in (line, *lines[place : place + 5]))


def test_evaluating_again_reproduces_the_last_evaluation(home: Path, run: Run) -> None:
    said = winnow(home, "eval", "runs/demo").check()
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


def test_an_exported_model_writes_in_transformers_what_it_wrote_here(home: Path, run: Run) -> None:
    said = winnow(home, "export", "runs/demo", "exported").check()
    assert said.out == "Exported to exported\n"
    greedy = ["evaluation.temperature=0", "evaluation.n=1", "evaluation.max_prompts=8"]
    winnow(home, "eval", "runs/demo", *greedy, "--out", "greedily").check()
    model = AutoModelForCausalLM.from_pretrained(home / "exported").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "exported")
    for row in read_rollouts(home / "greedily/answers.parquet").to_pylist():
        asked = tokenizer(row["prompt"], return_tensors="pt")
        assert asked["input_ids"][0].tolist() == row["prompt_ids"]
        with torch.no_grad():
            written = model.generate(**asked, do_sample=False, max_new_tokens=LONGEST)[0]
        assert written[len(row["prompt_ids"]) :].tolist() == row["token_ids"]


def test_fresh_makes_the_warm_start_anew(home: Path) -> None:
    words = ["sft", "quickstart", "warm_start.steps=3", "warm_start.warmup_steps=0"]
    said = [winnow(home, *words, "run.threads=1", *more).check().out
            for more in ([], [], ["--fresh"])]  # fmt: skip
    assert ["Warm start: cached" in each for each in said] == [False, True, False]


def test_the_quickstart_of_tools_learns_to_call_the_calculator(home: Path) -> None:
    small = ["data.task.eval_problems=100", "trainer.steps=3", "warm_start.steps=200"]
    said = winnow(home, "train", "quickstart-tools", *small, "run.name=tools").check()
    run = Run(RunFolder.open(home / "runs/tools"))
    before, after = (run.records[place]["eval/calc/greedy"] for place in (0, -1))
    assert before < 0.05
    assert after > before
    answers = read_rollouts(run.folder.eval_file(3)).to_pylist()
    right = [row for row in answers if row["accuracy"] and row["response"].startswith("<call>")]
    assert len(right) > 10
    for row in right:
        problem = row["prompt_uid"].removeprefix("calc:")
        assert is_held_out(problem)
        product = math.prod(map(int, problem.split("*")))
        assert row["response"].endswith(f"</call>{product}={product}")
        assert row["versions"].count(-1) >= len(f"{product}") + 2  # the tool's
    assert "100 held-out problems of calc" in said.out
