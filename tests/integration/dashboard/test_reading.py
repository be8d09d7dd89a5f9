"""The files of a run as the dashboard reads them: in parts, while they grow, and damaged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.dashboard.conftest import answer, group, write_step
from tests.small_tokenizers import train_bpe

from winnow.dashboard.answers import TokenTexts, group_table, read_group_answers
from winnow.dashboard.index import LENGTH_BINS, AnswerIndex, prompt_history
from winnow.dashboard.metrics_columns import FigureStore, MetricsColumns
from winnow.dashboard.runs import RunFiles, RunSet, UnreadableError
from winnow.dashboard.timeline import TraceWindows, read_log_tail
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.sinks import RunInfo
from winnow.observe.trace import TraceFile

MakeRun = Callable[[str], RunFolder]
LOCAL = fsspec.filesystem("file")
STEP_2 = "rollouts/step-2.parquet"


def files(folder: Path) -> RunFiles:
    return RunFiles(LOCAL, str(folder), folder.name)


def refreshed(columns: MetricsColumns, path: Path) -> MetricsColumns:
    columns.refresh(path.stat().st_size)
    return columns


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_figures_read_in_pieces_are_those_read_at_once(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [{"step": n, "a": n / 3, **({"b": n} if n % 2 else {})} for n in range(12)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    columns = MetricsColumns(files(path.parent))
    for cut in [*sorted(min(each, len(content)) for each in cuts), len(content)]:
        path.write_bytes(content[:cut])
        refreshed(columns, path)
    assert columns.steps == list(range(12))
    assert columns.column("a").tolist() == [n / 3 for n in range(12)]
    expected = [float(n) if n % 2 else math.nan for n in range(12)]
    assert np.array_equal(columns.column("b"), expected, equal_nan=True)
    assert columns.problems == []


def test_a_run_that_was_cut_back_and_went_another_way_is_read_anew(make_run: MakeRun) -> None:
    folder = make_run("a")
    columns = refreshed(MetricsColumns(files(folder.path)), folder.metrics)
    lines = folder.metrics.read_text().splitlines(keepends=True)
    other = [line.replace('"sampling/accuracy":', '"sampling/accuracy":9') for line in lines[2:]]
    # As long as before: only the bytes tell.
    folder.metrics.write_text("".join([*lines[:2], *other, *other]))
    refreshed(columns, folder.metrics)
    expected = [each["sampling/accuracy"] for each in read_metrics(folder.metrics)]
    assert columns.column("sampling/accuracy").tolist() == expected
    assert len(expected) == 6


def test_damaged_lines_are_told_and_the_others_read(make_run: MakeRun) -> None:
    folder = make_run("a")
    with folder.metrics.open("a") as file:
        file.write('nonsense\n{"step":5,"sampling/accuracy":null,"non_finite":{"sampling/accuracy":'
                   '"nan"}}\n{"step":6,"x":[1]}\n{"step":7')  # fmt: skip
    columns = refreshed(MetricsColumns(files(folder.path)), folder.metrics)
    assert columns.steps == [1, 2, 3, 4, 5]
    assert math.isnan(columns.column("sampling/accuracy")[-1])
    assert [problem.split(":")[0] for problem in columns.problems] == [
        "metrics.jsonl line 5 was skipped", "metrics.jsonl line 7 was skipped",
    ]  # fmt: skip


def test_of_many_steps_neighbours_are_put_together_and_totals_are_over_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {
            **{"step": n, "time/step_s": n / 4, "sampling/tokens/generated": 3 * n},
            **{"sampling/accuracy": n % 2, "sampling/groups/looked_at": 1 + 2 * (n % 2)},
            **{"score/reward/max": n, "score/reward/min": n, "actor/entropy": n},
            **({"eval/a/pass@1": 0.5} if n % 1000 == 100 else {}),
        }
        for n in range(5002)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    columns = refreshed(MetricsColumns(files(tmp_path)), path)
    found = columns.curves(["eval/*/pass@1", "absent"], 2)
    assert list(found["values"]) == ["eval/a/pass@1"]
    told = {step: v for step, v in zip(found["step"], found["values"]["eval/a/pass@1"], strict=True)
            if v is not None}  # fmt: skip
    assert told == dict.fromkeys(range(100, 5002, 1000), 0.5)
    found = columns.curves(["*"], 2)
    # A point more for each of 5 evaluations, and one for the last row.
    assert (found["every"], found["steps"], len(found["step"])) == (2, 5001, 2501 + 6)
    assert [found[name][at] for at in (1, -1) for name in ("step", "rows")] == [3, 2, 5001, 1]
    for name in ("time/step_s", "sampling/tokens/generated"):
        total = sum(each[name] for each in records)
        assert (found["totals"][name], sum(found["values"][name])) == (total, total)
    assert found["tokens"][-1] == found["totals"]["sampling/tokens/generated"]
    assert "sampling/accuracy" not in found["totals"]
    second = {name: values[1] for name, values in found["values"].items()}  # of steps 2 and 3
    assert second["sampling/accuracy"] == 3 / 4  # one group of step 2, three of step 3
    assert [second[f"score/reward/{end}"] for end in ("max", "min")] == [3, 2]
    assert (second["actor/entropy"], second["eval/a/pass@1"]) == (2.5, None)


def test_figures_of_the_runs_asked_for_last_stay_in_memory(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        lines = [json.dumps({"step": n, "a": 1.0, "b": 2.0}) + "\n" for n in range(100)]
        (folder / "metrics.jsonl").write_text("".join(lines))
    a, b, c = map(files, folders)
    store = FigureStore(limit=2 * 100 * 2 * 8)  # two runs of 100 rows of two figures
    first = store.read(a)
    second = store.read(b)
    assert store.read(a) is first
    store.read(c)
    assert store.read(a) is first
    assert store.read(b) is not second
    text = first.curves_json(["*"], 1)
    assert first.n_bytes == 100 * 2 * 8 + len(text)


@given(
    values=st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=30),
    every=st.integers(1, 9),
)
def test_the_extremes_of_a_curve_are_drawn_in_their_order(
    values: list[int | None], every: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [{"step": n} | ({} if v is None else {"a": v}) for n, v in enumerate(values)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = refreshed(MetricsColumns(files(path.parent)), path).curves(["a"], every)
    if "a" not in found["values"]:
        return
    firsts, seconds = found["extremes"].get("a", [found["values"]["a"]] * 2)
    for last, rows, *ends in zip(found["step"], found["rows"], firsts, seconds, strict=True):
        part = [v for v in values[last + 1 - rows : last + 1] if v is not None]
        assert {*ends} == ({min(part), max(part)} if part else {None})
        assert not part or part.index(ends[0]) <= part.index(ends[1])
    assert (found["step"][-1], found["values"]["a"][-1]) == (len(values) - 1, values[-1])


def test_groups_are_summed_up_without_their_baselines(make_run: MakeRun) -> None:
    table = group_table(files(make_run("a").path), STEP_2)
    assert table["group"] == [2, 80, 90]
    assert table["uid"] == ["row-1", "row-8", "row-9"]
    assert table["outcome"] == ["trained", "failed", "all_wrong"]
    assert table["answers"] == [2, 2, 2]
    assert table["accuracy"] == [0.5, 0.75, 0]
    assert table["reward"] == [(1 - 1.5) / 2, (1 + 0) / 2, -1]
    assert table["reward_std"] == [1.25, 0.5, 0]
    assert table["length"] == [9, 6, 1.5]
    assert table["longest"] == [15, 7, 2]
    assert table["cut_off"] == [1, 0, 0]
    assert table["overlong"] == [1, 0, 0]
    assert table["failed"] == [0, 1, 0]
    assert table["mismatch"] == [None, None, None]
    assert table["prompt"] == ["ask row-1", "ask row-8", "ask row-9"]


def test_only_the_row_groups_of_a_group_are_read(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run("a")
    path = folder.path / STEP_2
    pq.write_table(pq.read_table(path), path, row_group_size=2)
    assert pq.ParquetFile(path).num_row_groups == 4
    damaged = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(1).column(20).data_page_offset
    damaged[at : at + 40] = bytes(40)
    path.write_bytes(bytes(damaged))
    assert len(read_group_answers(files(folder.path), STEP_2, 2, None)) == 2
    with pytest.raises(UnreadableError, match=f"cannot read {STEP_2} of a"):
        read_group_answers(files(folder.path), STEP_2, 90, None)


def test_tokens_are_read_one_by_one_and_make_up_the_text() -> None:
    text = "naïve  words,\n\t“zitiert” 🙂 end"
    tokenizer = train_bpe(["plain words only and zitiert"])
    pieces = TokenTexts(tokenizer.backend_tokenizer.to_str().encode())
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    found = pieces.split(ids)
    assert "".join(found["texts"]) == text + "</s>"
    assert found["special"] == [len(ids) - 1]
    assert len(found["texts"]) == len(ids)
    assert "" in found["texts"]  # bytes of a character that is several tokens
    unknown = pieces.split([ids[0], 999_999, -3, 2**40])
    assert unknown["texts"][1:] == ["[999999]", "[-3]", "[1099511627776]"]
    assert unknown["special"] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"."):
        TokenTexts(b"{}")


def test_a_prompt_is_followed_and_lengths_and_rates_are_counted(make_run: MakeRun) -> None:
    folder = make_run("a")
    right = group(70, "row-7", answer(1, 1.0), answer(1, 1.0))
    write_step(folder.path, 5, [RolloutGroup(right, "all_right")], "rollouts")
    index = AnswerIndex(files(folder.path), "rollouts", longest=15)
    digests, total, is_done = index.snapshot()
    while not is_done:
        time.sleep(0.01)
        digests, total, is_done = index.snapshot()
    assert (list(digests), total) == ([1, 2, 3, 4, 5], 5)
    assert digests[5].rates.tolist() == [0, 0, 0, 0, 0, 1]
    assert prompt_history(digests, "row-8") == [
        {"step": 2, "group": 80, "outcome": "failed", "accuracy": 0.75, "reward": 0.5, "length": 6}
    ]
    assert [row["step"] for row in prompt_history(digests, "row-1")] == [1, 2, 3, 4]
    assert digests[2].rates.tolist() == [1, 0, 1, 1, 0, 0]
    lengths = {3: 1, 15: 1, 1: 1, 2: 1, 5: 1, 7: 1}
    expected = [lengths.get(n // 2, 0) if n % 2 == 0 else 0 for n in range(LENGTH_BINS)]
    assert digests[2].lengths.tolist() == expected


def test_the_index_reads_a_step_again_that_was_done_again(make_run: MakeRun) -> None:
    folder = make_run("a")
    index = AnswerIndex(files(folder.path), "rollouts", longest=15)
    while not index.snapshot()[2]:
        time.sleep(0.01)
    (folder.path / "rollouts" / "step-1.parquet").write_bytes((folder.path / STEP_2).read_bytes())
    (folder.path / "rollouts" / "step-3.parquet").write_bytes(b"PAR1 half")
    (folder.path / "rollouts" / "step-4.parquet").unlink()
    while not index.snapshot()[2]:
        time.sleep(0.01)
    digests = index.snapshot()[0]
    assert list(digests) == [1, 2]
    assert len(digests[1].groups) == 3
    assert list(index.problems) == [3]
    assert "cannot read rollouts/step-3.parquet of a" in index.problems[3]


def test_a_step_of_the_timeline_holds_its_slices_alone(tmp_path: Path) -> None:
    now = time.perf_counter()
    trace = TraceFile(tmp_path / "trace.json")
    trace.start(RunInfo("a", 3))
    trace.log(0, {})
    trace("engine 0", "write", now - 60, time.perf_counter() + 60)  # across all of them
    for step in (1, 2, 3):
        began = time.perf_counter()
        time.sleep(0.005)
        trace("trainer", f"work {step}", began, time.perf_counter())
        trace.log(step, {})
    trace.close()
    timeline = TraceWindows(files(tmp_path))
    for size in (40, 300, (tmp_path / "trace.json").stat().st_size):
        timeline.refresh(size)
    assert timeline.steps == [0, 1, 2, 3]
    found = timeline.window(2)
    tracks = {track["name"]: track["slices"] for track in found["tracks"]}
    [[name, start, seconds]] = tracks["trainer"]
    assert name == "work 2"
    assert 0 <= start <= start + seconds <= found["seconds"] + 1e-4
    assert [start["name"] for start in timeline.starts] == ["start"]
    assert timeline.window(9) == {"seconds": 0.0, "tracks": [], "left_out": 0}


def test_the_log_keeps_a_traceback_with_its_line(tmp_path: Path) -> None:
    text = "2026-01-02 03:04:05,678 WARNING winnow.x: first\nTraceback:\n  line 1\n"
    (tmp_path / "log.txt").write_text(text + "2026-01-02 03:04:06,000 INFO winnow.y: last\n")
    run = files(tmp_path)
    found = read_log_tail(run, run.entries()["log.txt"])
    assert [(line["level"], line["text"]) for line in found["lines"]] == [
        ("WARNING", "first\nTraceback:\n  line 1"), ("INFO", "last"),
    ]  # fmt: skip
    assert read_log_tail(run, None)["lines"] == []


def test_runs_are_found_in_folders_alone_and_behind_urls(make_run: MakeRun) -> None:
    a, b = make_run("a"), make_run("b")
    memory = fsspec.filesystem("memory")
    memory.put(str(a.path), "memory://far/a", recursive=True)
    (a.path.parent / "notes").mkdir()
    try:
        runs = RunSet([str(a.path.parent), str(b.path), "memory://far"])
        assert list(runs.discover()) == ["a", "b", "a (2)"]
        near, far = runs.discover()["a"], runs.discover()["a (2)"]
        assert (near.is_local, far.is_local, runs.is_local) == (True, False, False)
        assert runs.discover()["a (2)"] is far
        assert group_table(far, STEP_2) == group_table(near, STEP_2)
        assert far.read("metrics.jsonl", 3, 9) == near.read("metrics.jsonl", 3, 9)
    finally:
        memory.rm("memory://far", recursive=True)


@pytest.mark.parametrize("place", ["nowhere", "nosuch://x", "memory://nowhere"])
def test_a_place_without_runs_is_told_in_one_line(place: str) -> None:
    with pytest.raises(UnreadableError) as told:
        RunSet([place])
    assert place in str(told.value)
    assert "\n" not in str(told.value)
