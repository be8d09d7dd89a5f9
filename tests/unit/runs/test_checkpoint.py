"""Checkpoints: whole or absent, checked on reading, kept as long as asked."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unprivileged import permissions_apply

from winnow.errors import CheckpointError, WinnowError
from winnow.runs import checkpoint as module
from winnow.runs.checkpoint import (
    Checkpoint,
    Manifest,
    Snapshot,
    checkpoints_in,
    clean,
    load_state,
    newest_usable,
    prune,
    read_manifest,
    save_checkpoint,
    this_machine,
    verify,
)

STATE = {
    "weights": {"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)},
    "groups": [{"ids": np.arange(7), "logprobs": np.float32([-0.1, -2.5]), "uid": "x"}],
    "counts": (1, 2.5, None, "text"),
}


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 16)


def save(folder: Path, step: int, config: str = "", **more: Any) -> Checkpoint:
    return save_checkpoint(folder, Manifest(step, **more), Snapshot(STATE, write_model), config)


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints_in(folder)]


class Crash(BaseException):
    """The process is gone; unlike SIGKILL it lets `finally` run."""


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    figures = {"eval/x/pass@1": 0.5}
    machine = this_machine(torch.device("cpu"))
    saved = save(tmp_path, 3, config="a: 1", metrics_bytes=77, figures=figures, machine=machine)
    state, manifest = load_state(saved), read_manifest(saved)
    assert torch.equal(state["weights"]["a"], STATE["weights"]["a"])  # type: ignore[call-overload]
    assert state["weights"]["b"].dtype == torch.bfloat16
    assert state["groups"][0]["ids"].tolist() == list(range(7))
    assert state["counts"] == STATE["counts"]
    assert (saved.path / "config.yaml").read_text() == "a: 1"
    assert (manifest.step, manifest.metrics_bytes, manifest.evaluated) == (3, 77, True)
    assert manifest.figures == figures
    assert manifest.machine == machine
    assert {"threads", "instruction set", "torch"} <= manifest.machine.keys()


def test_steps_are_listed_in_order_and_drafts_are_not(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, step)
    (tmp_path / ".step-200.partial").mkdir()
    (tmp_path / "notes").mkdir()
    assert steps(tmp_path) == [9, 10, 100]
    assert steps(tmp_path / "absent") == []


def parts() -> list[str]:
    return [
        *("manifest.json", "state.json", "state.safetensors", "config.yaml"),
        *("model/config.json", "model/model.safetensors"),
    ]


@pytest.mark.parametrize("part", parts())
@pytest.mark.parametrize("damage", ["flipped", "cut short", "emptied", "removed", "a folder"])
def test_damage_of_any_kind_to_any_part_is_found_and_the_one_before_is_used(
    part: str, damage: str, tmp_path: Path
) -> None:
    good, bad = (
        save(tmp_path / "checkpoints", 1, config="x: 1"),
        save(tmp_path / "checkpoints", 2, config="x: 1"),
    )
    path = bad.path / part
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "cut short":
        path.write_bytes(content[: -(-len(content) // 2)])
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    with pytest.raises(CheckpointError, match=part) as caught:
        load_state(bad)
    assert "\n" not in str(caught.value)
    found, faults = newest_usable(tmp_path)
    assert found == good
    (warning,) = faults
    assert part in warning
    assert warning.endswith("; going on from step 1")


def test_without_a_usable_checkpoint_the_user_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path / "checkpoints", step).path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint that is whole: .*, and 1 more; put"):
        newest_usable(tmp_path)


def test_another_format_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(tmp_path, 1)
    monkeypatch.setattr(module, "_FORMAT", 99)
    with pytest.raises(CheckpointError, match=r"has format 4, this version reads 99; use the"):
        verify(saved)


@contextmanager
def crashing_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The `call`-th system call of those that a save ends with does not return."""
    count = 0

    def counted(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                raise Crash
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(module.os, "fsync", counted(module.os.fsync))
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # no time to clean up
        yield


@pytest.mark.parametrize("existing", [False, True])
def test_a_crash_at_any_point_leaves_what_was_there(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = 0
    for call in range(1, 40):
        folder = tmp_path / str(call)
        save(folder, 1)
        if existing:
            save(folder, 2)
        try:
            with crashing_at(call, monkeypatch):
                save(folder, 2)
        except Crash:
            crashes += 1
        else:
            break
        clean(folder)
        assert [path.name for path in folder.iterdir() if path.name[0] == "."] == []
        assert 1 in steps(folder)
        assert 2 in steps(folder) or not existing
        for checkpoint in checkpoints_in(folder):
            verify(checkpoint)
        save(folder, 2)
        assert steps(folder) == [1, 2]
    assert crashes >= 9


def test_every_file_is_flushed_before_the_checkpoint_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("flushed", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def noted_rename(self: Path, target: Path) -> Path:
        done.append(("renamed", self))
        return rename(self, target)

    monkeypatch.setattr(module.os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    saved = save(tmp_path, 1)
    ((draft, place),) = [(path, i) for i, (what, path) in enumerate(done) if what == "renamed"]
    there = {path.relative_to(saved.path) for path in (saved.path, *saved.path.rglob("*"))}
    assert {path.relative_to(draft) for _, path in done[:place]} == there
    assert len(there) == 8
    assert done[place + 1 :] == [("flushed", tmp_path)]


def test_a_full_disk_is_said_in_one_line_and_nothing_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    big = Snapshot({"big": torch.zeros(100_000)}, write_model)
    try:
        with pytest.raises(CheckpointError, match=r"step-2: .*too large; free some") as caught:
            save_checkpoint(tmp_path, Manifest(2), big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


ACCURACY = {1: 0.2, 2: 0.7, 4: 0.7, 6: float("nan")}
CASES = [
    ((None,), [1, 2, 3, 4, 5, 6]),
    ((1,), [6]),
    ((2,), [5, 6]),
    ((1, 2), [2, 4, 6]),
    # Of equals the later one, which has learnt more.
    ((1, None, "acc"), [4, 6]),
    ((2, 3, "acc"), [3, 4, 5, 6]),
    ((1, None, "other"), [6]),
    ((1, None, "sft/held_out_loss"), [1, 6]),
]


@pytest.mark.parametrize(("retention", "kept"), CASES)
def test_what_is_kept(retention: tuple[Any, ...], kept: list[int], tmp_path: Path) -> None:
    for step in range(1, 7):
        value = ACCURACY.get(step, float("nan"))
        save(tmp_path, step, figures={"acc": value, "sft/held_out_loss": value})
    prune(tmp_path, *retention)
    assert steps(tmp_path) == kept
    assert [path for path in tmp_path.iterdir() if path.name[0] == "."] == []


def test_a_checkpoint_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-1" / "manifest.json").write_text("{")
    prune(tmp_path, 1)
    assert steps(tmp_path) == [1, 3]


def test_a_folder_that_may_not_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    save(tmp_path, 1)
    tmp_path.chmod(0)
    try:
        with permissions_apply(), pytest.raises(WinnowError) as caught:
            checkpoints_in(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert str(caught.value) == (
        f"cannot use {tmp_path}: Permission denied; "
        "choose a folder that you may write to with run.dir=FOLDER"
    )
