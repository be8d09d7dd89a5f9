"""The folder of a run, runs/NAME/, its log, and the code that it could bring along.

`config.yaml`, `metrics.jsonl`, `rollouts/`, `checkpoints/`, `eval/`, `log.txt`, `curve.png`.

A checkpoint holds no code. A recipe may name some: the model's own Python
(`model.trust_remote_code`), and files of the user's. The folder may be a stranger's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.root import Config
from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import AppendFile, refusals_told, write_atomic, writing
from winnow.observe.jsonl import METRICS_FILE

_TRUST = "model.trust_remote_code"
_PYTHON_FILE = re.compile(r"(.+\.py)(:\w+)?")


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
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            is_taken = any(path.iterdir())
        if is_taken:
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

    def save_config(self, text: str) -> None:
        """Keep the resolved recipe.

        Raises:
            WinnowError: it cannot be written.
        """
        write_atomic(self.config, text.encode())

    @contextlib.contextmanager
    def logging_to_file(self) -> Iterator[None]:
        """Send what the package logs, and Python's warnings, to log.txt while the block runs.

        Raises:
            WinnowError: log.txt cannot be opened.
        """
        handler = _LogFile(self.log)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        own, warnings = logging.getLogger("winnow"), logging.getLogger("py.warnings")
        level_before = own.level
        own.setLevel(logging.INFO)
        for logger in (own, warnings):
            logger.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
            # A run that fails has something else to tell.
            if handler.refused is not None:
                print(f"{handler.refused} (no log)", file=sys.stderr)
        finally:
            logging.captureWarnings(False)
            for logger in (own, warnings):
                logger.removeHandler(handler)
            own.setLevel(level_before)
            handler.close()


class _LogFile(logging.Handler):
    """A log that a full disk silences: the figures, not the log, decide whether a run goes on."""

    refused: WinnowError | None = None
    """The first line's error of those that could not be written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.append(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except WinnowError as error:
            self.refused = self.refused or error
        except Exception:
            self.handleError(record)

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


def require_trust(config: Config, overrides: Sequence[str], run: str | Path, say: str) -> None:
    """Refuse a run's recipe that trusts a model's own code, unless the user says so, too.

    Args:
        config: the run's recipe under the overrides.
        say: what the user would type, for the message.

    Raises:
        ConfigError: only the recipe says so.
    """
    if config.model.trust_remote_code and not any(
        word.lstrip("+").partition("=")[0] == _TRUST for word in overrides
    ):
        raise ConfigError(
            f"{run} has {_TRUST}=true in its recipe, which runs Python code that comes with the "
            f"model; if you trust whoever made it, say so with {say}"
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
