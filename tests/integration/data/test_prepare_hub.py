"""`winnow data prepare` from the hub: a real server on this machine speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.hubs import COMMIT, Hub

from winnow.data.prepare import Prepared, Request, download, prepare
from winnow.data.published import with_dapo_instruction
from winnow.data.sources import read_rows
from winnow.errors import DataError

MAIN = """
from winnow.cli import main
main()
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def dapo_row(question: str, label: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": with_dapo_instruction(question)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": label, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": hashlib.md5(question.encode()).hexdigest()},
    }


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
    }


def made(tmp_path: Path, name: str, **options: Any) -> Prepared:
    return prepare(Request(name, out=str(tmp_path / "out.parquet"), **options))


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
        [sys.executable, "-c", MAIN, "data", "prepare", "dapo-math-17k"],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = " ".join(run.stdout.split())
    assert "rows read 200 exact copies removed 198" in said
    assert "rows written 2 data/dapo-math-17k.parquet" in said
    assert "math_dapo is scored by dapo_math" in said
    assert len(read_rows([str(tmp_path / "data" / "dapo-math-17k.parquet")])) == 2


def test_the_command_ends_with_2_and_one_line_when_the_hub_lacks_the_set(
    hub: Hub, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MAIN, "data", "prepare", "gsm8k"],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr == (
        f"winnow: hub data set openai/gsm8k at main: is not on {hub.url}, or not for you; check "
        "the name, HF_ENDPOINT and HF_TOKEN, or download the file yourself and name it with "
        "--from\n"
    )
    assert run.stdout == ""
    assert not (tmp_path / "data").exists()


def test_a_revision_is_resolved_once_and_files_come_from_its_commit(
    hub: Hub, tmp_path: Path
) -> None:
    publish(hub)
    made(tmp_path, "gsm8k", revision="v1")
    assert hub.asked[0] == "GET api/datasets/openai/gsm8k/revision/v1"
    file = f"datasets/openai/gsm8k/resolve/{COMMIT}/main/train-00000-of-00001.parquet"
    assert set(hub.asked[1:]) == {f"HEAD {file}", f"GET {file}"}


def test_a_file_that_is_in_the_cache_is_not_sent_again(hub: Hub) -> None:
    publish(hub)
    first = download("math-ai/aime25", ["test.jsonl"])
    hub.asked.clear()
    assert download("math-ai/aime25", ["test.jsonl"]) == first
    assert not [line for line in hub.asked if "resolve" in line and line.startswith("GET")]


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
        "no file like test.jsonl or test*.parquet or data/test*.parquet "
        "(it has 0.csv, 1.csv, 2.csv, 3.csv, 4.csv, …); choose a --revision that has one"
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
        "hub data set openai/gsm8k at main: cannot be had from http://127.0.0.1:9 ("
    )
    assert "check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk under HF_HOME" in message
