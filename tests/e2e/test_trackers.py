"""A real run with trackers and a sink that hangs: it goes its way, and a resumed one goes on."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill import SETTINGS
from tests.forked import Server
from tests.winnow_command import Outcome, in_forked_process, in_this_process, winnow

from winnow.observe.jsonl import read_metrics

SHORT = (*SETTINGS, "trainer.steps=2", "evaluation.every=2")
TRACKED = (
    *("trainer.save_every=1", "observe.console=plain", "observe.tracking.close_s=1"),
    "observe.trackers=[tensorboard,{name: trackio}]",
    "observe.sinks=[{path: hangs.py:Hangs}]",
)
HANGS = """
import time


class Hangs:
    def start(self, info): ...
    def log(self, step, record):
        time.sleep(1e6)
    def close(self): ...
"""


@pytest.fixture(scope="module")
def outcome(home: Path, trackio_folder: Path, server: Server) -> Outcome:
    """The outcome of a run whose sink hangs. In a process of its own, which it would keep."""
    (home / "hangs.py").write_text(HANGS)
    words = ("train", "quickstart", "run.name=mine", *SHORT, *TRACKED)
    places = {"WINNOW_CACHE": str(home / "cache"), "TRACKIO_DIR": str(trackio_folder)}
    return in_forked_process(server, *words, folder=home, environment=places)


def ids(run: Path) -> dict[str, Any]:
    """The trackers' runs that belong to a run, and the last step of each."""
    return {file.stem: json.loads(file.read_text()) for file in run.glob("trackers/*.json")}


def curve(name: str) -> list[tuple[int, float]]:
    """A curve in trackio's data base."""
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "winnow.db") as rows:
        found = [
            (step, json.loads(t)) for step, t in rows.execute("SELECT step, metrics FROM metrics")
        ]
    return [(step, record[name]) for step, record in found if name in record]


def scalars(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "trackers/tensorboard"))
    events.Reload()
    return events


def test_a_sink_that_hangs_is_told_of_and_costs_the_run_nothing(
    home: Path, outcome: Outcome
) -> None:
    outcome.check()
    records = read_metrics(home / "runs/mine/metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    warning = "observe.sinks[0].path hangs.py:Hangs did not close within 1 s"
    assert " ".join(outcome.out.split()).count(warning) == 1
    assert (home / "runs/mine/log.txt").read_text().count(warning) == 1


def test_each_tracker_has_what_metrics_jsonl_has(home: Path, outcome: Outcome) -> None:
    run = home / "runs/mine"
    records = read_metrics(run / "metrics.jsonl")
    for name in ("score/reward/mean", "actor/loss", "eval/sort_digits/avg@1", "time/step_s"):
        wanted = [(r["step"], r[name]) for r in records if name in r]
        assert curve(name) == wanted, name
        found = [(event.step, event.value) for event in scalars(run).Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [v for _, v in found] == pytest.approx([v for _, v in wanted], rel=1e-6)
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "winnow.db") as rows:
        texts = [text for (text,) in rows.execute("SELECT metrics FROM metrics ORDER BY step")]
    answers = json.loads(texts[1])["answers/train"]["_value"]
    assert {"prompt", "response", "part/task", "reward", "accuracy", "outcome"} <= {*answers[0]}
    assert len(answers) == 8
    assert all(row["prompt"] and row["response"] for row in answers)


def test_a_run_that_is_resumed_from_an_earlier_step_goes_on_in_the_same_runs_there(
    home: Path, outcome: Outcome
) -> None:
    run, before = home / "runs/mine", ids(home / "runs/mine")
    assert {name: note["step"] for name, note in before.items()} == {"tensorboard": 2, "trackio": 2}
    lines = curve("score/reward/mean")
    again = "run.resume=runs/mine/checkpoints/step-1"
    settings = ("observe.sinks=[]", "observe.tracking.close_s=60", "trainer.profile.steps=[2]")
    words = "train", "quickstart", "run.name=mine", *SHORT, *TRACKED, again, *settings
    winnow(home, *words).check()
    assert ids(run) == before
    assert curve("score/reward/mean") == lines
    assert [event.step for event in scalars(run).Scalars("actor/loss")] == [1, 2]
    with gzip.open(run / "profile/driver-0-step-2.json.gz", "rt") as trace:
        profiled = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"winnow.rollout", "winnow.update", "winnow.publish", "aten::mm"} <= profiled


def test_a_tracker_that_is_not_installed_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    absent = {"wandb", "alembic"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in absent else real(name, *more),
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, package in (("wandb", "wandb"), ("mlflow", "alembic")):
        outcome = in_this_process(
            "train", "quickstart", f"observe.trackers=[{name}]", folder=tmp_path
        )
        assert (outcome.code, outcome.out) == (2, "")
        assert outcome.err == (
            f"winnow: observe.trackers names {name}, and {package} is not installed; "
            f"pip install 'winnow-rl[{name}]', or leave {name} out\n"
        )
    assert os.listdir(tmp_path) == []
