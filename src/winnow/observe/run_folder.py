"""runs/NAME/: where everything of a run lies, and its log.

`config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`, `eval/`, `log.txt`, `curve.png`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import disk_error, refusals_told, write_atomic, write_fully
from winnow.observe.jsonl import METRICS_FILE


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Example: `RunFolder.create("runs", None, "quickstart")`."""

    path: Path

    @classmethod
    def create(cls, runs: str | Path, name: str | None, recipe: str) -> RunFolder:
        """Make the folder of a new run; without a name it is RECIPE-DATE-TIME.

        Raises:
            ConfigError: another run has that name.
            WinnowError: the folder cannot be made or written to.
        """
        path = (
            _free_name(Path(runs), re.sub(r"\.ya?ml$", "", Path(recipe).name))
            if name is None
            else Path(runs) / name
        )
        _make(path)
        if any(path.iterdir()):
            raise ConfigError(
                f"run.name={path.name}: {path} holds a run already; "
                "choose another run.name, or delete that folder"
            )
        write_atomic(cls(path).log, b"")  # says now, not after the first step, that it can
        return cls(path)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run's folder.

        Raises:
            WinnowError: there is no run, or it may not be looked at.
        """
        folder = cls(Path(path))
        with refusals_told(folder.path):
            is_run = folder.config.is_file()
        if not is_run:
            raise WinnowError(f"{path} is not a run's folder (no config.yaml); look in runs/")
        return folder

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line a step."""
        return self.path / METRICS_FILE

    @property
    def rollouts(self) -> Path:
        """Folder of what was generated."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Folder of the training states."""
        return self.path / "checkpoints"

    @property
    def evaluations(self) -> Path:
        """Folder of the answers to held-out prompts."""
        return self.path / "eval"

    @property
    def log(self) -> Path:
        """What happened, with times."""
        return self.path / "log.txt"

    @property
    def curve(self) -> Path:
        """The learning curve."""
        return self.path / "curve.png"

    def rollout(self, step: int) -> Path:
        """The answers whose groups closed in a step."""
        return self.rollouts / f"step-{step}.parquet"

    def evaluation(self, step: int) -> Path:
        """The held-out answers after a step."""
        return self.evaluations / f"step-{step}.parquet"

    def checkpoint(self, step: int) -> Path:
        """The training state after a step."""
        return self.checkpoints / f"step-{step}"

    def save_config(self, text: str) -> None:
        """Keep the resolved recipe.

        Raises:
            WinnowError: it cannot be written.
        """
        write_atomic(self.config, text.encode())

    @contextlib.contextmanager
    def logging_to_file(self, level: int = logging.INFO) -> Iterator[logging.Logger]:
        """Send what the package logs, and Python's warnings, to log.txt while the block runs.

        Raises:
            WinnowError: log.txt cannot be opened.
        """
        handler = _LogFile(self.log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("winnow")
        level_before, logger.level = logger.level, level
        loggers = (logger, logging.getLogger("py.warnings"))
        for each in loggers:
            each.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield logger
            handler.report()
        finally:
            logging.captureWarnings(False)
            for each in loggers:
                each.removeHandler(handler)
            logger.setLevel(level_before)
            handler.close()


class _LogFile(logging.StreamHandler["_WholeLines"]):
    """A log that a full disk silences: the figures, not the log, decide whether a run goes on.

    Raises:
        WinnowError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._refused: OSError | None = None
        try:
            super().__init__(_WholeLines(path))
        except OSError as error:
            raise disk_error(path, error) from error

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._refused = self._refused or error
        else:
            super().handleError(record)

    def report(self) -> None:
        """Tell of lines that are missing; a run that fails has something else to tell."""
        if self._refused is not None:
            print(f"{disk_error(self._path, self._refused)} (no log)", file=sys.stderr)

    def close(self) -> None:
        super().close()
        self.stream.close()


class _WholeLines:
    """A file that takes each text whole or leaves it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, text: str) -> None:
        """Append; a disk that fills in the middle keeps nothing of it."""
        before = os.fstat(self._descriptor).st_size
        try:
            write_fully(self._descriptor, text.encode("utf-8", "backslashreplace"))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _free_name(runs: Path, recipe: str) -> Path:
    stem = f"{recipe}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = runs / stem, 1
    while path.exists():  # two runs within a second
        number += 1
        path = runs / f"{stem}-{number}"
    return path


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        next(path.iterdir(), None)
    except (FileExistsError, NotADirectoryError) as error:
        raise WinnowError(
            f"cannot make the run's folder {path}: a file is in the way; "
            "choose another run.dir or run.name"
        ) from error
    except OSError as error:
        raise disk_error(path, error) from error
