"""`winnow data prepare` from the hub: a real server on this machine speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from winnow.data.prepare import Prepared, Request, download, prepare
from winnow.data.published import with_dapo_instruction
from winnow.data.sources import read_rows
from winnow.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MAIN = """
from winnow.cli import main as cli
from winnow.cli.data import app
cli.app.add_typer(app, name="data")
cli.main()
"""


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Data sets that answer 500."""
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    url: str = ""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append(f"{self.command} {path}")
            parts = path.split("/")
            if parts[:2] == ["api", "datasets"]:
                self._listing("/".join(parts[2:4]), parts[5])
            else:
                self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))

        do_HEAD = do_GET

        def _listing(self, repo: str, revision: str) -> None:
            if repo not in hub.repos:
                self._answer(404, {"X-Error-Code": "RepoNotFound"})
            elif repo in hub.broken:
                self._answer(500, {})
            elif repo in hub.gated:
                self._answer(403, {"X-Error-Code": "GatedRepo"})
            elif revision not in ("main", "v1", COMMIT):
                self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                files = [{"rfilename": name} for name in hub.repos[repo]]
                body = {"id": repo, "sha": COMMIT, "siblings": files}
                self._answer(200, {}, json.dumps(body).encode())

        def _file(self, repo: str, revision: str, name: str) -> None:
            content = hub.repos.get(repo, {}).get(name)
            if content is None or revision != COMMIT:
                self._answer(404, {"X-Error-Code": "EntryNotFound"})
            else:
                digest = hashlib.sha256(content).hexdigest()
                self._answer(200, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'}, content)

        def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process, and those it starts, take for the real one."""
    from huggingface_hub import constants

    held = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(held))
    held.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", held.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    # Read when the library is imported, which may be long ago.
    template = f"{held.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", held.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield held
    server.shutdown()
    server.server_close()
    thread.join()


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
        "HF_ENDPOINT and HF_TOKEN, or download the file yourself and name it with --from\n"
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
    assert "at v9: has no such revision; choose another --revision" in error("gsm8k", revision="v9")
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
