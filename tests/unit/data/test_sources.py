"""Rows out of files: what is read, and what each fault is called."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from winnow.config.data import DataConfig
from winnow.data.sources import read_rows
from winnow.errors import DataError

WriteJsonl = Callable[..., str]
ROW: dict[str, Any] = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
    "difficulty": 3,
}


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in ROW.items() if k != key}


def error_of(path: str, config: DataConfig | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read_rows([path], config)
    return str(caught.value)


def test_a_row_in_verls_schema_is_read_and_its_other_columns_kept(write_jsonl: WriteJsonl) -> None:
    (row,) = read_rows([write_jsonl([ROW])])
    assert row.uid == "rows.jsonl:1"
    assert row.data_source == "math_dapo"
    assert row.messages == ({"role": "user", "content": "What is 1 + 1?"},)
    assert row.ground_truth == "2"
    assert row.extra == {
        "ability": "math",
        "extra_info": {"index": 0, "split": "train"},
        "difficulty": 3,
        "reward_model": {"style": "rule"},
        "prompt": ROW["prompt"],
    }


def test_parquet_and_json_lines_give_the_same_rows(write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    rows = [{**ROW, "extra_info": {"index": i, "split": "train"}} for i in range(3000)]
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    lines = read_rows([write_jsonl(rows)])
    for other in (parquet, packed):
        found = read_rows([str(other)])
        assert [(r.uid.rpartition(":")[2], r.messages, r.extra) for r in found] == [
            (r.uid.rpartition(":")[2], r.messages, r.extra) for r in lines
        ]


def test_the_values_of_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('question,answer,level\n"Two, then\nthree",007,\n"1 + ""1""",1e5,3\n')
    rows = read_rows([str(path)])
    assert [(r.text, r.ground_truth, r.extra["level"]) for r in rows] == [
        ("Two, then\nthree", "007", ""),
        ('1 + "1"', "1e5", "3"),
    ]
    assert [row.uid for row in rows] == ["rows.csv:1", "rows.csv:2"]
    path.write_text("question,answer\na,b\na,b,c\n")
    assert f"{path}: not a readable csv file (" in error_of(str(path))


def test_keys_of_a_message_that_parquet_filled_up_are_dropped(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Hi", "name": "x"}, {"role": "user", "content": "?"}]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**ROW, "prompt": messages}]), path)
    assert read_rows([str(path)])[0].messages == tuple(messages)


def test_rows_are_told_apart_by_file_and_number(write_jsonl: WriteJsonl) -> None:
    one, other = write_jsonl([ROW, ROW], "a/train.jsonl"), write_jsonl([ROW], "b/train.jsonl")
    third = write_jsonl([ROW], "c.jsonl")
    uids = [row.uid for row in read_rows([one, other, third])]
    assert uids == [f"{one}:1", f"{one}:2", f"{other}:1", "c.jsonl:1"]


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(ROW)}\r\n\n{json.dumps(ROW)}")
    assert [row.uid for row in read_rows([str(path)])] == ["rows.jsonl:2", "rows.jsonl:4"]


