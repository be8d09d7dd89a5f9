"""docs/extending.md and the rewards of docs/rewards.md: written and typed, in small runs."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from benchmarks.kill import SETTINGS
from tests.pages import ROOT, code_blocks
from tests.winnow_command import WINNOW, Outcome, winnow

from winnow.checkpoints.checkpoint import checkpoints_in, load_state
from winnow.observe.jsonl import read_metrics

PAGE, REWARDS = ((ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("extending", "rewards"))
SECTIONS = dict(part.split("\n", 1) for part in f"{REWARDS}{PAGE}".split("\n## ")[1:])
LEARNING = (
    *("A policy loss", "An advantage estimator", "A filter", "A reward", "A sampler"),
    "A sink of metrics",
)
WRITING = ("A source of prompts", "An engine")
SHORT = (*SETTINGS, "trainer.steps=2", "evaluation.every=2")
BARE = [word for word in SHORT if not re.match(r"data\.task|warm_start|rollout\.engine", word)]
"""Without what belongs to the quickstart's own task, start and engine."""
TEN_LINES = "Write a reward in ten lines"
FAILING = """
class Failing:
    def start(self, info): ...
    def log(self, step, record):
        if step:
            raise OSError("no route to host")
    def close(self): ...
"""


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of a kind in a text."""
    return [code for named, code in code_blocks(text) if named == kind]


def told(*titles: str) -> list[str]:
    """The settings in the commands of sections, together as those of one run."""
    words: dict[str, None] = {}
    for title in titles:
        (command,) = blocks(SECTIONS[title], "sh")
        start, *settings = command.split(" ", 3)
        assert (start, settings[:2]) == ("winnow", ["train", "quickstart"])
        words |= dict.fromkeys(shlex.split(settings[2]))
    return list(words)


def train(home: Path, name: str, *settings: str) -> Outcome:
    return winnow(home, "train", "quickstart", f"run.name={name}", *settings)


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / f"rollouts/step-{step}.parquet").to_pylist()


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """A folder with the files of the page."""
    for code in blocks(PAGE, "python"):
        (home / code.splitlines()[0].removeprefix("# ")).write_text(code)
    (home / "failing.py").write_text(FAILING)
    for title in (TEN_LINES, "Debug a reward"):
        (code,) = blocks(SECTIONS[title], "python")
        (name,) = set(re.findall(r"`(\w+\.py)`", SECTIONS[title]))
        (home / name).write_text(code)
    return home


@pytest.fixture(scope="module")
def learnt(home: Path) -> Path:
    """A run with the page's loss, estimator, filter, reward and sink."""
    train(home, "learnt", *SHORT, *told(*LEARNING)).check()
    return home / "runs/learnt"


