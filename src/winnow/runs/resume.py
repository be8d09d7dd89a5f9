"""Opening of a run's folder: a new one, or one that is continued.

| run.resume | the folder | |
|---|---|---|
| auto | run.name is new, or not given | a new run |
| auto | run.name is an unfinished run of the same recipe | continued |
| never | run.name must be new | a new run |
| a run's folder | that one | continued after its newest usable checkpoint |
| a checkpoint's folder | the run it lies in | continued after that checkpoint |

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
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from winnow.config.load import differing_keys, dump_config, load_recipe
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.schema import show
from winnow.errors import CheckpointError, ConfigError
from winnow.models.fetch import hub_commit, may_be_hub_name
from winnow.observe.files import PARTIAL, RunFolder, disk_error, refusals_told
from winnow.observe.jsonl import METRICS_FILE, MetricsLog
from winnow.observe.rollouts import drop_rollouts_after
from winnow.runs.checkpoint import (
    CONFIG,
    Checkpoint,
    Manifest,
    checkpoints_in,
    clean,
    newest_usable,
    remove,
    verify,
)

LOCK_FILE = ".lock"
"""Its name in a run's folder. It stays there: a lock file that comes and goes can be held twice."""
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_MAY_DIFFER: dict[str, set[str]] = {
    "run": {"name", "description", "dir", "resume", "threads", "device"},
    "model": {"cache_dir"},
    "warm_start": {"cache_dir"},
    "reward": {"workers", "processes"},
    # Who asks the judge, how fast, and where replies are kept.
    "reward.judge": {
        *("api_key_env", "cache", "max_concurrent", "retries", "timeout_s"),
        *("requests_per_minute", "tokens_per_minute"),
    },
    "rollout.engine": {
        *("url", "token_env", "weights_folder"),
        *("timeout_s", "reload_timeout_s", "restart_timeout_s"),
    },
    "sampling": {"stall_timeout_s"},
    "trainer": {
        *("save_every", "keep_last", "keep_every", "keep_best", "checkpoint_url"),
        *("max_restarts", "stall_timeout_s"),
    },
    # A difference in ranks, as in threads, warns: `Opened.differences`.
    "trainer.strategy": {"ranks", "replicas", "reshard_after_forward", "offload", "bucket_mb"},
    "observe": {"console", "peak_tflops", "trace"},
}
"""Keys by section, beside those of `cluster`, on which no figure but times depends."""
_MAY_BE_MENDED: dict[str, set[str]] = {
    "reward": {"memory_mb", "timeout_s"},
    "reward.judge": {"base_url"},
    "sampling": {"max_groups_per_step", "on_bound"},
}
"""Keys to change where a run stopped at its bound, at failing scorers, or at a judge that moved."""
_NOTHING_YET = Manifest(step=-1, evaluated=False)
_PYTHON_FILE = re.compile(r"(.+\.py)(:\w+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN = 4
_BEFORE_THE_START = {LOCK_FILE, "log.txt", CONFIG, f"{CONFIG}{PARTIAL}", METRICS_FILE}
"""Files of a run before there is anything to lose."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A run's folder, locked, with its recipe and the checkpoint to go on from."""

    folder: RunFolder
    config: Config
    """The recipe as the folder keeps it."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    checkpoint: Checkpoint | None = None
    """The checkpoint to go on from; None starts at the beginning."""
    manifest: Manifest = _NOTHING_YET

    def is_finished(self, steps: int) -> bool:
        """Return whether nothing is left to do."""
        return self.manifest.step >= steps and self.manifest.evaluated

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
        with contextlib.suppress(OSError):  # a full disk: only the message above would miss it
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def opened_run(config: Config, recipe: str) -> Iterator[Opened]:
    """Hold the folder that `run.resume` and `run.name` ask for while the block runs.

    Raises:
        ConfigError: it is in use, was made by another recipe, or is none.
        CheckpointError: the checkpoint asked for is damaged.
        WinnowError: the folder may not be read or written to.
    """
    with contextlib.ExitStack() as held:
        with refusals_told(Path(config.run.dir)):
            opened = _opened(config, recipe, held)
        yield opened


def _opened(config: Config, recipe: str, held: contextlib.ExitStack) -> Opened:
    run, url = config.run, config.trainer.checkpoint_url
    if run.resume not in ("auto", "never"):
        path, wanted = _asked_for(run.resume)
        held.enter_context(locked(path))
        return _continued(config, RunFolder.open(path), wanted)
    named = None if run.name is None else RunFolder(Path(run.dir) / run.name)
    names: set[str] = set()
    is_begun = False
    if named is not None:
        if run.resume == "auto" and url is not None and not named.path.exists():
            from winnow.runs.checkpoint_upload import CheckpointUpload

            CheckpointUpload(url, named.path).fetch()
        if named.path.is_dir():
            names = {each.name for each in named.path.iterdir()}
        # A run that ended before its first figures has nothing to lose.
        has_figures = METRICS_FILE in names and named.metrics.stat().st_size > 0
        is_begun = has_figures or not names <= _BEFORE_THE_START
        if run.resume == "auto" and is_begun and CONFIG in names:
            held.enter_context(locked(named.path))
            return _continued(config, named, None)
    config = _pinned(config)
    if named is None or is_begun or not names:
        named = RunFolder.create(run.dir, run.name, recipe)
    held.enter_context(locked(named.path))
    for name in names - {LOCK_FILE}:
        (named.path / name).unlink(missing_ok=True)
    kept = config.model_copy(update={"run": run.model_copy(update={"resume": "auto"})})
    named.save_config(dump_config(kept))
    return Opened(named, kept)


def _asked_for(resume: str) -> tuple[Path, Checkpoint | None]:
    """Find the run's folder that `run.resume` names, and the checkpoint if it is one's folder."""
    given = Path(resume).expanduser()
    path = given if len(given.parts) > 2 else given.absolute()
    own = [c for c in checkpoints_in(path.parent) if c.path == path]
    run = path.parent.parent
    if own and (run / CONFIG).is_file():
        return run, own[0]
    if (path / CONFIG).is_file():
        return given if given.name else path, None
    raise ConfigError(
        f"run.resume={resume} is neither a run's folder nor a checkpoint in one; "
        "give runs/NAME or runs/NAME/checkpoints/step-N, or auto or never"
    )


def _continued(config: Config, folder: RunFolder, wanted: Checkpoint | None) -> Opened:
    try:
        saved = load_recipe(str(folder.config))
    except ConfigError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{folder.config} is damaged ({reason}); put back the config.yaml of one of the run's "
            "checkpoints"
        ) from error
    remedy = "set that back, or choose another run.name for a new run"
    config, notes = _as_pinned(config, saved)
    _check_same(config, saved, folder.path, remedy)
    kept = config.model_copy(update={"run": saved.run})
    clean(folder.checkpoints)
    for partial in folder.path.glob(f"*{PARTIAL}"):
        partial.unlink(missing_ok=True)
    checkpoint, faults = (wanted, []) if wanted is not None else newest_usable(folder.path)
    notes += faults
    if checkpoint is None:
        notes.append(f"{folder.path} has no checkpoint yet: starting at the beginning")
        return Opened(folder, kept, tuple(notes))
    manifest = verify(checkpoint)
    made_with = load_recipe(str(checkpoint.path / CONFIG))
    _check_same(config, made_with, checkpoint.path, "delete it, or put back this run's own")
    notes += code_notes(config, folder.path, manifest.code)
    notes.append(f"Continuing {folder.path} after step {checkpoint.step} of {config.trainer.steps}")
    return Opened(folder, kept, tuple(notes), checkpoint, manifest)


def _pinned(config: Config) -> Config:
    """Note the commit of a model on the hub, so that resuming takes no other.

    Raises:
        ModelError: there is no such model or revision, or it cannot be fetched.
    """
    path, revision = config.model.path, config.model.revision
    is_here = path is None or "://" in path or Path(path).expanduser().exists()
    if is_here and revision is None:
        return config
    if path is None or is_here or not may_be_hub_name(path):
        if revision is None:  # no folder: its loader says so
            return config
        raise ConfigError(
            f"model.revision={revision} is of a model on the hub, and model.path={path} is a "
            "folder; set model.revision=null"
        )
    commit = hub_commit(f"{path}@{revision or 'main'}", "model.path")
    return _with_revision(config, commit)


def _as_pinned(config: Config, saved: Config) -> tuple[Config, list[str]]:
    """Give a recipe that names a model's branch the commit that the run began with."""
    was, now = saved.model.revision, config.model.revision
    is_commit = now is not None and _COMMIT.fullmatch(now)
    if was is None or is_commit or config.model.path != saved.model.path:
        return config, []
    note = f"{config.model.path} stays at revision {was}, which this run began with"
    return _with_revision(config, was), [note] if now is not None else []


def _with_revision(config: Config, commit: str) -> Config:
    model = config.model.model_copy(update={"revision": commit})
    return config.model_copy(update={"model": model})


def _check_same(config: Config, saved: Config, path: Path, remedy: str) -> None:
    """Refuse to go on from what lies at `path` with a recipe that gives other figures."""
    changed = []
    same_engines = workers_of(saved)["rollout"] == workers_of(config)["rollout"]
    for key, was, now in differing_keys(saved, config):
        if key == "rollout.engine.processes" and same_engines:
            continue  # null, and the number that it stands for
        section, _, name = key.replace("/", ".").rpartition(".")
        allowed = _MAY_DIFFER.get(section, set()) | _MAY_BE_MENDED.get(section, set())
        if name not in allowed and section.partition(".")[0] != "cluster":
            changed.append(f"{key} was {show(was)} and is {show(now)}")
    if not changed:
        return
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    raise ConfigError(
        f"{path} was trained with another recipe: {', '.join(changed[:_SHOWN])}{more}; {remedy}"
    )


def code_hashes(config: Config) -> dict[str, str]:
    """Hash the user's own Python files that a recipe names, by its keys."""
    return {
        key: hashlib.sha256(path.read_bytes()).hexdigest()
        for key, path in _user_files(config.model_dump(), "")
        if path.is_file()
    }


def code_notes(config: Config, folder: Path, was: Mapping[str, str]) -> list[str]:
    """Say which of the user's files lie in the run's folder, or are not what they were.

    Args:
        was: `code_hashes` when the checkpoint was made.
    """
    notes, now = [], code_hashes(config)
    for key, path in _user_files(config.model_dump(), ""):
        if path.resolve().is_relative_to(folder.resolve()):
            notes.append(
                f"Warning: {key}={path} lies in the run's folder: its code runs now, with your "
                "permissions; stop here if you do not know whose it is"
            )
        elif key in was and key in now and was[key] != now[key]:
            notes.append(
                f"Warning: {key}={path} is not what it was when the checkpoint was made: the run "
                "goes on with what it says now"
            )
    return notes


def _user_files(section: Any, key: str) -> Iterator[tuple[str, Path]]:
    """Find the values of a recipe that name Python files, with their keys."""
    if isinstance(section, Mapping):
        for name, value in section.items():
            yield from _user_files(value, f"{key}.{name}" if key else str(name))
    elif isinstance(section, list | tuple):
        for index, value in enumerate(section):
            yield from _user_files(value, f"{key}.{index}")
    elif isinstance(section, str) and (found := _PYTHON_FILE.fullmatch(section)):
        yield key, Path(found[1]).expanduser()
