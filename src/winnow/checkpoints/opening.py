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

from filelock import FileLock, Timeout

from winnow.checkpoints.checkpoint import (
    CONFIG,
    Checkpoint,
    Manifest,
    checkpoints_in,
    clean,
    find_checkpoint,
    load_state,
    newest_usable,
    read_manifest,
    remove,
    verify,
)
from winnow.checkpoints.recipe_changes import check_fork, check_same, forked_state
from winnow.checkpoints.strangers import MARK, mark_as_begun
from winnow.config.base import CODE, reaching
from winnow.config.data import Demonstrations
from winnow.config.load import dump_config, load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.data.hub import is_on_hub, pin_files
from winnow.errors import CheckpointError, ConfigError, WinnowError
from winnow.models.fetch import local_folder, may_be_hub_name
from winnow.observe.files import (
    MODEL,
    PARTIAL,
    TOKENIZER,
    RunFolder,
    disk_error,
    explain_disk_errors,
    open_no_link,
    writing,
)
from winnow.observe.jsonl import METRICS_FILE, MetricsLog
from winnow.observe.rollouts import drop_rollouts_after, rollout_files

LOCK_FILE = ".lock"
"""Its name in a run's folder. It stays there: a lock file that comes and goes can be held twice."""
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_NOTHING_YET = Manifest(step=-1, evaluated=False)
_COMMIT = re.compile(r"[0-9a-f]{40}")
DISCARDABLE_FILES = {
    *(LOCK_FILE, MARK, "log.txt", CONFIG, f"{CONFIG}{PARTIAL}", METRICS_FILE, "trackers"),
    *(name + end for name in (TOKENIZER, MODEL) for end in ("", PARTIAL)),
}
"""Files of a run before there is anything to lose."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A run's folder, locked, with its recipe and the checkpoint to go on from."""

    folder: RunFolder
    config: Config
    """The recipe as the folder keeps it."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to go on from; None starts at the beginning."""
    manifest: Manifest = _NOTHING_YET
    forked: Config | None = None
    """The recipe of the checkpoint, where that is still the one that the run was forked from."""
    is_new: bool = False
    """The folder was made by this start."""
    knows_steps: bool = True
    """False while the steps that fill `trainer.data_epochs` are others than before."""
    may_be_damaged: bool = False
    """Ranks are yet to check the checkpoint, for which an older one may stand in."""

    def state(self, config: Config) -> dict[str, Any]:
        """Read the state to go on from.

        Raises:
            CheckpointError: it is damaged, or too old for the recipe, or does not fit a fork's.
        """
        assert self.checkpoint is not None
        state = load_state(self.checkpoint, is_verified=True)
        epochs = config.trainer.data_epochs
        if epochs is not None and "sampler" in state and "passes" not in state:
            raise CheckpointError(
                f"trainer.data_epochs={epochs:g}: {self.checkpoint.path} was made before passes "
                "were counted; set trainer.data_epochs=null and trainer.steps"
            )
        if self.forked is None:
            return state
        return forked_state(config, self.forked, state, str(self.checkpoint.path))

    def is_finished(self, steps: int) -> bool:
        """Return whether it is known that nothing is left to do."""
        return self.knows_steps and self.manifest.step >= steps and self.manifest.evaluated

    def differences(self, machine: Mapping[str, str | int]) -> list[str]:
        """Say what of the machine is not as it was when the checkpoint was made."""
        was = self.manifest.machine
        return [
            f"Warning: {name} was {was[name]} and is {now}: the bits may differ from an "
            "undisturbed run's"
            for name, now in machine.items()
            if name in was and was[name] != now
        ]

    def rewind(self, metrics: MetricsLog) -> None:
        """Drop all that is later than the checkpoint.

        In this order: a crash within leaves what the same call can finish.

        Raises:
            WinnowError: the folder cannot be changed, or metrics.jsonl was.
        """
        folder, step = self.folder, self.manifest.step
        remove(c for c in reversed(checkpoints_in(folder.checkpoints)) if c.step > step)
        drop_rollouts_after(folder.ledger, step)
        drop_rollouts_after(folder.rollouts, step)
        drop_rollouts_after(folder.evaluations, step if self.manifest.evaluated else step - 1)
        metrics.truncate(self.manifest.metrics_bytes)
        folder.save_config(dump_config(self.config))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder while the block runs: one process a run.

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
            f"{folder} is in use by {holder}; wait for it, end it, or choose another run.name"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise disk_error(path, error) from error
        log.warning("%s lies on a file system without locks: start one process only", folder)
    try:
        # A full disk: only the message above would miss it.
        with contextlib.suppress(OSError), open_no_link(path, "wb") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.release()


