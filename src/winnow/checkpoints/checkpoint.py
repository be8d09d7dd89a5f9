"""Checkpoints: a model folder anyone can load, and the state that training goes on from.

    checkpoints/step-80/
        model/          Hugging Face folder: config, tokenizer, weights
        state.json      sampler with its carried groups, loader, counters (`state_file`)
        state.safetensors   its arrays, and the optimizer's tensors
        config.yaml     the recipe it was made with
        manifest.json   step, place in metrics.jsonl, machine, each file's size and checksum

A checkpoint is written beside its place and renamed when it is whole, so that a folder with
this name is a complete one. Names that begin with a dot are drafts; `clean_drafts` deals with those
that a crash left.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors import SafetensorError

from winnow import types
from winnow.checkpoints.state_file import SHARD_INDEX, check_shards, read_state, write_state
from winnow.config.roles import POLICY_STATE
from winnow.errors import CheckpointError, WinnowError
from winnow.observe.files import (
    atomic_folder,
    disk_error_type,
    explain_disk_errors,
    find_os_error,
    reason_and_remedy,
)
from winnow.observe.metrics import HELD_OUT_LOSS
from winnow.sampling import accounting, admission, groups
from winnow.version import __version__

_NAME = re.compile(r"step-(\d+)$")
_FORMAT = 4
MANIFEST = "manifest.json"
STATE_CLASSES = tuple(
    each
    for module in (types, accounting, admission, groups)
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__ and is_dataclass(each)
)
"""Classes of which a state may hold objects: the dataclasses of these modules."""

CONFIG = "config.yaml"
PATIENCE = 3
"""Checkpoints in a row that may fail to be written or copied; the next that works brings all."""
_HASHED_AT_ONCE = min(16, os.cpu_count() or 1)
FileEntry = Mapping[str, Any]
"""Bytes and sha256 of a file, in a manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def model(self) -> Path:
        """The Hugging Face folder."""
        return self.path / "model"


@dataclass(frozen=True)
class Manifest:
    """The facts about a checkpoint, in manifest.json."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int = 0
    evaluated: bool = True
    """False when the step's evaluation, and so its line of metrics, is still to come."""
    metrics_bytes: int = 0
    """The end of metrics.jsonl."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The evaluation of the step, if there was one."""
    machine: Mapping[str, str | int] = field(default_factory=dict)
    """Versions and hardware that bits depend on: `describe_machine`."""
    code: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the user's Python files, by the keys of the recipe that name them."""
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    """Bytes and sha256 by path; filled in when the checkpoint is written."""

    def machine_changes(self, machine: Mapping[str, str | int]) -> list[str]:
        """Warn about differences between the checkpoint's machine and this one."""
        was = self.machine
        return [
            f"Warning: {key} changed from {was[key]} to {now}: results may differ in the last bits"
            for key, now in machine.items()
            if key in was and was[key] != now
        ]


