"""docs/extending.md: its files are written and its commands run, with settings of a small run."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from benchmarks.kill import SETTINGS
from tests.winnow_command import Outcome, in_this_process

from winnow.observe.jsonl import read_metrics
from winnow.runs.checkpoint import checkpoints_in, load_state

PAGE = Path(__file__).parents[2].joinpath("docs/extending.md").read_text(encoding="utf-8")
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
LEARNING = (
    *("A policy loss", "An advantage estimator", "A filter", "A reward", "A sampler"),
    "A sink of metrics",
)
WRITING = ("A source of prompts", "An engine")
SHORT = (*SETTINGS, "trainer.steps=2", "evaluation.every=2")
BARE = [word for word in SHORT if not re.match(r"data\.task|warm_start|rollout\.engine", word)]
"""Without what belongs to the quickstart's own task, start and engine."""
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
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def told(*titles: str) -> list[str]:
    """The settings in the commands of sections, together as those of one run."""
    words: dict[str, None] = {}
    for title in titles:
        (command,) = blocks(SECTIONS[title], "sh")
        start, *settings = command.split(" ", 3)
        assert (start, settings[:2]) == ("winnow", ["train", "quickstart"])
        words |= dict.fromkeys(shlex.split(settings[2]))
    return list(words)


def train(folder: Path, name: str, *settings: str) -> Outcome:
    return in_this_process(
        *("train", "quickstart", f"run.name={name}", *settings),
        folder=folder,
        environment={"WINNOW_CACHE": str(folder / "cache")},
    )


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / f"rollouts/step-{step}.parquet").to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "cache").symlink_to(warm_starts)
    for code in blocks(PAGE, "python"):
        (folder / code.splitlines()[0].removeprefix("# ")).write_text(code)
    (folder / "failing.py").write_text(FAILING)
    return folder


@pytest.fixture(scope="module")
def learnt(folder: Path) -> Path:
    """A run with the page's loss, estimator, filter, reward and sink."""
    train(folder, "learnt", *SHORT, *told(*LEARNING)).check()
    return folder / "runs/learnt"


@pytest.fixture(scope="module")
def groups(learnt: Path) -> list[list[dict[str, Any]]]:
    """The answers of each group that was finished in the first step."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows_of(learnt, 1):
        found.setdefault(row["group"], []).append(row)
    return [group for group in found.values() if len(group) == 4]


def test_each_of_the_eight_has_a_command_and_about_ten_lines_of_code() -> None:
    source, engine = WRITING
    assert [*SECTIONS] == [*LEARNING[:4], source, LEARNING[4], engine, LEARNING[5]]
    for title, text in SECTIONS.items():
        assert told(title), title
        for code in blocks(text, "python"):
            assert len(code.splitlines()) <= (24 if title == "A sampler" else 17), title


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
    warning = "observe.sinks[0].path failing.py:Failing fails with OSError: no route to host; it "
    assert outcome.out.replace("\n", " ").count(warning[:60]) == 1
    assert (run / "log.txt").read_text().count(warning) == 1
    assert here[-1]["step"] == 2


@pytest.mark.parametrize(
    ("title", "place", "message"),
    [
        ("A policy loss", "losses.py:none", "algorithm.policy_loss.path losses.py:none has no"),
        ("A policy loss", "filters.py:partway", "algorithm.policy_loss.path filters.py:partway, "),
        ("An advantage estimator", "losses.py:topr", "algorithm.advantage.path losses.py:topr: ca"),
        ("A filter", "none.py:partway", "sampling.filter.path none.py:partway: no such file; give"),
        ("A source of prompts", "sums.py:sum", "data.task.path sums.py:sum has no callable sum; g"),
        ("An engine", "sinks.py:Csv", "rollout.engine.path sinks.py:Csv: making the engine fails"),
        ("A sink of metrics", "sums.py:Sums", "observe.sinks[0].path sums.py:Sums has no method s"),
    ],
)
def test_a_place_that_does_not_fit_is_told_in_one_line_before_the_first_step(
    title: str, place: str, message: str, learnt: Path
) -> None:
    folder = learnt.parents[1]
    chosen = [
        re.sub(r"(path[=:] ?)\w+\.py:\w+", rf"\g<1>{place}", word)
        for word in told(title)
        if not word.startswith(("warm_start", "model.path", "+", "reward."))
    ]
    model = f"model.path={learnt / 'checkpoints/step-2/model'}"
    outcome = train(folder, f"{title} at {place}", *BARE, "warm_start=none", model, *chosen)
    assert outcome.code == 2
    assert outcome.err.startswith(f"winnow: {message}")
    assert outcome.err.count("\n") == 1
    assert not outcome.out


def test_an_option_that_an_engine_does_not_know_is_told(learnt: Path) -> None:
    model = f"model.path={learnt / 'checkpoints/step-2/model'}"
    chosen = [*told("An engine"), "+rollout.engine.options.spots=3"]
    outcome = train(learnt.parents[1], "spots", *BARE, "warm_start=none", model, *chosen)
    assert outcome.code == 2
    assert re.search(r"engines\.py:Half: making the engine fails with .*'spots'; it ", outcome.err)
