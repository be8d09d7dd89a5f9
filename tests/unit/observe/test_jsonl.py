"""metrics.jsonl: complete lines or none, also when the disk is full."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from winnow.errors import WinnowError
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.sinks import RunInfo

FullDisk = Callable[[int], AbstractContextManager[None]]


def log_steps(path: Path, *steps: int) -> MetricsLog:
    sink = MetricsLog(path)
    sink.start(RunInfo("a", 10))
    for step in steps:
        sink.log(step, {"actor/entropy": step / 3})
    return sink


def test_nan_and_infinity_are_null_with_a_flag_and_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run" / "m.jsonl"
    sink = MetricsLog(path)
    sink.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5), "e": 1 / 3})
    sink.close()
    sink.close()
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert raw["a"] is None
    assert raw["non_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert [record[name] for name in "bcde"] == [math.inf, -math.inf, 0.5, 1 / 3]
    assert "non_finite" not in record


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


@pytest.mark.parametrize("line", [b"rubbish", b"[1]", b'{"a":1}', b"\xff\xfe"])
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 1).close()
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(WinnowError, match=r"m\.jsonl line 2 is not a metrics record"):
        read_metrics(path)


def test_a_last_line_without_its_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log_steps(path, 1).close()
    with path.open("ab") as file:
        file.write(b'{"step":2}')
    assert [record["step"] for record in read_metrics(path)] == [1]
