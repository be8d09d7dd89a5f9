"""Opening of a run's folder: a new one, or one that is continued.

| run.resume | the folder | |
|---|---|---|
| auto | run.name is new, or not given | a new run |
| auto | run.name is an unfinished run of the same recipe | continued |
| never | run.name must be new | a new run |
| a run's folder | that one | continued after its newest usable checkpoint |
| a checkpoint's folder | the run it lies in | continued after that checkpoint |

`run.fork` makes a new run that goes on from a copy of another's state (`recipe_changes` says how
their recipes may differ). A start that is refused leaves no new folder.

What is later than the checkpoint is dropped: lines of metrics, the ledger, rollouts, evaluations.
It comes again, bit for bit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import torch
from filelock import FileLock, Timeout

from winnow.checkpoints.checkpoint import (
    CONFIG,
    Checkpoint,
    Manifest,
    checkpoints_in,
    clean_drafts,
    find_checkpoint,
    load_state,
    newest_usable,
    read_manifest,
    remove,
    verify,
)
from winnow.checkpoints.recipe_changes import check_fork, check_same, forked_state, with_settings
from winnow.checkpoints.strangers import MARK, mark_as_local
from winnow.config.base import CODE, side_effects
from winnow.config.data import DataConfig, Demonstrations, Sft
from winnow.config.files import recipe_name
from winnow.config.load import dump_config, load_recipe
from winnow.config.model import ModelConfig
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import CPU_MICROBATCH_TOKENS, GPU_MICROBATCH_TOKENS, LocalCluster
from winnow.data.hub import is_on_hub, pin_files
from winnow.errors import CheckpointError, ConfigError, WinnowError
from winnow.models.fetch import local_folder, may_be_hub_name
from winnow.observe.files import (
    INPUTS,
    MODEL,
    PARTIAL,
    TOKENIZER,
    USAGE,
    RunFolder,
    disk_error,
    explain_disk_errors,
    explain_write_errors,
    open_nofollow,
)
from winnow.observe.jsonl import METRICS_FILE, MetricsLog
from winnow.observe.rollouts import delete_rollouts_after, list_step_files

LOCK_FILE = ".lock"
"""Its name in a run's folder. It stays there: a lock file that comes and goes can be held twice."""
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NOTHING_YET = Manifest(step=-1, evaluated=False)
_COMMIT = re.compile(r"[0-9a-f]{40}")
DISCARDABLE_FILES = {
    *(LOCK_FILE, MARK, INPUTS, "log.txt", CONFIG, f"{CONFIG}{PARTIAL}", METRICS_FILE, "trackers"),
    *(name + end for name in (TOKENIZER, MODEL, USAGE) for end in ("", PARTIAL)),
}
"""Files of a run before there is anything to lose."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A locked run folder with its recipe and the checkpoint to resume from."""

    folder: RunFolder
    config: Config
    """The recipe as the folder keeps it."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to go on from; None starts at the beginning."""
    manifest: Manifest = _NOTHING_YET
    fork_source: Config | None = None
    """The recipe of the checkpoint, where that is still the one that the run was forked from."""
    is_new: bool = False
    """The folder was made by this start."""
    knows_steps: bool = True
    """False while the steps that fill `trainer.data_epochs` are others than before."""
    may_be_damaged: bool = False
    """Ranks are yet to check the checkpoint, for which an older one may stand in."""

    def load_state(self, config: Config) -> dict[str, Any]:
        """Read the state to resume from.

        Raises:
            CheckpointError: it is damaged, or too old for the recipe, or does not fit a fork's.
        """
        assert self.checkpoint is not None
        state = load_state(self.checkpoint)
        epochs = config.trainer.data_epochs
        if epochs is not None and "sampler" in state and "passes" not in state:
            raise CheckpointError(
                f"trainer.data_epochs={epochs:g}: {self.checkpoint.path} predates the tracking of "
                "epochs; set trainer.data_epochs=null and trainer.steps"
            )
        if self.fork_source is None:
            return state
        return forked_state(config, self.fork_source, state, str(self.checkpoint.path))

    def is_finished(self, steps: int) -> bool:
        """Return whether all steps are known to be done."""
        return self.knows_steps and self.manifest.step >= steps and self.manifest.evaluated