@pytest.fixture(scope="module")
def groups(learnt: Path) -> list[list[dict[str, Any]]]:
    """The answers of each group that was finished in the first step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(learnt, 1):
        found.setdefault(row["group"], []).append(row)
    return [group for group in found.values() if len(group) == 4]


def test_the_loss_trains_and_its_figure_is_a_share_in_the_metrics(learnt: Path) -> None:
    steps = [record for record in read_metrics(learnt / "metrics.jsonl") if record["step"]]
    assert all(0 < record["actor/cut"] <= 1 for record in steps)
    assert all(record["actor/skipped_updates"] == 0 for record in steps)
    # Cut off at 0.9, not at the default of 1: before the first update every ratio is 1.
    assert steps[0]["actor/cut"] > 0.5


def test_the_estimator_gives_the_advantages(groups: list[list[dict[str, Any]]]) -> None:
    trained = [group for group in groups if group[0]["outcome"] == "trained"]
    assert len(trained) >= 4
    for group in trained:
        rewards = [row["reward"] for row in group]
        for row in group:
            lead = row["reward"] - (sum(rewards) - row["reward"]) / 3
            assert row["advantage"] == pytest.approx(lead * (0.8 if lead < 0 else 1), abs=1e-6)


def test_the_filter_decides_by_the_reward_and_its_neighbour(
    groups: list[list[dict[str, Any]]],
) -> None:
    kept = [group[0]["outcome"] in ("trained", "carried") for group in groups]
    assert any(kept)
    partway = [sum(0.05 <= row["part/task"] <= 0.95 for row in group) for group in groups]
    assert kept == [number >= 2 for number in partway]
    assert 1 in partway, "which the function's own default would keep"
    rows = [row for group in groups for row in group]
    assert not any(row["scorer_error"] for row in rows)
    assert all(
        row["part/task"] == (1 if row["accuracy"] else row["extra/share"] / 2) for row in rows
    )


def test_the_sampler_hears_the_scores_and_its_state_is_kept(learnt: Path) -> None:
    used = ("trained", "all_right", "all_wrong")
    groups: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in [row for step in (1, 2) for row in rows_of(learnt, step) if row["outcome"] in used]:
        groups.setdefault(row["prompt_uid"], {}).setdefault(row["group"], []).append(row)
    (checkpoint,) = checkpoints_in(learnt / "checkpoints")
    order = load_state(checkpoint)["loader"]["order"]
    assert order["turn"] >= sum(len(found) for found in groups.values()) >= 16
    rates = [rate for rate in order["rates"] if rate != 0.4]
    assert len(rates) == len(groups)
    for found in [found for found in groups.values() if len(found) == 1]:
        rate = 0.4
        for row in next(iter(found.values())):
            rate += 0.2 * (row["accuracy"] - rate)
        assert rate in rates


def test_the_sink_has_the_figures_of_the_metrics(learnt: Path) -> None:
    head, *lines = csv.reader((learnt.parents[1] / "curve.csv").read_text().splitlines())
    names = ["score/reward/mean", "actor/loss"]
    assert head == ["learnt", *names]
    records = read_metrics(learnt / "metrics.jsonl")
    assert [int(line[0]) for line in lines] == [record["step"] for record in records] == [0, 1, 2]
    for line, record in zip(lines, records, strict=True):
        assert line[1:] == [str(record[name]) if name in record else "" for name in names]


def test_prompts_and_engine_serve_a_run_that_a_failing_sink_does_not_stop(learnt: Path) -> None:
    folder, name = learnt.parents[1], "written"
    model = learnt / "checkpoints/step-2/model"
    own = [word.replace("FOLDER", str(model)) for word in told(*WRITING)]
    sink = "observe.sinks=[{path: failing.py:Failing}]"
    fresh = ("sampling.filter.metric=reward", "sampling.max_staleness=0")
    outcome = train(folder, name, *BARE, *own, *fresh, "observe.console=plain", sink).check()
    run = folder / "runs" / name
    rows = [row for step in (1, 2) for row in rows_of(run, step)]
    for row in rows:
        assert re.fullmatch(r"Sums:\d+", row["prompt_uid"])
        assert not row["scorer_error"]
    asked = [re.split(r"\+|<unk>|:", row["prompt"]) for row in rows if row["prompt"]]
    assert all(int(a) <= 20 and int(b) <= 20 for a, b, _ in asked), asked
    here, there = (read_metrics(each / "metrics.jsonl") for each in (run, learnt))
    assert "eval/sums/avg@1" in here[0]
    # The engine rounds to bfloat16 and the trainer does not; in the other run both are float32.
    assert here[1]["mismatch/abs_delta"] > 1e-3 > 1e-5 > there[1]["mismatch/abs_delta"]
    # What it writes with are the newest weights: else the second step would be far off.
    assert here[2]["mismatch/abs_delta"] < 0.03
    warning = "observe.sinks[0].path failing.py:Failing is disabled: OSError: no route to host "
    assert outcome.out.replace("\n", " ").count(warning[:60]) == 1
    assert (run / "log.txt").read_text().count(warning) == 1
    assert here[-1]["step"] == 2


def test_an_option_that_an_engine_does_not_know_is_told(learnt: Path) -> None:
    model = f"model.path={learnt / 'checkpoints/step-2/model'}"
    chosen = [*told("An engine"), "+rollout.engine.options.spots=3"]
    outcome = train(learnt.parents[1], "spots", *BARE, "warm_start=none", model, *chosen)
    assert outcome.code == 2
    assert re.search(r"engines\.py:Half: creating the engine fails with .*'spots'; ", outcome.err)


def steady(said: str) -> list[str]:
    """Lines without what differs from run to run: time, folder, marks under a traceback's lines."""
    said = re.sub(r"^(time +)\S+ s$", r"\1T s", said, flags=re.MULTILINE)
    said = re.sub(r"(?<=[ \"])/\S*/(?=\w+\.py)", "", said)
    return [line for line in said.splitlines() if not re.fullmatch(r"[ ~^]*", line)]


def test_the_reward_has_ten_lines_scores_as_shown_and_trains(home: Path) -> None:
    (code,) = blocks(SECTIONS[TEN_LINES], "python")
    assert len(code.splitlines()) == 10
    (shown,) = blocks(SECTIONS[TEN_LINES], "text")
    prepare, command, trains = blocks(SECTIONS[TEN_LINES], "sh")[0].splitlines()
    winnow(home, *shlex.split(prepare)[1:]).check()
    said = winnow(home, *shlex.split(command)[1:]).check()
    assert steady(said.out) == steady(shown)
    better = command.replace("#245", "#2457999")
    said = winnow(home, *shlex.split(better)[1:], "reward.workers=0").check()
    assert "\nreward        1\naccuracy      1\n" in said.out
    short = *SETTINGS, "trainer.steps=1", "run.name=nearly", "reward.workers=0"
    winnow(home, *shlex.split(trains)[1:], *short).check()
    rows = rows_of(home / "runs/nearly", 1)
    assert len(rows) >= 32
    assert not any(row["scorer_error"] for row in rows)
    for row in rows:
        assert (row["part/task"] == 1) == (row["accuracy"] == 1)
        assert row["accuracy"] == 1 or 0 <= row["part/task"] <= 0.5
    assert any(0 < row["part/task"] <= 0.5 and row["extra/begun"] > 0 for row in rows)


def test_a_failure_is_shown_as_in_the_docs(home: Path) -> None:
    (command,) = blocks(SECTIONS["Debug a reward"], "sh")[0].splitlines()
    (shown,) = blocks(SECTIONS["Debug a reward"], "text")
    said = winnow(home, *shlex.split(command)[1:])
    assert said.code == 2
    assert steady(said.out + said.err) == steady(shown)


def test_a_debugger_may_look_into_it(home: Path) -> None:
    text = (home / "shares.py").read_text()
    (home / "halted.py").write_text(text.replace("    return", "    breakpoint()\n    return"))
    words = "reward try --truth 12 --answer #13 --function halted.py reward.workers=0"
    # Ray, in a test before in this process, has put a debugger of its own there.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONBREAKPOINT"}
    said = subprocess.run(
        [WINNOW, *words.split()], cwd=home, env=environment, input="p digits * 2\ncontinue\n",
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "(Pdb) '1313'" in said
    assert re.search(r"^reward +0\.5$", said, re.MULTILINE)
