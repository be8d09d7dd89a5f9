"""Data sets on the hub as data files, through the hub's own client against a server of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.hubs import COMMIT, Hub, serve_hub
from tests.small_tokenizers import train_bpe

from winnow.config.data import DataConfig, Demonstrations
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.data.demonstrations import read_demonstrations
from winnow.data.sources import read_rows
from winnow.errors import DataError
from winnow.runs.resume import opened_run

REPO, LATER = "openai/gsm8k", "f" * 40


def questions(*answers: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}?", "answer": f"#### {n}"} for n in answers]


def parquet(*answers: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(questions(*answers)), sink)
    return sink.getvalue()


def lines(*answers: int) -> bytes:
    return "\n".join(map(json.dumps, questions(*answers))).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub(tmp_path, monkeypatch) as held:
        held.repos[REPO] = {
            "README.md": b"",
            "main/train-00000-of-00002.parquet": parquet(1, 2),
            "main/train-00001-of-00002.parquet": parquet(3),
            "main/test-00000-of-00001.parquet": parquet(4),
            "socratic/train-00000-of-00001.parquet": parquet(5),
        }
        configs = [
            {"config_name": name, "data_files": [
                {"split": split, "path": f"{name}/{split}-*"} for split in ("train", "test")]}
            for name in ("main", "socratic")
        ]  # fmt: skip
        held.cards[REPO] = {"configs": configs}
        held.repos["me/sums"] = {"train.jsonl": lines(6), "data/dev_set.jsonl": lines(7)}
        yield held


@pytest.mark.parametrize(
    ("rest", "truths"),
    [
        ("openai/gsm8k/main/train", "123"),
        ("datasets/openai/gsm8k/main/test", "4"),
        ("openai/gsm8k@v1/socratic/train", "5"),
        (f"datasets/openai/gsm8k@{COMMIT}/main/train-00001-of-00002.parquet", "3"),
        ("openai/gsm8k/main/t*.parquet", "4123"),
        ("me/sums", "6"),
        ("me/sums/data/dev_set.jsonl", "7"),
    ],
)
def test_a_url_names_files_splits_and_revisions(hub: Hub, rest: str, truths: str) -> None:
    rows = read_rows([f"hf://{rest}"], DataConfig(default_source=None))
    assert "".join(row.ground_truth for row in rows) == truths
    assert len({row.uid for row in rows}) == len(rows)


def test_demonstrations_lie_there_too_and_their_commit_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/sums"] = {"train.jsonl": b'{"prompt": "1?", "completion": "one"}'}
    words = [f"run.dir={tmp_path}/runs", "run.name=a", "model.path=/nowhere"]
    config = load_recipe("sft", [*words, "sft.train_files=[hf://me/sums]"])
    with opened_run(config, "sft") as opened:
        data = opened.config.data
    pinned = f"hf://datasets/me/sums@{COMMIT}/train.jsonl"
    assert data.hub_files == {"hf://me/sums": (pinned,)}
    tokenizer = train_bpe(["1?one"])
    found = read_demonstrations(["hf://me/sums"], Demonstrations(), data, tokenizer, (1,))
    assert [prompt.uid for prompt in found.prompts.prompts] == [f"{pinned}:1"]


def test_rows_without_a_source_are_of_the_data_set(hub: Hub) -> None:
    hub.repos["me/sums"] = {"train.jsonl": b'{"prompt": "1?", "solution": "1"}'}
    assert read_rows(["hf://me/sums"])[0].data_source == "me/sums"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("openai/gsm8k/train", "has the configurations main, socratic; name a file"),
        ("openai/gsm8k/main/dev", "main has the splits train, test; name a file"),
        ("openai/gsm8k/main/x.parquet", "no such parquet or JSONL file; it has README.md, main/"),
        ("me/sums/validation", "no such parquet or JSONL file; it has data/dev_set.jsonl, train"),
        ("openai/gsm8k@v9/main/train", "has no such revision; choose another revision"),
        ("openai/none", "is not on http://127.0.0.1:"),
        ("gsm8k", "names no data set; write hf://datasets/OWNER/NAME/PATH"),
    ],
)
def test_what_the_hub_lacks_is_said_in_one_line(hub: Hub, rest: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_rows([f"hf://{rest}"])
    assert str(caught.value).startswith(f"hf://{rest}: {message}")
    assert "\n" not in str(caught.value)


def test_a_resumed_run_reads_the_commit_that_it_began_with(hub: Hub, tmp_path: Path) -> None:
    url = "hf://datasets/openai/gsm8k/main/train"

    def config(*more: str) -> Config:
        return load_recipe("gsm8k", [
            *(f"run.dir={tmp_path}/runs", "run.name=a", "model.path=/nowhere"),
            *(f"data.train_files=[{url}]", *more),
        ])  # fmt: skip

    with opened_run(config(), "gsm8k") as first:
        began = first.config.data
    folder = tmp_path / "runs" / "a"
    assert began.hub_files == {url: tuple(
        f"hf://datasets/openai/gsm8k@{COMMIT}/main/train-0000{i}-of-00002.parquet" for i in (0, 1)
    )}  # fmt: skip
    rows = read_rows(began.train_files, began)
    (folder / "metrics.jsonl").write_text("{}\n")
    hub.commit = LATER
    hub.repos[REPO]["main/train-00000-of-00002.parquet"] = parquet(8, 9)
    hub.asked.clear()
    with opened_run(config("evaluation.every=7"), "gsm8k") as second:
        assert second.config.data == began
    assert repr(read_rows(began.train_files, second.config.data)) == repr(rows)
    assert hub.asked == []  # all of it is in the cache
    assert [r.ground_truth for r in read_rows([url])] == ["8", "9", "3"]
    with opened_run(config(f"run.resume={folder}", "data.eval_files=[hf://me/sums]"), "") as third:
        assert third.config.data.hub_files[url] == began.hub_files[url]
        assert third.config.data.hub_files["hf://me/sums"] == (
            f"hf://datasets/me/sums@{LATER}/train.jsonl",
        )
