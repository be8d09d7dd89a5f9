"""Checkpoints: a model folder anyone can load, and the state that training goes on from.

    checkpoints/step-80/
        model/          Hugging Face folder: config, tokenizer, weights
        state.pt        optimizer, sampler with its carried groups, loader, counters
        manifest.json   step, files with size and checksum, versions

A checkpoint is written beside its place and renamed when it is whole, so that a folder with
this name is a complete one.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from winnow import __version__
from winnow.errors import CheckpointError

_NAME = re.compile(r"step-(\d+)$")
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.path / "model"


def save_checkpoint(
    folder: Path, step: int, save_model: Callable[[Path], None], state: Mapping[str, Any]
) -> Checkpoint:
    """Write `folder/step-N` whole or not at all.

    Args:
        save_model: writes a Hugging Face folder at the path it is given.
        state: what training goes on from; tensors, numpy arrays and plain values.

    Raises:
        CheckpointError: the disk is full or not writable; nothing is left behind.
    """
    target = folder / f"step-{step}"
    draft = folder / f".{target.name}.{os.getpid()}.partial"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_model(draft / "model")
        torch.save(dict(state), draft / "state.pt")
        files = {
            str(path.relative_to(draft)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in sorted(draft.rglob("*"))
            if path.is_file()
        }
        manifest = {
            "format": _FORMAT,
            "step": step,
            "winnow": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "files": files,
        }
        (draft / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        _sync(draft)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError of its zip writer.
        if isinstance(error, RuntimeError) and "write" not in str(error):
            raise
        raise CheckpointError(
            f"cannot save the checkpoint {target}: {error}; free space or choose another run.dir"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Checkpoint(target, step)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    found = [
        Checkpoint(path, int(match[1]))
        for path in folder.iterdir()
        if (match := _NAME.match(path.name)) and (path / "manifest.json").is_file()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The training state of a checkpoint, after its files were checked against the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    verify(checkpoint)
    path = checkpoint.path / "state.pt"
    try:
        # Carried groups hold numpy arrays and our own plain values, which weights_only refuses.
        state = torch.load(path, map_location="cpu", weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error
    assert isinstance(state, dict)
    return state


def verify(checkpoint: Checkpoint) -> None:
    """See that every file is there and is what was written.

    Raises:
        CheckpointError: names the file.
    """
    path = checkpoint.path / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')}, this version reads {_FORMAT}; "
            "use the version of winnow that wrote it"
        )
    for name, entry in files.items():
        part = checkpoint.path / name
        if not part.is_file():
            raise CheckpointError(f"{part} is missing; use another checkpoint")
        if part.stat().st_size != entry["bytes"] or _sha256(part) != entry["sha256"]:
            raise CheckpointError(f"{part} is damaged (checksum differs); use another checkpoint")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Flush every file and folder to disk, so that the rename cannot outrun the contents."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