MESSAGE = {"role": "user", "content": "?"}
BAD_ROWS = [
    (without("data_source"), "data_source is missing; it must be a name that routes the answer to "
     "a scorer"),
    ({**ROW, "data_source": 3}, "data_source is the number 3; it must be a name that routes the "
     "answer to a scorer"),
    ({**ROW, "data_source": ""}, "data_source is an empty text; it must be a name that routes the "
     "answer to a scorer"),
    (without("prompt"), "prompt is missing; it must be a text or a list of messages; "
     "data.prompt_key names the column"),
    ({**ROW, "prompt": []}, "prompt is an empty list; it must be a text or a list of messages"),
    ({**ROW, "prompt": {"a": 1}}, "prompt is the object {'a': 1}; it must be a text or a list of "
     "messages"),
    ({**ROW, "prompt": ["x" * 60]}, f"prompt[0] is the text '{'x' * 36}...; it must be an object "
     "with role and content"),
    ({**ROW, "prompt": [MESSAGE, {"role": "user"}]}, "prompt[1].content is missing; it must be a "
     "text"),
    ({**ROW, "prompt": [{"role": 1, "content": ""}]}, "prompt[0].role is the number 1; it must be "
     "a text"),
    (without("reward_model"), "reward_model is missing; it must be an object with the key "
     "ground_truth"),
    ({**ROW, "reward_model": "2"}, "reward_model is the text '2'; it must be an object with the "
     "key ground_truth"),
    ({**ROW, "reward_model": {"style": "rule"}}, "reward_model.ground_truth is missing; it must be "
     "what the scorer compares with"),
    ({**ROW, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": {}}},
     "extra_info.tools_kwargs is an empty object; it must be an object with the "
     "arguments of each tool, as need_tools_kwargs is true"),
    ({**ROW, "images": ["a.png"]}, "prompt has 0 <image> or parts of the type image, 0 of them "
     "with an image, and images has 1; give an image for each, all in the column or all in parts"),
    ({**ROW, "prompt": "<image>", "images": ["https://h/a.png"]}, "image 1 is https://h/a.png, and "
     "images are not fetched; download it and give its path, or store its bytes in the row"),
    ({**ROW, "prompt": "<image>", "images": [3]}, "image 1 is the number 3; it must be an image: "
     "bytes, a path or a data: URL"),
    ({**ROW, "prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "prompt[0].content[0] "
     "is the object {'type': 'video'}; it must be an object of the type text or image"),
    ({**ROW, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt has 1 <image> "
     "or parts of the type image, 0 of them with an image, and images has 0; give an image for "
     "each, all in the column or all in parts"),
    ([1, 2], "must be an object with columns, got the list [1, 2]; write one JSON object a line"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS, ids=[m[:40] for _, m in BAD_ROWS])
def test_a_malformed_row_is_named_by_file_row_and_field(
    bad: Any, message: str, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl([ROW, bad, ROW])
    assert error_of(path) == f"{path} row 2: {message}"


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(b"x" * 5000, mtime=0)[:-9]])
def test_an_unusable_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(content)
    found = error_of(str(path))
    assert re.match(rf"{re.escape(str(path))}( row \d+)?: not a whole gzip file \(", found)
    assert "\n" not in found
    assert re.search(r"\); (download or|write)", found)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    path = f"{tmp_path}/none.jsonl"
    assert error_of(path) == f"{path}: no such file; check the path"
    assert error_of("file://" + path) == f"file://{path}: no such file; check the path"
    message = error_of("nowhere://bucket/rows.jsonl")
    assert message.startswith("nowhere://bucket/rows.jsonl: cannot be read: ")
    assert message.endswith("; check the path, the network and your permission to read it")
    assert error_of(str(tmp_path)) == f"{tmp_path}: is a folder; name the data files in it"


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(ROW)}\n", encoding="utf-8-sig")
    assert len(read_rows([str(path)])) == 2
    path.write_bytes(json.dumps(ROW).encode() + b"\n\xef\xbb\xbf{}")
    assert error_of(str(path)).startswith(f"{path} row 2: not valid JSON in UTF-8 (")


def test_a_small_gzip_file_with_a_huge_line_is_refused_and_never_held_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(json.dumps(ROW).encode() + b"\n")
        for _ in range(14):
            file.write(bytes(16 << 20))
    tracemalloc.start()
    try:
        message = error_of(str(path))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message == f"{path} row 2: longer than 64 MiB; write one JSON object a line"
    assert most < 200 << 20


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(sorted(ROW)), value=JSON, junk=st.binary(max_size=20))
def test_any_content_gives_rows_or_one_clear_line(
    key: str, value: object, junk: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    for content in (json.dumps({**ROW, key: value}).encode(), junk):
        path.write_bytes(content)
        message = ""
        try:
            assert len(read_rows([str(path)])) == 1
        except DataError as error:
            message = str(error)
        assert not message or re.match(rf"{re.escape(str(path))}( row \d+)?: ", message)
        assert "\n" not in message
