"""trace.json: readable at every moment, bounded, continued, and no reason for a run to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from winnow.observe.sinks import RunInfo
from winnow.observe.trace import MERGE_S, TimedScorer, TraceFile
from winnow.types import Score

Event = dict[str, Any]


def events(path: Path) -> list[Event]:
    """Read a trace as its viewers do, with the array's end or without."""
    text = path.read_text()
    whole = text if text.endswith("]\n") else text[: text.rindex("\n")].rstrip(",") + "]"
    found: list[Event] = json.loads(whole)
    return found


def slices(path: Path) -> list[tuple[str, str, float, float]]:
    """List actor, name, begin and duration (seconds, from the first) of all slices."""
    every = events(path)
    names = {e["tid"]: e["args"]["name"] for e in every if e["name"] == "thread_name"}
    found = [e for e in every if e["ph"] == "X"]
    first = min(e["ts"] for e in found)
    return [(names[e["tid"]], e["name"], (e["ts"] - first) / 1e6, e["dur"] / 1e6) for e in found]


def test_slices_that_follow_each_other_are_one_and_others_are_not(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    now = time.perf_counter()
    gap, short = 2 * MERGE_S, MERGE_S / 2
    trace("engine 1", "write", now, now + 0.1)
    trace("learner", "update", now, now + 0.3)
    trace("engine 1", "write", now + 0.1 + short, now + 0.2)
    trace("engine 1", "publish", now + 0.2, now + 0.25)
    trace("engine 1", "write", now + 0.25 + gap, now + 0.3)
    trace.log(1, {})
    trace.close()
    expected = [
        ("engine 1", "write", 0.0, 0.2),
        ("learner", "update", 0.0, 0.3),
        ("engine 1", "publish", 0.2, 0.05),
        ("engine 1", "write", 0.25 + gap, 0.05 - gap),
    ]
    found = slices(tmp_path / "trace.json")
    assert sorted(each[:2] for each in found) == sorted(each[:2] for each in expected)
    for actor, name, began, lasted in found:
        assert any(
            (actor, name) == each[:2] and (began, lasted) == pytest.approx(each[2:], abs=1e-5)
            for each in expected
        )


def test_a_run_that_logs_nothing_leaves_no_file(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.start(RunInfo("refused", 3, 1))
    trace("trainer", "evaluate", 0.0, 5.0)
    trace.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cut", [None, 1, 30])
def test_a_resumed_run_goes_on_in_the_file_whatever_a_kill_left(
    tmp_path: Path, cut: int | None
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    trace.start(RunInfo("a", 5))
    trace.log(1, {"sampling/groups/carried_open": 3})
    trace.log(2, {})
    if cut is None:
        trace.close()
        trace.close()
        assert path.read_text().endswith("]\n")
    else:
        path.write_bytes(path.read_bytes()[:-cut])
    again = TraceFile(path)
    again.start(RunInfo("a", 5, first_step=3))
    again.log(3, {})
    marks = [e["name"] for e in events(path) if e["ph"] == "i"]
    assert marks == ["start", "step 1", *(["step 2"] if cut is None else []),
                     "resumed after step 2", "step 3"]  # fmt: skip
    waiting = next(e for e in events(path) if e["ph"] == "C")
    assert waiting["args"] == {"qualified": 0, "open": 3}
    again.close()
    assert json.loads(path.read_text())


def test_the_size_is_bounded_and_the_latest_is_kept(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 4000
    trace = TraceFile(path, limit)
    for step in range(200):
        trace.log(step, {})
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * limit + 1500
    trace.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-before.json", "trace.json"]
    marks = [
        e["name"]
        for name in ("trace-before.json", "trace.json")
        for e in json.loads((tmp_path / name).read_text())
        if e["ph"] == "i"
    ]
    assert marks == [f"step {step}" for step in range(200 - len(marks), 200)]
    assert len(marks) > 10
    for name in ("trace-before.json", "trace.json"):
        assert [e for e in json.loads((tmp_path / name).read_text()) if e["name"] == "thread_name"]


def test_a_full_disk_ends_the_timeline_and_not_the_run(
    tmp_path: Path,
    disk_full_after: Callable[[int], AbstractContextManager[None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    trace.log(1, {})
    with disk_full_after(path.stat().st_size + 10), caplog.at_level(logging.WARNING):
        trace.log(2, {})
        trace.log(3, {})
    trace.close()
    assert [e["name"] for e in events(path) if e["ph"] == "i"] == ["step 1"]
    assert [r.message.endswith("(no timeline)") for r in caplog.records] == [True]


async def test_scores_that_last_over_the_end_of_a_step_are_counted_once_and_are_one_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told = [100.0], list[tuple[str, str, float, float]]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    answered = asyncio.Event()

    async def score() -> Score:
        await answered.wait()
        return Score(1.0, 1.0, {}, {})

    times = TimedScorer(
        lambda prompt, trajectory: score() if prompt else Score(1.0, 1.0, {}, {}),
        lambda *slice_: told.append(slice_),
    )
    late = [asyncio.ensure_future(times("late", None))]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    now[0] = 101.0
    late.append(asyncio.ensure_future(times("late", None)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    now[0] = 103.0
    times(None, None)  # type: ignore[arg-type]
    assert times.figures()["scoring/busy_s"] == 3.0
    now[0] = 107.0
    answered.set()
    await asyncio.gather(*late)
    assert times.figures() == {
        f"scoring/{name}_s": seconds for name, seconds in (("busy", 4), ("mean", 6.5), ("max", 7))
    }
    assert times.figures() == {}
    await times("at once", None)  # type: ignore[arg-type, misc]
    assert told == [("scorers", "score", 100.0, 107.0)]