class DamagedError(CheckpointError):
    """The checkpoint that a start went on from is damaged, and there is an older one."""

    def __init__(self, older: Checkpoint, warnings: Sequence[str]) -> None:
        super().__init__(*warnings)
        self.older, self.warnings = older, warnings


@contextlib.contextmanager
def reporting_damage(opened: OpenedRun) -> Iterator[Event]:
    """Look through all files of a checkpoint that ranks were to check if a start from it fails.

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
    """Hold the folder that `run.resume` and `run.name` ask for while the block runs.

    Raises:
        ConfigError: it is in use, was made by another recipe, or is none.
        CheckpointError: the checkpoint asked for is damaged.
        WinnowError: the folder may not be read or written to.
    """
    with contextlib.ExitStack() as stack:
        with explain_disk_errors(Path(config.run.dir)):
            opened = _opened(config, recipe, stack)
            new = _files(opened.folder.path) if opened.is_new else None
        try:
            yield opened
        except WinnowError as error:
            path = opened.folder.path
            if new is not None and error.exit_code == 2 and _files(path) <= new:
                shutil.rmtree(path, ignore_errors=True)
            raise


def _files(folder: Path) -> set[Path]:
    """List the files of a run that are worth keeping: those of before its start are not."""
    files = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
    saved = {path for path in files if path.parts[0] not in DISCARDABLE_FILES}
    metrics = Path(METRICS_FILE)
    has_figures = metrics in files and (folder / metrics).stat().st_size > 0
    return saved | {metrics} if has_figures else saved


def _opened(config: Config, recipe: str, stack: contextlib.ExitStack) -> OpenedRun:
    run, url = config.run, config.trainer.checkpoint_url
    if run.resume not in ("auto", "never"):
        path, checkpoint = checkpoint_of("run.resume", run.resume)
        stack.enter_context(locked(path))
        return _continued(config, RunFolder.open(path), checkpoint)
    named = None if run.name is None else RunFolder(Path(run.dir) / run.name)
    names: set[str] = set()
    is_begun = False
    if named is not None:
        if run.resume == "auto" and url is not None and not named.path.exists():
            from winnow.checkpoints.upload import CheckpointUpload

            if CheckpointUpload(url, named.path).fetch():  # from where the user said
                mark_as_begun(named.path)
        if named.path.is_dir():
            names = {each.name for each in named.path.iterdir()}
        # A run that ended before its first figures has nothing to lose.
        has_figures = METRICS_FILE in names and named.metrics.stat().st_size > 0
        is_begun = has_figures or not names <= DISCARDABLE_FILES
        if run.resume == "auto" and is_begun and CONFIG in names:
            stack.enter_context(locked(named.path))
            return _continued(config, named, None)
    origin = None if run.fork is None else _origin(config, run.fork)
    config = _pin_commits(config) if origin is None else origin.config
    if named is None or is_begun or not names:
        named = RunFolder.create(run.dir, run.name, recipe)
    stack.enter_context(locked(named.path))
    for name in names - {LOCK_FILE}:
        if name == named.trackers.name:
            shutil.rmtree(named.trackers)
        else:
            (named.path / name).unlink(missing_ok=True)
    mark_as_begun(named.path)
    fork = None if origin is None else f"{origin.run}@{origin.checkpoint.step}"
    run_section = run.model_copy(update={"resume": "auto", "fork": fork})
    saved_config = config.model_copy(update={"run": run_section})
    if origin is not None:
        with writing(named.path):
            origin.copy(named)
    named.save_config(dump_config(saved_config))
    if origin is None:
        return OpenedRun(named, saved_config, is_new=True)
    opened = _continued(saved_config, named, None)
    return replace(opened, notes=origin.notes, is_new=True)


@dataclass(frozen=True)
class ForkSource:
    """The checkpoint that a run is forked from."""

    config: Config
    """The recipe of the fork."""
    run: Path
    checkpoint: Checkpoint
    notes: tuple[str, ...]

    def copy(self, folder: RunFolder) -> None:
        """Copy the run up to the checkpoint; files that never change are shared by links."""
        origin = RunFolder(self.run)
        for source in (origin.ledger, origin.rollouts, origin.evaluations):
            for step, file in rollout_files(source):
                if step <= self.checkpoint.step:
                    (folder.path / source.name).mkdir(exist_ok=True)
                    _link(file, folder.path / source.name / file.name)
        shutil.copyfile(origin.metrics, folder.metrics)
        target = folder.checkpoints / self.checkpoint.path.name
        shutil.copytree(self.checkpoint.path, target, copy_function=_link)


def _link(source: str | Path, target: str | Path) -> None:
    """Make a file appear in a second place, as a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _origin(config: Config, fork: str) -> ForkSource:
    """Find the checkpoint that `run.fork` names, and check that its state fits the recipe.

    Raises:
        ConfigError: it names none, or the recipe is one of another model, data or optimizer.
        CheckpointError: the checkpoint is damaged.
    """
    source, at, step = fork.rpartition("@")
    if at and step.isdecimal():
        run, checkpoint = checkpoint_of("run.fork", source)
        checkpoint = find_checkpoint(run, int(step))
    else:
        run, checkpoint = checkpoint_of("run.fork", fork)
        if checkpoint is not None:
            verify(checkpoint)
    checkpoint, faults = (checkpoint, []) if checkpoint is not None else newest_usable(run)
    if checkpoint is None:
        raise ConfigError(f"run.fork={fork}: {run} has no checkpoint yet; name another run")
    manifest = read_manifest(checkpoint)
    has_steps = config.trainer.data_epochs is None
    if has_steps and config.trainer.steps <= checkpoint.step:
        raise ConfigError(
            f"trainer.steps={config.trainer.steps} leaves nothing to train after step "
            f"{checkpoint.step} of {run}; set it to {checkpoint.step + 1} or more, or fork an "
            "earlier step with run.fork=RUN@STEP"
        )
    recipe = load_recipe(str(checkpoint.path / CONFIG))
    config, pinned = _as_pinned(config, recipe)
    changes = check_fork(config, recipe, str(checkpoint.path))
    code = code_notes(config, manifest.code)
    began = f"Forked from {run} after step {checkpoint.step}"
    began += f" of now {config.trainer.steps}" if has_steps else ""
    return ForkSource(config, run, checkpoint, (*faults, *code, began, *pinned, *changes))


