"""The real files beside the repository: read, prepared and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from winnow.data.check import check
from winnow.data.prepare import PrepareReport
from winnow.data.sources import read_rows
from winnow.errors import DataError


def test_rows_of_other_sets_are_left_out_and_counted(
    prepare_file: Callable[..., PrepareReport], shared_data: Path
) -> None:
    mixed = str(shared_data / "math" / "aime24_aime25_math500.parquet")
    done = prepare_file("aime-2024", mixed)
    assert (done.read, done.written) == (560, 30)
    assert done.other_sources == {"MATH-500": 500, "AIME-2025-30": 30}
    assert done.data_sources == {"AIME-2024-30": 30}
    with pytest.raises(DataError, match="no row belongs to gsm8k; their data_source is MATH-500"):
        prepare_file("gsm8k", mixed)


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("humaneval", "HumanEval.jsonl.gz", 164), ("mbpp", "mbpp_sanitized.jsonl", 427)],
)
def test_real_programming_problems_come_with_their_tests(
    name: str, file: str, count: int, prepare_file: Callable[..., PrepareReport], shared_data: Path
) -> None:
    done = prepare_file(name, str(shared_data / "code" / file), split="test")
    assert (done.read, done.copies, done.written) == (count, 0, count)
    for row in read_rows([done.out]):
        truth = json.loads(row.ground_truth)
        assert sorted(truth) == ["entry_point", "prompt", "test"]
        assert f"def {truth['entry_point']}(" in truth["prompt"]
        assert "def check(candidate):" in truth["test"]
        assert truth["prompt"].rstrip() in row.messages[0]["content"]
        assert row.extra["ability"] == "code"
        assert row.extra["extra_info"]["canonical_solution"]
        assert row.extra["extra_info"]["canonical_solution"] not in row.messages[0]["content"]


def test_gsm8ks_own_file_is_read_whole(shared_data: Path) -> None:
    assert len(read_rows([str(shared_data / "gsm8k" / "train.jsonl")])) == 7_473


def test_the_real_dapo_file_shows_its_known_faults(shared_data: Path) -> None:
    maths = shared_data / "math"
    evaluation = str(maths / "aime24_aime25_math500.parquet")
    train = str(maths / "dapo_math_17k.parquet")
    report = check(train, {"gsm8k": "gsm8k"}.get, evaluation=evaluation)
    assert (report["rows"], report["unique_prompts"]) == (17_917, 17_255)
    assert len(report["conflicts"]) == 12
    assert report["conflicts"][0]["labels"] == ["64", "6"]
    overlap = report["overlap"]
    assert overlap["shared_by_source"] == {"MATH-500": 7, "AIME-2024-30": 0, "AIME-2025-30": 0}
    assert [shared["evaluation_row"] for shared in overlap["shared"]] == [
        48, 205, 279, 281, 435, 506, 551,
    ]  # fmt: skip
    assert all(shared["same_label"] for shared in overlap["shared"])
