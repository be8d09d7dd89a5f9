"""runs/NAME/: where everything of a run lies, and its log.

`config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`, `eval/`, `log.txt`, `curve.png`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import disk_error, write_atomic
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
        path = _free_name(Path(runs), Path(recipe).stem) if name is None else Path(runs) / name
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
            WinnowError: there is no run.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
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
        try:
            handler = _LogFile(self.log, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise disk_error(self.log, error) from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("winnow")
        level_before, logger.level = logger.level, level
        loggers = (logger, logging.getLogger("py.warnings"))
        for each in loggers:
            each.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield logger
        finally:
            logging.captureWarnings(False)
            for each in loggers:
                each.removeHandler(handler)
            logger.setLevel(level_before)
            handler.close()


class _LogFile(logging.FileHandler):
    """A log that a full disk silences: the figures, not the log, decide whether a run goes on."""

    _is_silenced = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_silenced:
            self._is_silenced = True
            print(f"{disk_error(Path(self.baseFilename), error)} (no log)", file=sys.stderr)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            # Closing flushes what the full disk did not take; it was reported above.
            if not self._is_silenced:
                raise disk_error(Path(self.baseFilename), error) from error


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