def checkpoint_of(key: str, value: str) -> tuple[Path, Checkpoint | None]:
    """Find the run's folder that a setting names, and the checkpoint if it is one's folder.

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
        f"{key}={value} is neither a run's folder nor a checkpoint in one; "
        f"give runs/NAME or runs/NAME/checkpoints/step-N, {remedy}"
    )


def _continued(config: Config, folder: RunFolder, requested: Checkpoint | None) -> OpenedRun:
    try:
        saved = load_recipe(str(folder.config))
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{folder.config} does not load ({reason}); put back the config.yaml of one of the "
            "run's checkpoints, or go on with the version of winnow that wrote it"
        ) from error
    remedy = (
        "set that back, or choose another run.name for a new run (run.fork begins one from this "
        "run's state)"
    )
    config, notes = _as_pinned(config, saved)
    changes = check_same(config, saved, str(folder.path), remedy)
    saved_config = config.model_copy(update={"run": saved.run})
    clean(folder.checkpoints)
    for partial in folder.path.glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    checked_by = [role.saved_in for role in Roles(config) if role.saved_in]
    checkpoint = requested
    if checkpoint is not None:
        verify(checkpoint, checked_by)
    else:
        checkpoint, faults = newest_usable(folder.path, checked_by)
        notes += faults
    if checkpoint is None:
        notes.append(f"{folder.path} has no checkpoint yet: starting at the beginning")
        return OpenedRun(folder, saved_config, (*notes, *changes))
    manifest = read_manifest(checkpoint)
    recipe = load_recipe(str(checkpoint.path / CONFIG))
    forked = recipe if recipe.run.fork != saved_config.run.fork else None
    if forked is None:
        check_same(config, recipe, str(checkpoint.path), "delete it, or put back this run's own")
    steps, epochs = config.trainer.steps, config.trainer.data_epochs
    if epochs is None and steps < checkpoint.step:
        raise ConfigError(
            f"trainer.steps={steps} is less than the {checkpoint.step} steps that {folder.path} "
            "has trained; give more, or go on from an earlier checkpoint with run.resume=FOLDER"
        )
    notes += code_notes(config, manifest.code)
    knows_steps = epochs is None or not _fills_other_steps(config, recipe)
    continuing = f"Continuing {folder.path} after step {checkpoint.step}"
    notes += [f"{continuing} of {steps}" if knows_steps else continuing, *changes]
    may_be_damaged = bool(checked_by) and requested is None
    state = checkpoint, manifest, forked, False, knows_steps, may_be_damaged
    return OpenedRun(folder, saved_config, tuple(notes), *state)


def _pin_commits(config: Config) -> Config:
    """Note the commits of data and model on the hub, so that resuming takes no others.

    Raises:
        DataError: there is no such data set or file, or the hub cannot be asked.
        ModelError: there is no such model or revision, or it cannot be fetched.
    """
    config = _with_hub_files(config, {})
    path, revision = config.model.path, config.model.revision
    is_local = path is None or "://" in path or Path(path).expanduser().exists()
    if is_local and revision is None:
        return config
    if path is None or is_local or not may_be_hub_name(path):
        if revision is None:  # no folder: its loader says so
            return config
        raise ConfigError(
            f"model.revision={revision} is of a model on the hub, and model.path={path} is a "
            "folder; set model.revision=null"
        )
    snapshot = local_folder(f"{path}@{revision or 'main'}")
    return _with_revision(config, Path(snapshot).name)


def _as_pinned(config: Config, saved: Config) -> tuple[Config, list[str]]:
    """Give a recipe what the run began with: the steps of its passes, which are counted again once
    the data is read, the commit of a branch."""
    if config.trainer.data_epochs is not None:
        trainer = config.trainer.model_copy(update={"steps": saved.trainer.steps})
        config = config.model_copy(update={"trainer": trainer})
    config = _with_hub_files(config, saved.data.hub_files)
    was, now = saved.model.revision, config.model.revision
    is_commit = now is not None and _COMMIT.fullmatch(now)
    if was is None or is_commit or config.model.path != saved.model.path:
        return config, []
    note = f"{config.model.path} stays at revision {was}, which this run began with"
    return _with_revision(config, was), [note] if now is not None else []


def _fills_other_steps(config: Config, saved: Config) -> bool:
    """Return whether passes over the data fill other steps than those of another recipe."""
    is_same = config.trainer.data_epochs == saved.trainer.data_epochs
    return not is_same or config.sampling.groups_per_step != saved.sampling.groups_per_step


def _with_hub_files(config: Config, listed: Mapping[str, tuple[str, ...]]) -> Config:
    """Pin the data files on the hub that are not pinned yet."""
    shown = config.sft if isinstance(config.sft, Demonstrations) else Demonstrations()
    named = (c.train_files + c.eval_files for c in (config.data, shown))
    urls = [url for url in chain(*named) if is_on_hub(url)]
    hub_files = {**config.data.hub_files, **listed}
    files = {url: hub_files[url] if url in hub_files else pin_files(url) for url in urls}
    data = config.data.model_copy(update={"hub_files": files})
    return config.model_copy(update={"data": data}) if files else config


def _with_revision(config: Config, commit: str) -> Config:
    model = config.model.model_copy(update={"revision": commit})
    return config.model_copy(update={"model": model})


def code_hashes(config: Config) -> dict[str, str]:
    """Hash the user's own Python files that a recipe names, by its keys."""
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in _user_paths(config)
        if path.is_file()
    }


def code_notes(config: Config, was: Mapping[str, str]) -> list[str]:
    """Say which of the user's files are not what they were.

    Args:
        was: `code_hashes` when the checkpoint was made.
    """
    now = code_hashes(config)
    return [
        f"Warning: {key}={path} is not what it was when the checkpoint was made: the run goes on "
        "with what it says now"
        for key, path in _user_paths(config)
        if key in was and key in now and was[key] != now[key]
    ]


def _user_paths(config: Config) -> Iterator[tuple[str, Path]]:
    for key, value in user_files(config):
        yield key, Path(value.rpartition(":")[0] or value).expanduser()


def user_files(config: Config) -> Iterator[tuple[str, str]]:
    """Find the settings that name Python code, FILE.py, FILE.py:NAME or a module, by key."""
    for key, value, reach in reaching(config):
        if reach is CODE and isinstance(value, str):
            yield key, value