_MANIFESTS = TypeAdapter(Manifest)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Models, optimizers and state at one moment: later updates change nothing in it."""

    state: Mapping[str, Any]
    """State that training goes on from: tensors, arrays, dataclasses and plain values."""
    save_model: Callable[[Path], None]
    """Writes a Hugging Face folder at the path it is given; may be called in a thread."""
    save_ranks: Callable[[Path], Mapping[str, FileEntry]] = lambda folder: {}
    """Writes the ranks' part into a checkpoint's folder; returns the entries of files that ranks
    have hashed and brought to disk, by path in it; may be called in a thread."""


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Describe the versions and hardware that the bits of a run depend on."""
    import transformers  # which takes a second, and the run has said where it goes by now

    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "winnow": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "device": f"{device.type} {name}",
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def save_checkpoint(
    folder: Path, manifest: Manifest, snapshot: Snapshot, recipe: str = ""
) -> Checkpoint:
    """Write `folder/step-N` atomically; a crash at any point leaves the previous state.

    Args:
        manifest: without `files`, which are filled in.
        recipe: as text in YAML.

    Raises:
        CheckpointError: the disk is full or not writable; nothing new is left behind.
    """
    target = folder / f"step-{manifest.step}"
    try:
        with atomic_folder(target) as draft:
            snapshot.save_model(draft / "model")
            entries = snapshot.save_ranks(draft)
            write_state(draft, snapshot.state)
            (draft / CONFIG).write_text(recipe, encoding="utf-8")
            _write_manifest(draft, manifest, entries)
    except (OSError, RuntimeError, SafetensorError) as error:
        cause = find_os_error(error)
        if cause is None:
            raise
        raise disk_error_type(cause, CheckpointError)(
            f"cannot save the checkpoint {target}: {reason_and_remedy(cause)}"
        ) from error
    return Checkpoint(target, manifest.step)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """List the checkpoints of a run, oldest first.

    Raises:
        WinnowError: the folder cannot be read.
    """
    with explain_disk_errors(folder):
        names = os.listdir(folder) if folder.is_dir() else []
    checkpoints = [
        Checkpoint(folder / name, int(match[1])) for name in names if (match := _NAME.match(name))
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def find_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """Find a run's checkpoint of a step, or its last, and verify it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoints = checkpoints_in(run / "checkpoints")
    chosen = [c for c in checkpoints if step is None or c.step == step]
    if not chosen:
        steps = ", ".join(str(c.step) for c in checkpoints) or "none"
        target = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"{run} has no {target}; there are: {steps}")
    verify(chosen[-1])
    return chosen[-1]


def newest_usable(
    run: Path, rank_folders: Collection[str] = ()
) -> tuple[Checkpoint | None, list[str]]:
    """Find a run's newest intact checkpoint; return it with warnings about damaged newer ones.

    Args:
        rank_folders: as for `verify`.

    Raises:
        CheckpointError: there are some, and none of them is whole.
    """
    faults: list[str] = []
    for checkpoint in reversed(checkpoints_in(run / "checkpoints")):
        try:
            verify(checkpoint, rank_folders)
        except CheckpointError as error:
            faults.append(str(error).partition(";")[0])
        else:
            after = f"continuing from step {checkpoint.step}"
            return checkpoint, [f"Warning: {fault}; {after}" for fault in faults]
    if faults:
        rest = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise CheckpointError(
            f"{run} has no intact checkpoint: {faults[0]}{rest}; restore that file, or choose "
            "another run.name"
        )
    return None, []


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the training state of a verified checkpoint.

    Raises:
        CheckpointError: it is damaged in a way that checksums do not show.
    """
    for index in checkpoint.path.rglob(SHARD_INDEX):
        check_shards(index.parent)
    return read_state(checkpoint.path, STATE_CLASSES)


def read_manifest(checkpoint: Checkpoint) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another format.
    """
    path = checkpoint.path / MANIFEST
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        version, digest = entries.pop("format"), entries.pop("sha256")
        is_whole = digest == _digest(entries)
        manifest = _MANIFESTS.validate_python(entries) if is_whole and version == _FORMAT else None
        if manifest and any(
            {"bytes", "sha256"} - entry.keys() for entry in manifest.files.values()
        ):
            raise ValueError("an entry lacks its checksum")
    except OSError as error:
        raise _unreadable_error(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: not a manifest; use another checkpoint"
        ) from error
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this version reads {_FORMAT}; use the winnow version "
            "that wrote it, or load only its model/ folder"
        )
    if manifest is None:
        raise CheckpointError(f"{path} is damaged (checksum differs); use another checkpoint")
    return manifest


def _unreadable_error(path: Path, error: OSError) -> WinnowError:
    # Of a bad sector the checkpoint before can take the place; a file server may be back.
    kind = CheckpointError if error.errno == errno.EIO else disk_error_type(error, CheckpointError)
    return kind(f"{path} cannot be read: {error.strerror}; use another checkpoint")


def verify(checkpoint: Checkpoint, rank_folders: Collection[str] = ()) -> Manifest:
    """Verify every file of a checkpoint against its manifest; return the manifest.

    Args:
        rank_folders: folders (`Role.saved_in`) of ranks that check the content of what they read
            (`verify_rank_share`), where this process checks its size.

    Raises:
        CheckpointError: names the file.
    """
    manifest, path = read_manifest(checkpoint), checkpoint.path
    files = {str(p.relative_to(path)): p for p in path.rglob("*") if not p.is_dir()}
    for name in sorted(manifest.files.keys() - files.keys()):
        raise _unreadable_error(
            path / name, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        )
    for name in sorted(files.keys() - manifest.files.keys() - {MANIFEST}):
        if not files[name].name.startswith(".nfs"):  # a file server's, of one still open
            raise CheckpointError(
                f"{files[name]} is not part of the checkpoint; remove it, or use another checkpoint"
            )
    _check_files(path, manifest.files, rank_folders)
    return manifest


def verify_rank_share(
    checkpoint: Path, rank: int, world_size: int, folder: str = POLICY_STATE
) -> None:
    """Verify one rank's share of a role's weights and shards; shares are balanced by bytes.

    Args:
        folder: of the role's state (`Role.saved_in`).

    Raises:
        CheckpointError: names a file that is not what was written.
    """
    files = read_manifest(Checkpoint(checkpoint, 0)).files
    shares: list[dict[str, FileEntry]] = [{} for _ in range(world_size)]
    loads = [0] * world_size
    theirs = (name for name in files if _is_read_by_ranks(folder, name))
    for name in sorted(theirs, key=lambda n: (-files[n]["bytes"], n)):
        least = loads.index(min(loads))
        shares[least][name] = files[name]
        loads[least] += files[name]["bytes"]
    _check_files(checkpoint, shares[rank])


def _is_read_by_ranks(folder: str, name: str) -> bool:
    """Return whether the ranks whose state lies in a folder read a file."""
    model = r"|model/[^/]*\.safetensors" if folder == POLICY_STATE else ""
    return re.fullmatch(rf"{folder}/[^/]*\.distcp{model}", name) is not None


def _check_files(
    folder: Path, files: Mapping[str, FileEntry], rank_folders: Collection[str] = ()
) -> None:
    def check(name: str) -> None:
        part, entry = folder / name, files[name]
        is_theirs = any(_is_read_by_ranks(each, name) for each in rank_folders)
        try:
            is_whole = part.is_file() and part.stat().st_size == entry["bytes"]
            is_whole = is_whole and (is_theirs or _sha256(part) == entry["sha256"])
        except OSError as error:
            raise _unreadable_error(part, error) from error
        if not is_whole:
            raise CheckpointError(f"{part} is damaged (checksum differs); use another checkpoint")

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:  # hashing lets go of the interpreter
        for _ in pool.map(check, files):
            pass


def remove(checkpoints: Iterable[Checkpoint]) -> None:
    """Delete checkpoints, each atomically.

    Raises:
        WinnowError: the folder cannot be changed.
    """
    for checkpoint in checkpoints:
        gone = checkpoint.path.with_name(f".{checkpoint.path.name}.partial")
        with explain_disk_errors(checkpoint.path):
            shutil.rmtree(gone, ignore_errors=True)
            checkpoint.path.rename(gone)
            shutil.rmtree(gone)


def clean_drafts(folder: Path) -> None:
    """Delete incomplete checkpoints that a crash left, and restore one that was being replaced.

    Raises:
        OSError: a checkpoint cannot be put back into its place.
    """
    for path in folder.glob(".step-*"):
        place = folder / path.stem[1:]
        if path.suffix == ".replaced" and not place.exists():
            path.rename(place)
            continue
        # Renamed first: a writer that is still at it then finds its folder gone.
        gone = path.with_name(f"{path.name}.gone")
        with contextlib.suppress(OSError):
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def prune(
    folder: Path, keep_last: int | None, keep_every: int | None = None, keep_best: str | None = None
) -> None:
    """Delete checkpoints that the retention settings do not keep, except unreadable ones.

    Args:
        keep_last: number of the newest that stay; None keeps all.
        keep_every: steps that are a multiple of it stay for good.
        keep_best: figure of the evaluation, of which the largest value stays, or the smallest of a
            loss; of equals the later one.

    Raises:
        WinnowError: the folder cannot be changed.
    """
    if keep_last is None:
        return
    checkpoints = checkpoints_in(folder)
    keep = set(checkpoints[-keep_last:])
    keep |= {c for c in checkpoints if keep_every is not None and c.step % keep_every == 0}
    values: dict[Checkpoint, float] = {}
    for checkpoint in checkpoints:
        try:
            value = read_manifest(checkpoint).figures.get(keep_best or "", math.nan)
        except CheckpointError:
            keep.add(checkpoint)
            continue
        if not math.isnan(value):
            values[checkpoint] = -value if keep_best == HELD_OUT_LOSS else value
    if values:
        keep.add(max(values, key=lambda c: (values[c], c.step)))
    remove(c for c in checkpoints if c not in keep)


def file_entry(path: Path) -> FileEntry:
    """Return size and sha256 of a file for a manifest."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_manifest(draft: Path, manifest: Manifest, entries: Mapping[str, FileEntry]) -> None:
    paths = (path for path in sorted(draft.rglob("*")) if path.is_file())
    named = ((str(path.relative_to(draft)), path) for path in paths)
    files = {name: entries[name] if name in entries else file_entry(path) for name, path in named}
    entries = asdict(replace(manifest, files=files))
    text = json.dumps({"format": _FORMAT, "sha256": _digest(entries), **entries}, indent=1)
    (draft / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _digest(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
