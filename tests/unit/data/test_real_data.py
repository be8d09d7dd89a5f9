"""The real files beside the repository, read and rendered."""

from __future__ import annotations

import time
from pathlib import Path

from winnow.config.data import DataConfig
from winnow.data.prompts import PromptRenderer
from winnow.data.sources import read_rows

from .conftest import CHAT_TEMPLATE, train_bpe

ANSWER_LINE = "Solve this.\n\n{prompt}\n\nPut your answer on its own line after Answer:"


def test_the_dapo_file_is_read_and_rendered_in_seconds(shared_data: Path) -> None:
    rows = read_rows([str(shared_data / "math" / "dapo_math_17k.parquet")])
    assert len(rows) == len({row.uid for row in rows}) == 17_917
    assert {row.data_source for row in rows} == {"DAPO-17k"}
    assert rows[0].extra["extra_info"]["split"] == "train"

    tokenizer = train_bpe((row.messages[0]["content"] for row in rows[:500]), chat=CHAT_TEMPLATE)
    config = DataConfig(prompt_template={"dapo-17k": ANSWER_LINE}, max_prompt_tokens=400)
    begin = time.perf_counter()
    rendered = PromptRenderer(tokenizer, config).render(rows)
    assert time.perf_counter() - begin < 20  # 3 s on an idle core
    assert rendered.report.rows == 17_917
    assert rendered.report.filtered == 17_917 - rendered.size > 0
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
