"""The real files beside the repository: read, rendered, prepared and checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe

from winnow.config.data import DataConfig
from winnow.data.check import check
from winnow.data.prepare import Prepared
from winnow.data.prompts import PromptRenderer
from winnow.data.sources import read_rows
from winnow.errors import DataError

ANSWER_LINE = "Solve this.\n\n{prompt}\n\nPut your answer on its own line after Answer:"


def test_the_dapo_file_is_read_and_rendered(shared_data: Path) -> None:
    rows = read_rows([str(shared_data / "math" / "dapo_math_17k.parquet")])
    assert len(rows) == len({row.uid for row in rows}) == 17_917
    assert {row.data_source for row in rows} == {"DAPO-17k"}
    assert rows[0].extra["extra_info"]["split"] == "train"

    tokenizer = train_bpe((row.messages[0]["content"] for row in rows[:500]), chat=CHAT_TEMPLATE)
    config = DataConfig(prompt_template={"dapo-17k": ANSWER_LINE}, max_prompt_tokens=400)
    rendered = PromptRenderer(tokenizer, config).render(rows)
    assert rendered.filtered == 17_917 - rendered.size > 0
    assert max(len(prompt.token_ids) for prompt in rendered.prompts) <= 400
    assert rendered.prompt(0).text.endswith("on its own line after Answer:[assistant]")


def test_the_evaluation_file_holds_its_three_sources(shared_data: Path) -> None:
    rows = read_rows([str(shared_data / "math" / "aime24_aime25_math500.parquet")])
    assert len(rows) == 560
    sources = [row.data_source for row in rows]
    assert {s: sources.count(s) for s in set(sources)} == {
        "AIME-2024-30": 30,
        "AIME-2025-30": 30,
        "MATH-500": 500,
    }


def test_the_raw_gsm8k_files_are_read(shared_data: Path) -> None:
    train = read_rows([str(shared_data / "gsm8k" / "train.jsonl")])
    test = read_rows([str(shared_data / "gsm8k" / "test.jsonl")])
    assert (len(train), len(test)) == (7_473, 1_319)
    assert train[0].ground_truth == "72"
    assert all(row.data_source == "gsm8k" for row in train + test)
    assert all(row.ground_truth.lstrip("-").replace(".", "").isdigit() for row in train + test)


def test_rows_of_other_sets_are_left_out_and_counted(
    prepare_file: Callable[..., Prepared], shared_data: Path
) -> None:
    mixed = str(shared_data / "math" / "aime24_aime25_math500.parquet")
    done = prepare_file("aime-2024", mixed)
    assert (done.read, done.written) == (560, 30)
    assert done.other_sources == {"MATH-500": 500, "AIME-2025-30": 30}
    assert done.data_sources == {"AIME-2024-30": 30}
    with pytest.raises(DataError, match="no row belongs to gsm8k; their data_source is MATH-500"):
        prepare_file("gsm8k", mixed)


def test_the_real_files_are_prepared(
    prepare_file: Callable[..., Prepared], shared_data: Path
) -> None:
    done = prepare_file("gsm8k", str(shared_data / "gsm8k" / "test.jsonl"), split="test")
    assert (done.read, done.written, done.split) == (1_319, 1_319, "test")
    done = prepare_file("dapo-math-17k", str(shared_data / "math" / "dapo_math_17k.parquet"))
    assert (done.read, done.copies, done.written) == (17_917, 650, 17_267)
    assert len(read_rows([done.out])) == 17_267


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [("humaneval", "HumanEval.jsonl.gz", 164), ("mbpp", "mbpp_sanitized.jsonl", 427)],
)
def test_real_programming_problems_come_with_their_tests(
    name: str, file: str, count: int, prepare_file: Callable[..., Prepared], shared_data: Path
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
