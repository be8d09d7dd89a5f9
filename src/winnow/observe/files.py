"""Files of a run: its folder runs/NAME/, its log, and writing that leaves the old or the new whole.

`config.yaml`, `tokenizer.json`, `model.json`, `metrics.jsonl`, `ledger.parquet/`, `rollouts/`,
`checkpoints/`, `eval/`, `log.txt`, `trace.json`, `usage.jsonl`, `findings.jsonl`, `trackers/`,
`curve.png`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from winnow.errors import ConfigError, FolderGoneError, TransientError, WinnowError

_PASSING = {
    *(errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO),
}
"""Errors of disks and file servers that may be over with the next try."""
_REMEDIES = (
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, "free some space, or put the run on another disk"),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, "choose a writable folder"),
    (_PASSING, "try again, or put the run on another disk"),
)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
TOKENIZER = "tokenizer.json"
"""The tokenizer in a run's folder, by which token ids can be read."""
USAGE = "usage.jsonl"
"""The usage of CPU, memory, network and GPUs over time, in a run's folder."""
MODEL = "model.json"
"""The config.json of the policy's model in a run's folder, by which the run can be planned."""
INPUTS = "inputs"
"""Folder of a run with the rows that a program passed to it, as data files."""
PARTIAL = ".partial"
"""Ending of a file that is being written; one left by a crash may be deleted."""


def disk_error(path: Path, error: OSError) -> WinnowError:
    """Word the error for a `path` that cannot be written: file, reason, remedy."""
    return disk_error_type(error)(f"cannot write {path}: {reason_and_remedy(error)}")


def disk_error_type(error: OSError, default: type[WinnowError] = WinnowError) -> type[WinnowError]:
    """Return the error type for a system's error: `TransientError` if it may be temporary.

    Args:
        default: the type of all others.
    """
    return TransientError if error.errno in _PASSING else default


def reason_and_remedy(error: OSError) -> str:
    """Describe a system's error as `REASON; REMEDY`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    remedies = (remedy for codes, remedy in _REMEDIES if error.errno in codes)
    remedy = next(remedies, "check the path, or choose another folder")
    return f"{reason}; {remedy} with run.dir=FOLDER"


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def find_os_error(error: Exception) -> OSError | None:
    """Find the OSError in an error; libraries in Rust report it as the text `(os error 28)`."""
    if isinstance(error, OSError):
        return error
    match = _OS_ERROR.search(str(error))
    return None if match is None else OSError(int(match[1]), os.strerror(int(match[1])))


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise a system's error within the block as `disk_error` of `path`.

    Raises:
        WinnowError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Raise a system's error within the block as one of the file it names, else of `path`.

    Raises:
        WinnowError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        raise disk_error_type(error)(f"cannot use {named}: {reason_and_remedy(error)}") from error


def open_nofollow(path: Path, mode: Literal["wb", "ab"], buffering: int = -1) -> IO[bytes]:
    """Open a file for writing; a link in its place is an OSError, wherever it leads."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, buffering, opener=opener)


def fsync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, draft: Path | None = None) -> None:
    """Replace the content of `path` atomically: temporary file, fsync, rename.

    Args:
        draft: the temporary file, on the same file system; None puts it beside `path`.

    Raises:
        WinnowError: the file cannot be written; what was there before still is.
    """
    partial = draft or path.with_name(path.name + PARTIAL)
    with explain_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_nofollow(partial, "wb") as file:
                file.write(data)
            fsync_path(partial)
            partial.replace(path)
        except BaseException:  # Ctrl-C leaves nothing half-written either
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a draft that takes the place of the folder `target` when the block is done.

    An error within leaves nothing. A crash may leave `.NAME.partial`, which may be deleted, or
    `.NAME.replaced`, which is what was there before and whole.
    """
    draft, old = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "replaced"))
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in [*draft.rglob("*"), draft]:  # else the rename could outrun the contents
            fsync_path(path)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        fsync_path(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class AppendFile:
    """An append-only file; a write succeeds completely or leaves nothing."""

    def __init__(self, path: Path) -> None:
        """Open for appending; made if absent.

        Raises:
            WinnowError: the file cannot be written.
        """
        self.path = path
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_nofollow(path, "ab", 0)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Append without buffering; a write that fails is undone."""
        before, rest = self.size, memoryview(data)
        with explain_write_errors(self.path):
            try:
                while rest:  # a write may stop early when a disk fills
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise

    def sync(self) -> None:
        """Flush the file to disk."""
        with explain_write_errors(self.path):
            os.fsync(self._file.fileno())

    def truncate(self, offset: int) -> None:
        """Cut the file off at an offset."""
        with explain_write_errors(self.path):
            self._file.truncate(offset)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()


