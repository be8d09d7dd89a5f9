"""Which columns of a file are taken, and that what is unclear is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from winnow.cli.data import app
from winnow.config.data import ColumnsConfig, DataConfig
from winnow.data.sources import read_rows
from winnow.errors import DataError

WriteJsonl = Callable[..., str]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
Q = "1 + 1?"
KNOWN = [
    ("verl's", {"prompt": CHAT, "data_source": "s", "reward_model": {"ground_truth": "2"}}, "s"),
    ("verl's", {"prompt": Q, "reward_model": {"ground_truth": "2"}, "answer": "3"}, "rows"),
    ("TRL's", {"prompt": CHAT, "solution": "so \\boxed{2}."}, "rows"),
    ("TRL's", {"prompt": Q, "solution": " 2 ", "data_source": "s"}, "s"),
    ("OpenRLHF's", {"input": Q, "label": "2"}, "rows"),
    ("GSM8K", {"question": Q, "answer": "One and one.\n#### $2"}, "gsm8k"),
    ("GSM8K", {"question": Q, "answer": "One.\n#### 2", "data_source": "s"}, "s"),
    ("columns", {"problem": Q, "solution": "It is \\boxed{2} in all."}, "rows"),
    ("columns", {"problem": Q, "solution": "a long text", "answer": 2}, "rows"),
    ("columns", {"question": Q, "answer": 2.0}, "rows"),
    ("columns", {"messages": CHAT, "ground_truth": "2"}, "rows"),
    ("columns", {"prompt": CHAT, "label": "2", "id": 7}, "rows"),
]


@pytest.mark.parametrize(("schema", "record", "source"), KNOWN)
def test_a_known_schema_is_recognised_and_named(
    schema: str, record: dict[str, Any], source: str, write_jsonl: WriteJsonl
) -> None:
    (row,) = read_rows([write_jsonl([record])])
    assert (row.messages[-1]["content"], row.ground_truth, row.data_source) == (Q, "2", source)
    assert row.layout.startswith(schema)
    (named,) = read_rows([write_jsonl([record])], DataConfig(default_source="mine"))
    assert named.data_source == (source if "data_source" in record else "mine")


def test_columns_and_keys_within_them_can_be_named(write_jsonl: WriteJsonl) -> None:
    record = {"ask": Q, "meta": {"gold": {"value": "2"}}, "kind": "s", "question": "x", "answer": 3}
    columns = ColumnsConfig(prompt="ask", truth="meta.gold.value", source="kind")
    (row,) = read_rows([write_jsonl([record])], DataConfig(columns=columns))
    assert (row.messages[0]["content"], row.ground_truth, row.data_source) == (Q, "2", "s")
    assert row.extra == {"meta": record["meta"], "question": "x", "answer": 3}
    bare = ColumnsConfig(truth="none")
    (row,) = read_rows([write_jsonl([{"prompt": Q}])], DataConfig(columns=bare))
    assert row.ground_truth is None
    assert "no ground truth" in row.layout


REFUSED = [
    ([{"prompt": Q, "question": Q, "answer": "2"}], {}, "row 1: prompt and question may each hold "
     "the prompt; name the column: data.columns.prompt=COLUMN"),
    ([{"prompt": Q, "solution": "2", "answer": "2"}], {}, "row 1: solution and answer may each "
     "hold the ground truth; name the column: data.columns.truth=COLUMN"),
    ([{"text": Q, "answer": "2"}], {}, "row 1: no known column holds the prompt; columns: "
     "text, answer; name the column: data.columns.prompt=COLUMN"),
    ([{"prompt": Q, "gold": "2"}], {}, "row 1: no known column holds the ground truth; "
     "columns: prompt, gold; name the column: data.columns.truth=COLUMN (none if "
     "the reward needs no ground truth)"),
    ([{"prompt": Q, "solution": "2"}, {"prompt": Q}], {}, "row 2: solution is missing; it must be "
     "what the scorer compares with"),
    ([{"question": Q, "answer": "#### 2"}, {"question": Q, "answer": "2"}], {}, "row 2: answer is "
     "the text '2'; it must be a text with the final answer after ####"),
    ([{"prompt": Q, "a": {"b": 1}}], {"truth": "a.c"}, "row 1: a.c is missing; it must be what the "
     "scorer compares with"),
    ([{"prompt": Q, "a": "x"}], {"truth": "a.c"}, "row 1: a is the text 'x'; it must be an object "
     "with the key c"),
    ([{"messages": [*CHAT, {"role": "assistant", "content": "2"}], "answer": "2"}], {}, "row 1: "
     "messages ends with an assistant message; remove that message from the rows, as the policy "
     "generates it"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "message"), REFUSED, ids=[m[:50] for *_, m in REFUSED])
def test_what_is_unclear_is_refused_with_the_remedy(
    rows: list[dict[str, Any]], columns: dict[str, str], message: str, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl(rows)
    with pytest.raises(DataError) as caught:
        read_rows([path], DataConfig(columns=ColumnsConfig(**columns)))
    assert str(caught.value) == f"{path} {message}"


def test_a_prompt_key_that_is_set_counts_before_all_known_columns(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([{"question": Q, "input": "other", "answer": "2"}])
    (row,) = read_rows([path], DataConfig(prompt_key="question"))
    assert row.messages[0]["content"] == Q
    with pytest.raises(DataError, match=r"row 1: quest is missing; .*; data\.prompt_key names the"):
        read_rows([path], DataConfig(prompt_key="quest"))


def test_the_command_checks_a_file_with_the_columns_that_it_is_told(
    write_jsonl: WriteJsonl,
) -> None:
    path = write_jsonl([{"ask": Q, "label": "2"}, {"ask": "2 + 2?", "label": "4"}])
    told = ["data.columns.prompt=ask", "data.default_source=gsm8k"]
    result = CliRunner().invoke(app, ["check", path, *told, "--json"])
    report = json.loads(result.stdout)
    assert report["sources"] == [{"source": "gsm8k", "rows": 2, "scorer": "gsm8k"}]
    assert "prompt from ask, ground truth from label" in report["schema"]
    assert report["schema"] in CliRunner().invoke(app, ["check", path, *told]).stdout
    error = CliRunner().invoke(app, ["check", path]).exception
    assert isinstance(error, DataError)
    assert "data.columns.prompt=COLUMN" in str(error)
