"""Code that a run's folder could bring along, and what a user has to say or is told of it.

A checkpoint holds no code (`winnow.runs.state_file`). A recipe may name some: the model's own
Python (`model.trust_remote_code`), and files of the user's. The folder may be a stranger's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.root import Config
from winnow.errors import ConfigError

_TRUST = "model.trust_remote_code"
_PYTHON_FILE = re.compile(r"(.+\.py)(:\w+)?")


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
    files = _user_files(config.model_dump(), "")
    return {key: _sha256(path) for key, path in files if path.is_file()}


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


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
