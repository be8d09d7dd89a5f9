"""Models from URLs and from revisions on the hub: what is fetched, kept, mended and refused."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.hubs import COMMIT, Hub
from tests.small_models import digits_folder
from tests.winnow_command import in_this_process

from winnow.errors import ConfigError, ModelError
from winnow.models import fetch
from winnow.models.fetch import local_folder

FILES = {"config.json": b"{}", "model.safetensors": b"w" * 1000, "sub/code.py": b"x = 1\n"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINNOW_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_local_folders", {})
    return tmp_path / "cache"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def again(path: str) -> str:
    """What a process that starts now gets."""
    fetch._local_folders.clear()
    return local_folder(path)


class Server(http.server.ThreadingHTTPServer):
    """A web server over a folder, which counts what it serves."""

    asked: list[str]
    stalls: threading.Event | None = None
    """A large file is sent by half until it is set."""


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.server.stalls is not None and self.path.endswith("model.safetensors"):
            outputfile.write(source.read(500))
            outputfile.flush()
            self.server.stalls.wait(60)
        super().copyfile(source, outputfile)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    folder = write(tmp_path / "served" / "model", FILES)
    handler = functools.partial(Handler, directory=folder.parent)
    server = Server(("127.0.0.1", 0), handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server, f"http://127.0.0.1:{server.server_port}/model"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_folder_in_memory_on_disk_and_on_a_web_server_is_copied_whole(
    tmp_path: Path, served: tuple[Server, str]
) -> None:
    memory = fsspec.filesystem("memory")
    for name, content in {**FILES, "optimizer.pt": b"", "pytorch_model.bin": b"p"}.items():
        memory.pipe(f"/bucket/model/{name}", content)
    disk = write(tmp_path / "disk" / "model", FILES)
    said: list[str] = []
    for url in ("memory://bucket/model", f"file://{disk}", served[1]):
        assert read(local_folder(url, report=said.append)) == FILES, url
    assert len(said) == 3
    assert "in 3 files" in said[0]
    assert local_folder(str(disk)) == str(disk), "a folder is read where it lies"
    memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("is_on_the_web", [False, True])
def test_a_copy_is_kept_until_the_weights_change_and_mended_where_it_is_damaged(
    is_on_the_web: bool, tmp_path: Path, served: tuple[Server, str]
) -> None:
    disk = tmp_path / "served" / "model"
    url = served[1] if is_on_the_web else f"file://{disk}"
    first = Path(local_folder(url))
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert again(f"{url}/" if is_on_the_web else url) == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    (first / "sub" / "code.py").write_bytes(b"x")
    assert read(again(url)) == FILES
    assert (first / "model.safetensors").stat().st_mtime_ns == before, "only what was damaged"
    (disk / "model.safetensors").write_bytes(b"v" * 1000)  # of the same size: only the time tells
    os.utime(disk / "model.safetensors", (1, 1))
    assert local_folder(url) == str(first), "a process sees one version"
    second = again(url)
    assert second != str(first)
    assert read(second)["model.safetensors"] == b"v" * 1000


FETCH = "import sys; from winnow.models.fetch import local_folder; print(local_folder(sys.argv[1]))"


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_of_a_node_fetch_it_once_and_a_killed_one_leaves_what_it_had(
    served: tuple[Server, str], cache: Path
) -> None:
    server, url = served
    server.stalls = threading.Event()
    killed = start(url)
    deadline = time.monotonic() + 60
    awaited = {"model.safetensors.part", "code.py", "config.json"}  # the last two are whole
    while not awaited <= {path.name for path in cache.rglob("*")}:
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.02)
    assert fetch.fetched_bytes() >= len(FILES["config.json"] + FILES["sub/code.py"])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [p.name for p in cache.iterdir() if not p.name.startswith(".")] == []
    server.stalls.set()
    server.stalls = threading.Event()
    listings = server.asked.count("/model") + server.asked.count("/model/")
    server.asked.clear()
    both = [start(url), start(url)]
    while server.asked.count("/model") + server.asked.count("/model/") < 2 * listings:
        assert time.monotonic() < deadline + 120
        time.sleep(0.02)
    time.sleep(0.2)  # for the second to come to the files, if nothing held it
    server.stalls.set()
    folders = [process.communicate(timeout=120)[0].strip() for process in both]
    assert folders[0] == folders[1]
    assert read(folders[0]) == FILES
    assert server.asked.count("/model/model.safetensors") == 1
    assert "/model/sub/code.py" not in server.asked, "fetched before the kill"


def test_what_cannot_be_fetched_costs_one_line(
    tmp_path: Path, served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str) -> str:
        with pytest.raises(ModelError) as told:
            local_folder(url, "critic.path")
        (line,) = str(told.value).splitlines()
        return line

    assert "not a Hugging Face folder (0 files" in refused("memory://nothing")
    assert refused("nosuch://a/b").startswith("critic.path nosuch://a/b: cannot be fetched: Prot")
    assert "cannot be fetched" in refused("http://127.0.0.1:9/model")
    disk = write(tmp_path / "model", FILES)
    usage = type("Usage", (), {"free": 10})
    with monkeypatch.context() as small:
        small.setattr(fetch.shutil, "disk_usage", lambda _: usage)
        line = refused(f"file://{disk}")
        assert "0.0 GB do not fit into the 0.0 GB that it has left; free some space" in line
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as filled:
        filled.setattr(fetch, "fsync_path", lambda _: (_ for _ in ()).throw(full))
        assert "No space left on device; free some space, or choose another" in refused(
            f"file://{disk}"
        )
    monkeypatch.setenv("WINNOW_MODEL_CACHE", str(disk / "config.json"))
    assert "choose another folder in model.cache_dir" in refused(f"file://{disk}")


def test_keys_that_lead_out_of_the_folder_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk = write(tmp_path / "model", FILES)
    local = fsspec.filesystem("file")
    found = local.find(str(disk), detail=True)
    marks = {f"{disk}/": {"size": 0}, f"{disk}/sub/": {"size": 0}, **found}
    monkeypatch.setattr(type(local), "find", lambda *_, **__: marks)
    assert read(local_folder(f"file://{disk}")) == FILES, "what object stores mark folders with"
    fetch._local_folders.clear()
    evil = {f"{disk}/../../etc/x": {"size": 1}, **found}
    monkeypatch.setattr(type(local), "find", lambda *_, **__: evil)
    with pytest.raises(ModelError, match="points outside the model's folder"):
        local_folder(f"file://{disk}")


def test_a_run_and_an_evaluation_take_a_model_from_a_url(tmp_path: Path, cache: Path) -> None:
    digits_folder(tmp_path / "models" / "digits")
    url = f"file://{tmp_path}/models/digits"
    small = (
        *("rollout.max_response_tokens=24", "rollout.engine.slots=8", "data.task.eval_problems=4"),
        *("observe.console=plain", "run.threads=1", "evaluation.n=1"),
    )
    said = in_this_process(
        *("train", "quickstart", "warm_start=none", f"model.path={url}", "run.name=remote"),
        *("algorithm/kl/loss=fixed", f"reference.path={url}", "trainer.steps=1", *small),
        *("sampling.groups_per_step=2", "trainer.mini_batch_groups=null", "rollout.n=2"),
        *("sampling.filter=none", "reward.overlong.enabled=false"),
        folder=tmp_path,
        environment={},
    ).check()
    assert said.out.replace("\n", "").count("Fetching file://") == 1
    assert len([p for p in cache.iterdir() if not p.name.startswith(".")]) == 1
    said = in_this_process(
        *("eval", url, "--recipe", "quickstart", "warm_start=none", *small),
        folder=tmp_path,
        environment={},
    ).check()
    assert url in said.out.replace("\n", "")


def test_a_run_keeps_the_commit_of_a_hub_model(tmp_path: Path, hub: Hub) -> None:
    from winnow.checkpoints.opening import opened_run
    from winnow.config.load import load_recipe

    files = read(str(digits_folder(tmp_path / "digits")))
    hub.repos = {"owner/digits": files}

    def opened(*settings: str) -> tuple[Any, tuple[str, ...]]:
        words = ["warm_start=none", "model.path=owner/digits", "run.name=pinned"]
        config = load_recipe("quickstart", [*words, f"run.dir={tmp_path}/runs", *settings])
        with opened_run(config, "quickstart") as found:
            return found.config.model, found.notes

    model, _ = opened("model.revision=v1")
    assert model.source == f"owner/digits@{COMMIT}"
    kept = load_recipe(str(tmp_path / "runs" / "pinned" / "config.yaml"))
    assert kept.model.revision == COMMIT
    assert read(local_folder(model.source)) == files
    (tmp_path / "runs" / "pinned" / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    hub.repos = {}  # the same command again: what the branch is now is not asked
    assert read(again(model.source)) == files, "a commit is read from the hub's cache alone"
    model, notes = opened("model.revision=v1")
    assert model.revision == COMMIT
    assert f"owner/digits stays at revision {COMMIT}, pinned when the run started" in notes[0]
    with pytest.raises(ConfigError, match=r"model.revision was '?0123"):
        opened(f"model.revision={hashlib.sha1(b'other').hexdigest()}")


def test_a_revision_that_is_not_there_or_of_no_hub_model_is_told(tmp_path: Path, hub: Hub) -> None:
    hub.repos = {"owner/digits": {"config.json": b"{}"}}
    with pytest.raises(ModelError, match="has no such revision; choose another revision"):
        local_folder("owner/digits@nosuch")
    with pytest.raises(ModelError, match=r"is not on .*, or not for you; .*HF_TOKEN"):
        local_folder("owner/absent@main")
