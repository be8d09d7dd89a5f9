"""The copy of a run's folder elsewhere."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from winnow.checkpoints.checkpoint import (
    Checkpoint,
    FileEntry,
    Manifest,
    Snapshot,
    checkpoints_in,
    save_checkpoint,
    verify,
)
from winnow.checkpoints.upload import CheckpointUpload
from winnow.errors import CheckpointError


def save(run: Path, step: int) -> Checkpoint:
    run.mkdir(exist_ok=True)
    (run / "rollouts").mkdir(exist_ok=True)
    (run / "config.yaml").write_text("a: 1")
    (run / "rollouts" / f"step-{step}.parquet").write_text(str(step))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{step}\n")

    def save_ranks(draft: Path) -> dict[str, FileEntry]:
        (draft / "ranks").mkdir()
        (draft / "ranks" / ".metadata").write_text("the index of the shards")
        return {}

    snapshot = Snapshot({"step": step}, lambda model: model.mkdir(), save_ranks)
    return save_checkpoint(run / "checkpoints", Manifest(step), snapshot)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/elsewhere"
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/path"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_lost_folder_comes_back_as_it_was_without_drafts_and_lock(
    url: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "a"
    run.parent.mkdir()
    mirror = CheckpointUpload(url, run)
    mirror.push(save(run, 1))
    second = save(run, 2)
    shutil.rmtree(run / "checkpoints" / "step-1")  # what is kept no longer goes there, too
    before = contents(run)
    (run / ".lock").touch()
    (run / "checkpoints" / ".step-3.partial").mkdir()
    (run / "checkpoints" / ".step-3.partial" / "state.safetensors").touch()
    (run / "rollouts" / "step-3.parquet.partial").touch()
    mirror.push(second)
    shutil.rmtree(run)
    assert CheckpointUpload(url, run).fetch()
    assert contents(run) == before
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    verify(checkpoint)
    assert [path.name for path in run.parent.iterdir()] == ["a"]


def test_without_a_copy_there_is_nothing_to_fetch(url: str, tmp_path: Path) -> None:
    assert not CheckpointUpload(url, tmp_path / "a").fetch()
    assert not (tmp_path / "a").exists()


def test_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    order: list[str] = []
    put = files.put_file

    def noted(here: str, there: str, **more: Any) -> None:
        order.append(Path(there).name)
        put(here, there, **more)

    monkeypatch.setattr(type(files), "put_file", staticmethod(noted))
    CheckpointUpload("memory://x", tmp_path / "a").push(save(tmp_path / "a", 1))
    assert order[-1] == "manifest.json"


def test_a_copy_that_fails_is_tried_again_and_then_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = fsspec.filesystem("memory")
    files.store.clear()
    run = tmp_path / "a"
    mirror = CheckpointUpload("memory://x", run)

    def fails(*args: Any, **more: Any) -> None:
        raise PermissionError("no credentials")

    for _ in range(2):  # a success in between starts the count anew
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(type(files), "put_file", fails)
            mirror.push(save(run, 1))
            mirror.push(save(run, 2))
        assert "no credentials; retrying at the next checkpoint" in caplog.text
        mirror.push(save(run, 3))
    monkeypatch.setattr(type(files), "put_file", fails)
    mirror.push(save(run, 4))
    mirror.push(save(run, 5))
    with pytest.raises(CheckpointError, match=r"step-6 to memory://x: no credentials; fix"):
        mirror.push(save(run, 6))


@pytest.mark.parametrize("url", ["nonsense://x", "s3s://bucket"])
def test_a_url_of_no_known_kind_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"trainer.checkpoint_url={url} cannot be used"):
        CheckpointUpload(url, tmp_path)


def test_a_key_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory").store
    store.clear()
    run = tmp_path / "runs" / "a"
    run.parent.mkdir()
    mirror = CheckpointUpload("memory://bucket", run)
    mirror.push(save(run, 1))
    shutil.rmtree(run)
    store["/bucket/a/../../evil.txt"] = store["/bucket/a/config.yaml"]
    with pytest.raises(CheckpointError, match=r"the key .*evil.txt points outside the run folder"):
        mirror.fetch()
    assert list(tmp_path.rglob("*")) == [run.parent]
