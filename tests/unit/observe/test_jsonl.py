"""metrics.jsonl: complete lines or none, also when the disk is full."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from winnow.errors import CheckpointError, WinnowError
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.sinks import RunInfo

FullDisk = Callable[[int], AbstractContextManager[None]]


def log_steps(path: Path, *steps: int) -> MetricsLog:
    sink = MetricsLog(path)
    sink.start(RunInfo("a", 10))
    for step in steps:
        sink.log(step, {"actor/entropy": step / 3})
    return sink


def test_what_is_logged_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = log_steps(path, 1, 2)
    sink.close()
    sink.close()
    assert read_metrics(path) == [
        {"step": 1, "actor/entropy": 1 / 3},
        {"step": 2, "actor/entropy": 2 / 3},
    ]


def test_a_line_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    sink = log_steps(tmp_path / "m.jsonl", 1)
    assert len((tmp_path / "m.jsonl").read_bytes()) == sink.offset()
    sink.close()


def test_nan_and_infinity_are_null_with_a_flag_and_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = MetricsLog(path)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5)})
    sink.close()
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert raw["a"] is None
    assert raw["non_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 0.5)
    assert "non_finite" not in record


def test_counts_stay_integers(tmp_path: Path) -> None:
    sink = MetricsLog(tmp_path / "m.jsonl")
    sink.log(1, {"n": np.int64(7)})
    sink.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step":1,"n":7}\n'


def test_a_resumed_run_cuts_back_to_the_offset_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = log_steps(path, 1, 2)
    offset = sink.offset()
    sink.log(3, {})
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"step":4,"half')
    resumed = MetricsLog(path)
    resumed.truncate(offset)
    resumed.log(3, {"again": 1})
    resumed.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[-1] == {"step": 3, "again": 1}


@pytest.mark.parametrize("offset", [5, 10_000])
def test_an_offset_where_no_line_ends_is_refused(tmp_path: Path, offset: int) -> None:
    sink = log_steps(tmp_path / "m.jsonl", 1)
    with pytest.raises(CheckpointError, match=f"no line that ends at {offset}"):
        sink.truncate(offset)
    sink.truncate(0)
    assert sink.offset() == 0
    sink.close()


def test_a_disk_that_fills_leaves_no_half_line(tmp_path: Path, disk_full_after: FullDisk) -> None:
    path = tmp_path / "m.jsonl"
    sink = log_steps(path, 1)
    before = path.read_bytes()
    with (
        disk_full_after(len(before) + 10),
        pytest.raises(WinnowError, match=r"m\.jsonl: .*; free some space, or put .* run\.dir"),
    ):
        sink.log(2, {"actor/entropy": 0.123456789})
    assert path.read_bytes() == before
    sink.log(2, {"actor/entropy": 0.5})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    sink.close()


def test_a_full_device_is_one_line_for_the_user() -> None:
    sink = MetricsLog(Path("/dev/full"))
    with pytest.raises(WinnowError) as caught:
        sink.log(1, {"a": 1})
    assert str(caught.value).startswith("cannot write /dev/full: No space left on device; free")
    assert "\n" not in str(caught.value)
    sink.close()


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(WinnowError, match=r"cannot write .*: Is a directory"):
        MetricsLog(tmp_path)


def test_a_last_line_without_its_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 1).close()
    with path.open("ab") as file:
        file.write(b'{"step":2}')
    assert [record["step"] for record in read_metrics(path)] == [1]


@pytest.mark.parametrize("line", [b"rubbish", b"[1]", b'{"a":1}', b"\xff\xfe"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 1).close()
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(WinnowError, match=r"m\.jsonl line 2 is not a line of metrics"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WinnowError, match=r"cannot read .*No such file"):
        read_metrics(tmp_path / "m.jsonl")
