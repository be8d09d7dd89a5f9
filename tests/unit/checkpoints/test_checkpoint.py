"""Checkpoints: whole or absent, checked on reading, kept as long as asked."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from winnow.checkpoints import checkpoint as module
from winnow.checkpoints.checkpoint import (
    STATE_CLASSES,
    Checkpoint,
    Manifest,
    Snapshot,
    checkpoints_in,
    clean_drafts,
    newest_usable,
    prune,
    read_manifest,
    save_checkpoint,
    verify,
)
from winnow.checkpoints.state_file import read_state
from winnow.config.load import load_recipe
from winnow.errors import CheckpointError, TransientError

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


OLD_RUN = Path(__file__).parents[2] / "fixtures" / "run_abf0cbd"
"""Recipe, manifest and state (no model) of step 2 of a run that commit abf0cbd trained."""


def test_the_recipe_manifest_and_state_of_an_older_version_are_read() -> None:
    config = load_recipe(str(OLD_RUN / "config.yaml"))
    assert (config.rollout.n, config.sampling.groups_per_step) == (3, 3)
    assert read_manifest(Checkpoint(OLD_RUN, 2)).step == 2
    state = read_state(OLD_RUN, STATE_CLASSES)
    assert {"sampler", "pending", "loader", "learner", "optimizer"} <= state.keys()


PARTS = (
    *("manifest.json", "state.json", "state.safetensors", "config.yaml"),
    *("model/config.json", "model/model.safetensors"),
)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "removed": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_kind_to_any_part_is_found_and_the_one_before_is_used(
    damage: str, tmp_path: Path
) -> None:
    good = save(tmp_path / "checkpoints", 1, config="x: 1")
    for part in PARTS:
        bad = save(tmp_path / "checkpoints", 2, config="x: 1")
        DAMAGES[damage](bad.path / part)
        with pytest.raises(CheckpointError, match=part) as caught:
            verify(bad)
        assert "\n" not in str(caught.value)
        found, (warning,) = newest_usable(tmp_path)
        assert found == good
        assert part in warning
        assert warning.endswith("; continuing from step 1")
        shutil.rmtree(bad.path)


@pytest.mark.parametrize(
    "entries",
    [
        {"more": 1},
        {"files": None},
        {"files": {"config.yaml": None}},
        {"files": {"config.yaml": {"bytes": 0}}},
        {"step": []},
        {"files": {"/dev/zero": {"bytes": 0, "sha256": ""}}},
        {"machine": "[" * 100_000 + "]" * 100_000},
    ],
    ids=lambda entries: str(entries)[:40],
)
def test_a_manifest_with_a_fitting_sum_is_refused_in_one_line(
    entries: dict[str, Any], tmp_path: Path
) -> None:
    path = save(tmp_path, 3).path / module.MANIFEST
    told = {**json.loads(path.read_text()), **entries}
    del told["format"], told["sha256"]
    text = json.dumps({"format": 4, "sha256": module._digest(told), **told})
    path.write_text(text.replace('"[', "[").replace(']"', "]"))
    with pytest.raises(CheckpointError, match=r"cannot be read: (not a man|No such)") as caught:
        verify(Checkpoint(path.parent, 3))
    assert "\n" not in str(caught.value)


def test_a_file_that_was_added_to_a_checkpoint_is_found(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    (saved.model / ".nfs0001").touch()  # a file server's own
    verify(saved)
    (saved.model / "modeling_x.py").touch()
    with pytest.raises(
        CheckpointError, match=r"modeling_x\.py is not part of the checkpoint; remove"
    ):
        verify(saved)


def test_a_file_server_that_is_away_does_not_cost_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)

    def stale(path: Path) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, "_sha256", stale)
    with pytest.raises(TransientError, match="Stale file handle"):
        newest_usable(tmp_path)


def test_all_files_of_a_checkpoint_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved = save(tmp_path, 3)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in saved.path.rglob("*") if path.is_file()}
    assert modes == {0o640}


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
        clean_drafts(folder)
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
