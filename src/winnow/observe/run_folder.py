"""The folder of a run, runs/NAME/, and its log.

`config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`, `eval/`, `log.txt`, `curve.png`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import AppendFile, disk_error, refusals_told, write_atomic
from winnow.observe.jsonl import METRICS_FILE


class RunFolder:
    """The folder of one run. Example: `RunFolder.create("runs", None, "quickstart")`."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.config = path / "config.yaml"  # the resolved recipe
        self.metrics = path / METRICS_FILE
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "eval"  # answers to held-out prompts
        self.log = path / "log.txt"
        self.curve = path / "curve.png"

    @classmethod
    def create(cls, runs: str | Path, name: str | None, recipe: str) -> RunFolder:
        """Make the folder of a new run; without a name it is RECIPE-DATE-TIME.

        Raises:
            ConfigError: another run has that name.
            WinnowError: the folder cannot be made or written to.
        """
        stem = re.sub(r"\.ya?ml$", "", Path(recipe).name)
        path = free_path(Path(runs), stem) if name is None else Path(runs) / name
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
        """Open an existing run's folder.

        Raises:
            WinnowError: there is no run, or it may not be looked at.
        """
        folder = cls(Path(path))
        with refusals_told(folder.path):
            is_run = folder.config.is_file()
        if not is_run:
            raise WinnowError(f"{path} is not a run's folder (no config.yaml); look in runs/")
        return folder

    def rollout(self, step: int) -> Path:
        """Return the file of the answers whose groups closed in a step."""
        return self.rollouts / f"step-{step}.parquet"

    def evaluation(self, step: int) -> Path:
        """Return the file of the held-out answers after a step."""
        return self.evaluations / f"step-{step}.parquet"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the training state after a step."""
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


class _LogFile(logging.Handler):
    """A log that a full disk silences: the figures, not the log, decide whether a run goes on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)
        self._refused: WinnowError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except WinnowError as error:
            self._refused = self._refused or error
        except Exception:
            self.handleError(record)

    def report(self) -> None:
        """Tell of lines that are missing; a run that fails has something else to tell."""
        if self._refused is not None:
            print(f"{self._refused} (no log)", file=sys.stderr)

    def close(self) -> None:
        super().close()
        self._file.close()


def free_path(folder: Path, name: str) -> Path:
    """Name a folder NAME-DATE-TIME that is not there yet."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = folder / stem, 1
    while path.exists():  # two within a second
        number += 1
        path = folder / f"{stem}-{number}"
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
