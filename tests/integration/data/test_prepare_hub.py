"""Data from the hub, prepared and as data files: a server on this machine speaks its protocol."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.hubs import COMMIT, Hub
from tests.small_tokenizers import train_bpe

from winnow.checkpoints.opening import opened_run
from winnow.config.data import DataConfig, Demonstrations
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.data.demonstrations import read_demonstrations
from winnow.data.prepare import PrepareReport, PrepareRequest, prepare
from winnow.data.published import add_dapo_instruction
from winnow.data.sources import read_rows
from winnow.errors import DataError


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def dapo_row(question: str, label: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": add_dapo_instruction(question)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": label, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": hashlib.md5(question.encode()).hexdigest()},
    }


def geometry_row(split: str) -> dict[str, Any]:
    Image.new("RGB", (40, 30)).save(png := io.BytesIO(), "PNG")
    images = [{"bytes": png.getvalue(), "path": None}]
    return {"images": images, "problem": "<image>Find x.", "answer": split, "ground_truth": "B"}


def mbpp_row(split: str) -> dict[str, Any]:
    """A problem with one assert, in the layout of the sanitized set."""
    return {
        "task_id": 1, "prompt": f"Write one() for {split}.", "code": "def one(): return 1",
        "test_imports": [], "test_list": ["assert one() == 1"],
    }  # fmt: skip


def publish(hub: Hub) -> None:
    """Small files where the real ones lie, in their layouts."""
    problems = [
        {"problem": f"p{i}", "level": "Level 1", "solution": f"\\boxed{{{i}}}", "type": "A"}
        for i in range(4)
    ]
    hub.repos = {
        "openai/gsm8k": {
            "README.md": b"",
            "main/train-00000-of-00001.parquet": parquet([{"question": "a", "answer": "#### 1"}]),
            "main/test-00000-of-00001.parquet": parquet([{"question": "b", "answer": "#### 2"}]),
            "socratic/train-00000-of-00001.parquet": b"not this one",
        },
        "DigitalLearningGmbH/MATH-lighteval": {
            "algebra/train-00000-of-00001.parquet": b"not this one",
            "data/train-00000-of-00002.parquet": parquet(problems[:2]),
            "data/train-00001-of-00002.parquet": parquet(problems[2:3]),
            "data/test-00000-of-00001.parquet": parquet(problems[3:]),
        },
        "BytedTsinghua-SIA/DAPO-Math-17k": {
            "data/dapo-math-17k.parquet": parquet([dapo_row("x", "1"), dapo_row("y", "2")] * 100)
        },
        "BytedTsinghua-SIA/AIME-2024": {
            "data/aime-2024.parquet": parquet([dapo_row("x", "033")] * 32)
        },
        "math-ai/aime25": {"test.jsonl": b'{"problem": "x", "answer": "70", "id": "0"}\n'},
        "google-research-datasets/mbpp": {
            f"sanitized/{split}-00000-of-00001.parquet": parquet([mbpp_row(split)])
            for split in ("train", "test")
        },
        "hiyouga/geometry3k": {
            f"data/{split}-00000-of-00001.parquet": parquet([geometry_row(split)])
            for split in ("train", "validation", "test")
        },
    }


def made(tmp_path: Path, name: str, **options: Any) -> PrepareReport:
    return prepare(PrepareRequest(name, out=str(tmp_path / "out.parquet"), **options))


@pytest.mark.parametrize(
    ("name", "split", "read", "truths", "source"),
    [
        ("gsm8k", None, 1, ["1"], "openai/gsm8k"),
        ("gsm8k", "test", 1, ["2"], "openai/gsm8k"),
        ("math", None, 3, ["0", "1", "2"], "MATH"),
        ("math", "test", 1, ["3"], "MATH"),
        ("dapo-math-17k", None, 200, ["1", "2"], "math_dapo"),
        ("aime-2024", None, 32, ["33"], "aime-2024"),
        ("aime-2025", None, 1, ["70"], "aime-2025"),
        ("geometry3k", None, 1, ["train"], "hiyouga/geometry3k"),
        ("geometry3k", "validation", 1, ["validation"], "hiyouga/geometry3k"),
    ],
)
def test_each_set_is_found_on_the_hub(
    name: str,
    split: str | None,
    read: int,
    truths: list[str],
    source: str,
    hub: Hub,
    tmp_path: Path,
) -> None:
    publish(hub)
    done = made(tmp_path, name, split=split)
    rows = read_rows([done.out])
    assert (done.read, done.copies) == (read, read - len(truths))
    assert [row.ground_truth for row in rows] == truths
    assert {row.data_source for row in rows} == {source}
    assert f"at {COMMIT[:12]} (" in done.origin


def test_the_command_takes_the_hub_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    publish(hub)
    run = subprocess.run(
        [sys.executable, "-m", "winnow.cli.main", "data", "prepare", "dapo-math-17k"],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = " ".join(run.stdout.split())
    assert "rows read 200 exact duplicates removed 198" in said
    assert "rows written 2 data/dapo-math-17k.parquet" in said
    assert "math_dapo is scored by dapo_math" in said
    assert len(read_rows([str(tmp_path / "data" / "dapo-math-17k.parquet")])) == 2


def test_a_revision_is_resolved_once_and_files_come_from_its_commit(
    hub: Hub, tmp_path: Path
) -> None:
    publish(hub)
    made(tmp_path, "gsm8k", revision="v1")
    assert hub.asked[0] == "GET api/datasets/openai/gsm8k/revision/v1"
    file = f"datasets/openai/gsm8k/resolve/{COMMIT}/main/train-00000-of-00001.parquet"
    assert set(hub.asked[1:]) == {f"HEAD {file}", f"GET {file}"}


def test_what_the_hub_refuses_is_said_with_a_remedy(hub: Hub, tmp_path: Path) -> None:
    def error(name: str, **options: Any) -> str:
        with pytest.raises(DataError) as caught:
            made(tmp_path, name, **options)
        message = str(caught.value)
        assert message.isprintable()
        assert message.startswith("hub data set ")
        assert message.endswith(", or download the file yourself and name it with --from")
        assert not (tmp_path / "out.parquet").exists()
        return message

    publish(hub)
    assert "at v9: has no such revision; choose another revision" in error("gsm8k", revision="v9")
    hub.gated.add("openai/gsm8k")
    assert "asks for permission first; accept its terms" in error("gsm8k")
    hub.repos["math-ai/aime25"] = {f"{i}.csv": b"" for i in range(9)}
    assert (
        "no file matches test.jsonl or test*.parquet or data/test*.parquet "
        "(it has 0.csv, 1.csv, 2.csv, 3.csv, 4.csv, …); choose another --revision"
    ) in error("aime-2025")
    hub.broken.add("DigitalLearningGmbH/MATH-lighteval")
    assert "(Server error '500" in error("math")


def test_a_hub_that_is_down_is_told_at_once(tmp_path: Path, hub: Hub) -> None:
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(DataError) as caught:
            made(tmp_path, "gsm8k")
    message = str(caught.value)
    assert message.startswith(
        "hub data set openai/gsm8k at main: cannot be downloaded from http://127.0.0.1:9 ("
    )
    assert "check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk under HF_HOME" in message


def questions(*answers: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}?", "answer": f"#### {n}"} for n in answers]


def lines(*answers: int) -> bytes:
    return "\n".join(map(json.dumps, questions(*answers))).encode()


@pytest.fixture
def files(hub: Hub) -> Hub:
    hub.repos["openai/gsm8k"] = {
        "README.md": b"",
        "main/train-00000-of-00002.parquet": parquet(questions(1, 2)),
        "main/train-00001-of-00002.parquet": parquet(questions(3)),
        "main/test-00000-of-00001.parquet": parquet(questions(4)),
        "socratic/train-00000-of-00001.parquet": parquet(questions(5)),
    }
    configs = [
        {"config_name": name, "data_files": [
            {"split": split, "path": f"{name}/{split}-*"} for split in ("train", "test")]}
        for name in ("main", "socratic")
    ]  # fmt: skip
    hub.cards["openai/gsm8k"] = {"configs": configs}
    hub.repos["me/sums"] = {"train.jsonl": lines(6), "data/dev_set.jsonl": lines(7)}
    return hub


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
def test_a_url_names_files_splits_and_revisions(files: Hub, rest: str, truths: str) -> None:
    rows = read_rows([f"hf://{rest}"], DataConfig(default_source=None))
    assert "".join(row.ground_truth for row in rows) == truths
    assert len({row.uid for row in rows}) == len(rows)


def test_demonstrations_lie_there_too_and_their_commit_is_kept(files: Hub, tmp_path: Path) -> None:
    files.repos["me/sums"] = {"train.jsonl": b'{"prompt": "1?", "completion": "one"}'}
    words = [f"run.dir={tmp_path}/runs", "run.name=a", "model.path=/nowhere"]
    config = load_recipe("sft", [*words, "sft.train_files=[hf://me/sums]"])
    with opened_run(config, "sft") as opened:
        data = opened.config.data
    pinned = f"hf://datasets/me/sums@{COMMIT}/train.jsonl"
    assert data.hub_files == {"hf://me/sums": (pinned,)}
    tokenizer = train_bpe(["1?one"])
    found = read_demonstrations(["hf://me/sums"], Demonstrations(), data, tokenizer, (1,))
    assert [prompt.uid for prompt in found.prompts.prompts] == [f"{pinned}:1"]


def test_rows_without_a_source_are_of_the_data_set(files: Hub) -> None:
    files.repos["me/sums"] = {"train.jsonl": b'{"prompt": "1?", "solution": "1"}'}
    assert read_rows(["hf://me/sums"])[0].data_source == "me/sums"


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("openai/gsm8k/train", "has the configurations main, socratic; name a file"),
        ("openai/gsm8k/main/dev", "main has the splits train, test; name a file"),
        (
            "openai/gsm8k/main/x.parquet",
            "no file of a known format; it has README.md, main/",
        ),
        (
            "me/sums/validation",
            "no file of a known format; it has data/dev_set.jsonl, train",
        ),
        ("openai/gsm8k@v9/main/train", "has no such revision; choose another revision"),
        ("openai/none", "is not on http://127.0.0.1:"),
        ("gsm8k", "is not a data set URL; write hf://datasets/OWNER/NAME/PATH"),
    ],
)
def test_what_the_hub_lacks_is_said_in_one_line(files: Hub, rest: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_rows([f"hf://{rest}"])
    assert str(caught.value).startswith(f"hf://{rest}: {message}")
    assert "\n" not in str(caught.value)


def test_a_resumed_run_reads_the_commit_that_it_began_with(files: Hub, tmp_path: Path) -> None:
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
    files.commit = "f" * 40
    files.repos["openai/gsm8k"]["main/train-00000-of-00002.parquet"] = parquet(questions(8, 9))
    files.asked.clear()
    with opened_run(config("evaluation.every=7"), "gsm8k") as second:
        assert second.config.data == began
    assert repr(read_rows(began.train_files, second.config.data)) == repr(rows)
    assert files.asked == []  # all of it is in the cache
    assert [r.ground_truth for r in read_rows([url])] == ["8", "9", "3"]
    with opened_run(config(f"run.resume={folder}", "data.eval_files=[hf://me/sums]"), "") as third:
        assert third.config.data.hub_files[url] == began.hub_files[url]
        assert third.config.data.hub_files["hf://me/sums"] == (
            f"hf://datasets/me/sums@{files.commit}/train.jsonl",
        )