def rewind(folder: RunFolder, manifest: Manifest, metrics: MetricsLog, recipe: str) -> None:
    """Drop all records later than a checkpoint, and write the recipe to the folder.

    In this order: a crash within leaves what the same call can finish.

    Raises:
        WinnowError: the folder cannot be changed, or metrics.jsonl was.
    """
    step = manifest.step
    remove(c for c in reversed(checkpoints_in(folder.checkpoints)) if c.step > step)
    delete_rollouts_after(folder.ledger, step)
    delete_rollouts_after(folder.rollouts, step)
    delete_rollouts_after(folder.evaluations, step if manifest.evaluated else step - 1)
    metrics.truncate(manifest.metrics_bytes)
    folder.save_config(recipe)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder while the block runs: one process per run.

    The system takes the lock back however the process ends.

    Raises:
        ConfigError: another process holds it; says which.
        WinnowError: the lock file cannot be made.
    """
    path = folder / LOCK_FILE
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(errors="replace") or "another process"
        raise ConfigError(
            f"{folder} is in use by {holder}; wait for it, stop it, or choose another run.name"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise disk_error(path, error) from error
        log.warning("%s is on a file system without locks: start only one process", folder)
    try:
        # A full disk: only the message above would miss it.
        with contextlib.suppress(OSError), open_nofollow(path, "wb") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.release()


class DamagedError(CheckpointError):
    """The checkpoint in use is damaged, and an older one is intact."""

    def __init__(self, older: Checkpoint, warnings: Sequence[str]) -> None:
        super().__init__(*warnings)
        self.older, self.warnings = older, warnings


@contextlib.contextmanager
def detecting_damage(opened: OpenedRun) -> Iterator[Event]:
    """Verify a checkpoint that ranks were to verify, if the start from it fails.

    Yields:
        Set once it has not.

    Raises:
        DamagedError: it is damaged, and an older one is not.
        CheckpointError: none is whole.
    """
    has_begun = Event()
    try:
        yield has_begun
    except WinnowError as error:
        if has_begun.is_set() or not opened.may_be_damaged or error.exit_code != 2:
            raise
        older, warnings = newest_usable(opened.folder.path)
        if older is None or older == opened.checkpoint:
            raise
        raise DamagedError(older, warnings) from error


@contextlib.contextmanager
def opened_run(config: Config, recipe: str) -> Iterator[OpenedRun]:
    """Open and lock the folder selected by `run.resume` and `run.name` while the block runs.

    Raises:
        ConfigError: it is in use, was made by another recipe, or is none.
        CheckpointError: the checkpoint asked for is damaged.
        WinnowError: the folder may not be read or written to.
    """
    with contextlib.ExitStack() as stack:
        with explain_disk_errors(Path(config.run.dir)):
            opened = _open_run(config, recipe, stack)
            new = _valuable_files(opened.folder.path) if opened.is_new else None
        try:
            yield opened
        except WinnowError as error:
            path = opened.folder.path
            if new is not None and error.exit_code == 2 and _valuable_files(path) <= new:
                shutil.rmtree(path, ignore_errors=True)
            raise


def _valuable_files(folder: Path) -> set[Path]:
    """List the files of a run that were written after its start."""
    files = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
    saved = {path for path in files if path.parts[0] not in DISCARDABLE_FILES}
    metrics = Path(METRICS_FILE)
    has_figures = metrics in files and (folder / metrics).stat().st_size > 0
    return saved | {metrics} if has_figures else saved


def _open_run(config: Config, recipe: str, stack: contextlib.ExitStack) -> OpenedRun:
    run, url = config.run, config.trainer.checkpoint_url
    if run.resume not in ("auto", "never"):
        path, checkpoint = split_run_and_checkpoint("run.resume", run.resume)
        stack.enter_context(locked(path))
        return _reopen_run(config, RunFolder.open(path), checkpoint)
    named = None if run.name is None else RunFolder(Path(run.dir) / run.name)
    names: set[str] = set()
    is_begun = False
    if named is not None:
        if run.resume == "auto" and url is not None and not named.path.exists():
            from winnow.checkpoints.upload import CheckpointUpload

            if CheckpointUpload(url, named.path).fetch():  # from where the user said
                mark_as_local(named.path)
        if named.path.is_dir():
            names = {each.name for each in named.path.iterdir()}
        # A run that ended before its first figures has nothing to lose.
        has_figures = METRICS_FILE in names and named.metrics.stat().st_size > 0
        is_begun = has_figures or not names <= DISCARDABLE_FILES
        if run.resume == "auto" and is_begun and CONFIG in names:
            stack.enter_context(locked(named.path))
            return _reopen_run(config, named, None)
    origin = None if run.fork is None else _find_fork_source(config, run.fork)
    if origin is None:
        data = _pin_hub_files(config.data, config.sft, {})
        config = pin_microbatch_tokens(config)
        config = config.model_copy(update={"data": data, "model": _pin_commit(config.model)})
    else:
        config = origin.config
    if named is None or is_begun or not names:
        named = RunFolder.create(run.dir, run.name, recipe)
    stack.enter_context(locked(named.path))
    for name in names - {LOCK_FILE, INPUTS}:
        if name == named.trackers.name:
            shutil.rmtree(named.trackers)
        else:
            (named.path / name).unlink(missing_ok=True)
    mark_as_local(named.path)
    fork = None if origin is None else f"{origin.run}@{origin.checkpoint.step}"
    saved_config = with_settings(config, run={"resume": "auto", "fork": fork})
    if origin is not None:
        with explain_write_errors(named.path):
            origin.copy_to(named)
    named.save_config(dump_config(saved_config, recipe_name(recipe)))
    if origin is None:
        return OpenedRun(named, saved_config, is_new=True)
    opened = _reopen_run(saved_config, named, None)
    return replace(opened, notes=origin.notes, is_new=True)


@dataclass(frozen=True)
class ForkSource:
    """The checkpoint that a run is forked from."""

    config: Config
    """The recipe of the fork."""
    run: Path
    checkpoint: Checkpoint
    notes: tuple[str, ...]

    def copy_to(self, folder: RunFolder) -> None:
        """Copy the run up to the checkpoint; files that never change are shared by links."""
        origin = RunFolder(self.run)
        for source in (origin.ledger, origin.rollouts, origin.evaluations):
            for step, file in list_step_files(source):
                if step <= self.checkpoint.step:
                    (folder.path / source.name).mkdir(exist_ok=True)
                    _link_or_copy(file, folder.path / source.name / file.name)
        shutil.copyfile(origin.metrics, folder.metrics)
        target = folder.checkpoints / self.checkpoint.path.name
        shutil.copytree(self.checkpoint.path, target, copy_function=_link_or_copy)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _find_fork_source(config: Config, fork: str) -> ForkSource:
    """Find the checkpoint of `run.fork`, and check that its state fits the recipe.

    Raises:
        ConfigError: it names none, or the recipe is one of another model, data or optimizer.
        CheckpointError: the checkpoint is damaged.
    """
    source, at, step = fork.rpartition("@")
    if at and step.isdecimal():
        run, checkpoint = split_run_and_checkpoint("run.fork", source)
        checkpoint = find_checkpoint(run, int(step))
    else:
        run, checkpoint = split_run_and_checkpoint("run.fork", fork)
        if checkpoint is not None:
            verify(checkpoint)
    checkpoint, faults = (checkpoint, []) if checkpoint is not None else newest_usable(run)
    if checkpoint is None:
        raise ConfigError(f"run.fork={fork}: {run} has no checkpoint yet; choose another run")
    manifest = read_manifest(checkpoint)
    has_steps = config.trainer.data_epochs is None
    if has_steps and config.trainer.steps <= checkpoint.step:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps} leaves nothing to train after step "
            f"{checkpoint.step} of {run}; set it to {checkpoint.step + 1} or more, or fork an "
            "earlier step with run.fork=RUN@STEP"
        )
    recipe = load_recipe(str(checkpoint.path / CONFIG))
    config, pinned = _pin_as_saved(config, recipe)
    changes = check_fork(config, recipe, str(checkpoint.path))
    code = code_changes(user_code_files(config), manifest.code)
    began = f"Forked from {run} after step {checkpoint.step}"
    began += f", to be trained to step {config.trainer.steps}" if has_steps else ""
    return ForkSource(config, run, checkpoint, (*faults, *code, began, *pinned, *changes))


def split_run_and_checkpoint(key: str, value: str) -> tuple[Path, Checkpoint | None]:
    """Resolve a setting to a run folder, and a checkpoint if it is the path of one.

    Raises:
        ConfigError: it is neither.
    """
    place = Path(value).expanduser()
    path = place if len(place.parts) > 2 else place.absolute()
    matches = [c for c in checkpoints_in(path.parent) if c.path == path]
    run = path.parent.parent
    if matches and (run / CONFIG).is_file():
        return run, matches[0]
    if (path / CONFIG).is_file():
        return place if place.name else path, None
    remedy = "or auto or never" if key == "run.resume" else "or runs/NAME@STEP"
    raise ConfigError(
        f"{key}={value} is neither a run folder nor a checkpoint; use runs/NAME or "
        f"runs/NAME/checkpoints/step-N, {remedy}"
    )


def _reopen_run(config: Config, folder: RunFolder, requested: Checkpoint | None) -> OpenedRun:
    try:
        saved = load_recipe(str(folder.config))
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"cannot load {folder.config} ({reason}); restore it from one of the run's "
            "checkpoints, or use the winnow version that wrote it"
        ) from error
    remedy = (
        "revert it, or choose another run.name for a new run (run.fork starts one from this state)"
    )
    config, notes = _pin_as_saved(config, saved)
    changes = check_same(config, saved, str(folder.path), remedy)
    saved_config = config.model_copy(update={"run": saved.run})
    clean_drafts(folder.checkpoints)
    for partial in folder.path.glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    rank_folders = [role.saved_in for role in Roles(config) if role.saved_in]
    checkpoint = requested
    if checkpoint is not None:
        verify(checkpoint, rank_folders)
    else:
        checkpoint, faults = newest_usable(folder.path, rank_folders)
        notes += faults
    if checkpoint is None:
        notes.append(f"{folder.path} has no checkpoint yet: starting from scratch")
        return OpenedRun(folder, saved_config, (*notes, *changes))
    manifest = read_manifest(checkpoint)
    recipe = load_recipe(str(checkpoint.path / CONFIG))
    fork_source = recipe if recipe.run.fork != saved_config.run.fork else None
    if fork_source is None:
        check_same(config, recipe, str(checkpoint.path), "delete it, or restore this run's own")
    steps, epochs = config.trainer.steps, config.trainer.data_epochs
    if epochs is None and steps < checkpoint.step:
        raise ConfigError(
            f"trainer.steps={steps} is below the {checkpoint.step} steps that {folder.path} has "
            "trained; increase it, or resume an earlier checkpoint with run.resume=FOLDER"
        )
    notes += code_changes(user_code_files(config), manifest.code)
    # Passes over the data may give another number of steps than before.
    was, now = ((c.trainer.data_epochs, c.sampling.groups_per_step) for c in (recipe, config))
    knows_steps = epochs is None or was == now
    continuing = f"Continuing {folder.path} after step {checkpoint.step}"
    notes += [f"{continuing} of {steps}" if knows_steps else continuing, *changes]
    may_be_damaged = bool(rank_folders) and requested is None
    state = checkpoint, manifest, fork_source, False, knows_steps, may_be_damaged
    return OpenedRun(folder, saved_config, tuple(notes), *state)


def learns_on_cpu(config: Config) -> bool:
    """Return whether models are trained on CPUs; a Ray cluster is assumed to have GPUs."""
    is_local = isinstance(config.cluster, LocalCluster)
    return config.run.device == "cpu" or (is_local and not torch.cuda.is_available())


def pin_microbatch_tokens(config: Config) -> Config:
    """Fix the default of trainer.microbatch_tokens to that of the learner's device, so that the run
    resumes with the same packing, and the same bits, on any machine."""
    trainer, on_cpu = config.trainer, learns_on_cpu(config)
    tokens = trainer.microbatch_tokens or (
        CPU_MICROBATCH_TOKENS if on_cpu else GPU_MICROBATCH_TOKENS
    )
    return with_settings(config, trainer={"microbatch_tokens": tokens})


def _pin_commit(model: ModelConfig) -> ModelConfig:
    """Pin a model on the hub to its current commit, so that resuming uses the same.

    Raises:
        ModelError: there is no such model or revision, or it cannot be fetched.
    """
    path, revision = model.path, model.revision
    is_local = path is None or "://" in path or Path(path).expanduser().exists()
    if path is not None and not is_local and may_be_hub_name(path):
        snapshot = local_folder(f"{path}@{revision or 'main'}")
        return model.model_copy(update={"revision": Path(snapshot).name})
    if revision is not None:
        raise ConfigError(
            f"model.revision={revision} only applies to models on the hub, and model.path={path} "
            "is a folder; set model.revision=null"
        )
    return model


def _pin_as_saved(config: Config, saved: Config) -> tuple[Config, list[str]]:
    """Give a recipe what the run began with: the steps of its passes, which are counted again once
    the data is read, the commit of a branch, the default of trainer.microbatch_tokens."""
    if config.trainer.microbatch_tokens is None:
        fixed = saved.trainer.microbatch_tokens
        config = with_settings(config, trainer={"microbatch_tokens": fixed})
    if config.trainer.data_epochs is not None:
        config = with_settings(config, trainer={"steps": saved.trainer.steps})
    data = _pin_hub_files(config.data, config.sft, saved.data.hub_files)
    config = config.model_copy(update={"data": data})
    was, now = saved.model.revision, config.model.revision
    is_commit = now is not None and _COMMIT.fullmatch(now)
    if was is None or is_commit or config.model.path != saved.model.path:
        return config, []
    note = f"{config.model.path} stays at revision {was}, pinned when the run started"
    return with_settings(config, model={"revision": was}), [note] if now is not None else []


def _pin_hub_files(data: DataConfig, sft: Sft, pins: Mapping[str, tuple[str, ...]]) -> DataConfig:
    """Pin the data files on the hub that are not pinned yet to their current commits.

    Raises:
        DataError: there is no such data set or file, or the hub cannot be asked.
    """
    shown = sft if isinstance(sft, Demonstrations) else Demonstrations()
    named = (c.train_files + c.eval_files for c in (data, shown))
    urls = [url for url in chain(*named) if is_on_hub(url)]
    hub_files = {**data.hub_files, **pins}
    files = {url: hub_files[url] if url in hub_files else pin_files(url) for url in urls}
    return data.model_copy(update={"hub_files": files}) if files else data


def user_code_files(config: Config) -> dict[str, Path]:
    """Find the user's own Python files that a recipe names, by its keys."""
    paths: dict[str, Path] = {}
    for key, value in user_code_settings(config):
        place = Path(value.rpartition(":")[0] or value).expanduser()
        paths[f"{key}[{len(paths)}]" if key in paths else key] = place
    return {key: path for key, path in paths.items() if path.is_file()}


def code_hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """Hash files of `user_code_files`, by their keys."""
    return {key: hashlib.sha256(path.read_bytes()).hexdigest() for key, path in files.items()}


def code_changes(files: Mapping[str, Path], old_hashes: Mapping[str, str]) -> list[str]:
    """Warn about files of `user_code_files` that have changed.

    Args:
        old_hashes: `code_hashes` when the checkpoint was made.
    """
    now = code_hashes(files)
    return [
        f"Warning: {key}={path} has changed since the checkpoint was saved: the run uses the "
        "current file"
        for key, path in files.items()
        if old_hashes.get(key, now[key]) != now[key]
    ]


def user_code_settings(config: Config) -> Iterator[tuple[str, str]]:
    """Find the settings that name Python code, FILE.py, FILE.py:NAME or a module, by key."""
    for key, value, reach in side_effects(config):
        if reach is CODE and isinstance(value, str):
            yield key, value