class RunFolder:
    """The folder of one run. Example: `RunFolder.create("runs", None, "quickstart")`."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.config = path / "config.yaml"  # the resolved recipe
        self.tokenizer = path / TOKENIZER  # of a fast one
        self.model = path / MODEL  # its config.json
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.parquet"  # a folder: one part a step
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "eval"  # answers to held-out prompts
        self.log = path / "log.txt"
        self.trace = path / "trace.json"  # who did what when
        self.usage = path / USAGE  # CPU, memory, network and GPUs over time
        self.findings = path / "findings.jsonl"  # findings of the rules of winnow doctor
        self.curve = path / "curve.png"
        self.trackers = path / "trackers"  # which runs of trackers are this one, and their files

    @classmethod
    def create(cls, runs: str | Path, name: str | None, recipe: str) -> RunFolder:
        """Make the folder of a new run; without a name it is RECIPE-DATE-TIME.

        Raises:
            ConfigError: another run has that name.
            WinnowError: the folder cannot be made or written to.
        """
        path = unused_path(Path(runs), recipe_stem(recipe)) if name is None else Path(runs) / name
        with explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            is_taken = any(path.iterdir())
        if is_taken:
            raise ConfigError(
                f"run.name={path.name}: {path} already contains a run; "
                "choose another run.name or delete the folder"
            )
        write_atomic(cls(path).log, b"")  # says now, not after the first step, that it can
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run's folder.

        Raises:
            WinnowError: there is no run, or it may not be looked at.
        """
        folder = cls(Path(path))
        with explain_disk_errors(folder.path):
            is_run = folder.config.is_file()
        if not is_run:
            raise WinnowError(f"{path} is not a run's folder (no config.yaml); see runs/")
        return folder

    def check_exists(self) -> RunFolder:
        """Return itself, or fail if the folder was removed during the run.

        Raises:
            FolderGoneError: it was deleted, moved or renamed since the run began.
        """
        if not self.path.is_dir():
            raise FolderGoneError(
                f"run folder {self.path} was deleted, moved or renamed during the run; restore it "
                f"and continue from the last checkpoint: winnow resume {self.path}"
            )
        return self

    def rollout_file(self, step: int) -> Path:
        """Return the file of the answers whose groups closed in a step."""
        return self.rollouts / f"step-{step}.parquet"

    def eval_file(self, step: int) -> Path:
        """Return the file of the held-out answers after a step."""
        return self.evaluations / f"step-{step}.parquet"

    def save_config(self, text: str) -> None:
        """Write the resolved recipe.

        Raises:
            WinnowError: it cannot be written.
        """
        write_atomic(self.config, text.encode())

    def read_recipe(self) -> dict[str, Any]:
        """Read the resolved recipe as a tree of plain values.

        Raises:
            WinnowError: config.yaml cannot be read.
        """
        import yaml

        try:
            tree = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            if not isinstance(tree, dict):
                raise ValueError("not a recipe")
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise WinnowError(
                f"cannot read {self.config}: {one_line(error)}; restore it from a checkpoint"
            ) from error
        return tree

    @contextlib.contextmanager
    def logging_to_file(self) -> Iterator[None]:
        """Write the package's log and Python's warnings to log.txt within the block.

        Raises:
            WinnowError: log.txt cannot be opened.
        """
        handler = _LogFile(self.log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        package, warnings = logging.getLogger("winnow"), logging.getLogger("py.warnings")
        level_before = package.level
        package.setLevel(logging.INFO)
        for logger in (package, warnings):
            logger.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
            # A run that fails has something else to tell.
            if handler.write_error is not None:
                print(f"{handler.write_error} (no log)", file=sys.stderr)
        finally:
            logging.captureWarnings(False)
            for logger in (package, warnings):
                logger.removeHandler(handler)
            package.setLevel(level_before)
            handler.close()


class _LogFile(logging.Handler):
    """A log handler that goes silent on a full disk, so that logging never stops a run."""

    write_error: WinnowError | None = None
    """The error of the first line that could not be written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except WinnowError as error:
            self.write_error = self.write_error or error
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        super().close()
        self._file.close()


def recipe_stem(recipe: str | Path) -> str:
    """Return a recipe's name, or its file's without the ending."""
    return re.sub(r"\.ya?ml$", "", Path(recipe).name)


def unused_path(folder: Path, name: str) -> Path:
    """Return a path NAME-DATE-TIME that does not exist yet."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = folder / stem, 1
    while path.exists():  # two within a second
        number += 1
        path = folder / f"{stem}-{number}"
    return path
