"""Runs that this user did not begin on this machine, and the leave that their recipes need.

A recipe in a run's folder may name code, programs, addresses, places and variables (fields with a
`SideEffect`, and `${oc.env:NAME}`), and the folder may hold links to files elsewhere. Commands that
would follow them want `--trust`, but for a run that was begun here: its folder has a mark, made of
its inode by a key that only this user's state directory holds. A copy has another inode, and so
counts as a stranger's. docs/resume.md says what each command does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from winnow.config.base import CODE, side_effects
from winnow.config.root import Config
from winnow.config.schema import quote
from winnow.errors import ConfigError
from winnow.observe.files import open_no_link, writing

MARK = ".begun-here"
"""Its name in a run's folder."""
_CONFIG, _MANIFEST = "config.yaml", "manifest.json"
_OF_RUNS = "log.txt", "metrics.jsonl", "checkpoints", _MANIFEST
"""Files by which a folder with a config.yaml is known as a run's or a checkpoint's."""
_TRUST = "model.trust_remote_code"

log = logging.getLogger(__name__)


def mark_as_begun(folder: Path) -> None:
    """Note that this user began the run on this machine, where there is a place for the key.

    Raises:
        WinnowError: the run's folder cannot be written to.
    """
    try:
        proof = _proof(folder)
    except (OSError, RuntimeError) as error:  # without a home
        log.warning("%s will count as a stranger's run: %s", folder, error)
        return
    with writing(folder / MARK), open_no_link(folder / MARK, "wb") as file:
        file.write(proof)


def is_local_run(folder: Path) -> bool:
    """Return whether this user began the run on this machine."""
    try:
        mark = folder / MARK
        is_plain = stat.S_ISREG(mark.lstat().st_mode)
        return is_plain and hmac.compare_digest(mark.read_bytes(), _proof(folder))
    except (OSError, RuntimeError):
        return False


def require_trust(
    folder: Path,
    config: Config | None,
    typed: Sequence[str],
    trusts: bool,
    keys: tuple[str, ...] = ("",),
) -> None:
    """Refuse what a stranger's folder would do outside itself, unless the user trusts it.

    Args:
        config: the recipe; None where only files are read.
        typed: the overrides; the user answers for the keys in them.
        keys: beginnings of the keys that matter.

    Raises:
        ConfigError: names the key, the value and the file.
    """
    if trusts or is_local_run(folder):
        return
    typed_keys = {word.lstrip("+~").partition("=")[0].replace("/", ".") for word in typed}
    named = [] if config is None else list(_reaches(config))
    risks = [what for key, what in named if key not in typed_keys and key.startswith(keys)]
    risks += [f"{path} is no plain file or folder" for path in _odd_entries(folder)]
    if risks:
        rest = f" (and {len(risks) - 1} more)" if len(risks) > 1 else ""
        raise ConfigError(
            f"{folder / _CONFIG}: {risks[0]}{rest}, and you did not begin this run on this "
            "machine; if you trust whoever did, add --trust"
        )


def require_trusted_start(
    config: Config, recipe: str, overrides: Sequence[str], trusts: bool
) -> None:
    """Refuse a start from a stranger's recipe or state, unless the user trusts it.

    Where it lies in a run's folder, the recipe is as little the user's as the run. Of a run that a
    recipe of the user's goes on with, code can only come with its model.

    Args:
        trusts: makes the run that is continued one of this user's.

    Raises:
        ConfigError: names the key, the value and the file.
    """
    path, run = Path(recipe), config.run
    if path.name == _CONFIG and any((path.parent / name).exists() for name in _OF_RUNS):
        require_trust(_run_of(path.parent), config, overrides, trusts)
    named = run.resume if run.resume not in ("auto", "never") else None
    named = str(Path(run.dir) / run.name) if named is None and run.name is not None else named
    is_continued = named is not None and Path(named).expanduser().is_dir()
    if not is_continued and run.fork is not None:
        origin, _, step = run.fork.rpartition("@")
        named = origin if step.isdecimal() and origin else run.fork
    folder = None if named is None else _run_of(Path(named).expanduser())
    if folder is not None and (folder / _CONFIG).is_file():
        require_trust(folder, config, overrides, trusts, (_TRUST,))
        if trusts and is_continued:
            mark_as_begun(folder)


def _run_of(folder: Path) -> Path:
    """Return the folder of the run that a checkpoint lies in; any other as it is."""
    return folder.absolute().parent.parent if (folder / _MANIFEST).exists() else folder


def _reaches(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what a recipe does outside its run's folder, by key, code first."""
    for key, value, reach in sorted(side_effects(config), key=lambda each: each[2] != CODE):
        yield key, f"{key}={quote(value)} {reach.effect}"
    for path, (text, _) in config.from_environment.items():
        key = ".".join(path)
        yield key, f"{key}={quote(text)} reads a variable of your environment"


def _odd_entries(folder: Path) -> Iterator[Path]:
    """Yield the entries that are neither files nor folders: links, pipes, devices."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                yield path


def _proof(folder: Path) -> bytes:
    """Return the mark of a folder, which only this user's key makes."""
    inode = str(folder.stat().st_ino).encode()
    return hmac.new(_key(), inode, hashlib.sha256).hexdigest().encode()


def _key() -> bytes:
    """Return the key in this user's state directory, made if it is not there."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(home, "winnow", "runs.key")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
        opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as out:
            out.write(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):  # another run was first
            os.link(draft, file)
        draft.unlink()
    return file.read_bytes()
