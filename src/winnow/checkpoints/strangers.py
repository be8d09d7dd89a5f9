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
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from winnow.config.base import CODE, side_effects
from winnow.config.root import Config
from winnow.config.schema import quote
from winnow.errors import ConfigError
from winnow.observe.files import explain_write_errors, open_nofollow

MARK = ".begun-here"
"""Its name in a run's folder."""
_CONFIG, _MANIFEST = "config.yaml", "manifest.json"
_OF_RUNS = "log.txt", "metrics.jsonl", "checkpoints", _MANIFEST
"""Files by which a folder with a config.yaml is known as a run's or a checkpoint's."""
_TRUST = "model.trust_remote_code"

log = logging.getLogger(__name__)


def mark_as_local(folder: Path) -> None:
    """Mark a run as started by this user on this machine, if the key can be stored.

    Raises:
        WinnowError: the run's folder cannot be written to.
    """
    try:
        proof = _folder_mac(folder)
    except (OSError, RuntimeError) as error:  # without a home
        log.warning("%s will be treated as a run of someone else: %s", folder, error)
        return
    with explain_write_errors(folder / MARK), open_nofollow(folder / MARK, "wb") as file:
        file.write(proof)


def is_local_run(folder: Path) -> bool:
    """Return whether this user started the run on this machine."""
    try:
        mark = folder / MARK
        is_plain = stat.S_ISREG(mark.lstat().st_mode)
        return is_plain and hmac.compare_digest(mark.read_bytes(), _folder_mac(folder))
    except (OSError, RuntimeError):
        return False


def require_trust(
    folder: Path,
    config: Config | None,
    overrides: Sequence[str],
    trusts: bool,
    key_prefixes: tuple[str, ...] = ("",),
) -> None:
    """Refuse an untrusted run folder that reaches outside itself, unless `trusts` is set.

    Args:
        config: the recipe; None where only files are read.
        overrides: the overrides; the user answers for the keys in them.
        key_prefixes: beginnings of the keys that matter.

    Raises:
        ConfigError: names the key, the value and the file.
    """
    if trusts or is_local_run(folder):
        return
    overridden = {word.lstrip("+~").partition("=")[0].replace("/", ".") for word in overrides}
    named = [] if config is None else list(_outside_effects(config))
    risks = [what for key, what in named if key not in overridden and key.startswith(key_prefixes)]
    risks += [f"{path} is not a regular file or folder" for path in _special_files(folder)]
    if risks:
        rest = f" (and {len(risks) - 1} more)" if len(risks) > 1 else ""
        raise ConfigError(
            f"{folder / _CONFIG}: {risks[0]}{rest}, and this run was not started by you on this "
            "machine; if you trust its author, add --trust"
        )


def require_trusted_start(
    config: Config, recipe: str, overrides: Sequence[str], trusts: bool
) -> None:
    """Refuse a start from an untrusted recipe or state, unless `trusts` is set.

    Where it lies in a run's folder, the recipe is as little the user's as the run. Of a run that a
    recipe of the user's goes on with, code can only come with its model.

    Args:
        trusts: makes the run that is continued one of this user's.

    Raises:
        ConfigError: names the key, the value and the file.
    """
    path, run = Path(recipe), config.run
    if path.name == _CONFIG and any((path.parent / name).exists() for name in _OF_RUNS):
        require_trust(_run_folder(path.parent), config, overrides, trusts)
    named = run.resume if run.resume not in ("auto", "never") else None
    named = str(Path(run.dir) / run.name) if named is None and run.name is not None else named
    is_continued = named is not None and Path(named).expanduser().is_dir()
    if not is_continued and run.fork is not None:
        origin, _, step = run.fork.rpartition("@")
        named = origin if step.isdecimal() and origin else run.fork
    folder = None if named is None else _run_folder(Path(named).expanduser())
    if folder is not None and (folder / _CONFIG).is_file():
        require_trust(folder, config, overrides, trusts, (_TRUST,))
        if trusts and is_continued:
            mark_as_local(folder)


def _run_folder(folder: Path) -> Path:
    """Return the run folder of a checkpoint; other folders unchanged."""
    return folder.absolute().parent.parent if (folder / _MANIFEST).exists() else folder


def _outside_effects(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a recipe's effects outside its run's folder, by key, code first."""
    for key, value, reach in sorted(side_effects(config), key=lambda each: each[2] != CODE):
        yield key, f"{key}={quote(value)} {reach.effect}"
    for path, (text, _) in config.from_environment.items():
        key = ".".join(path)
        yield key, f"{key}={quote(text)} reads an environment variable"


def _special_files(folder: Path) -> Iterator[Path]:
    """Yield the entries that are neither files nor folders: links, pipes, devices."""
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            kind = path.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                yield path


def _folder_mac(folder: Path) -> bytes:
    """Return the mark of a folder, an HMAC with this user's key."""
    inode = str(folder.stat().st_ino).encode()
    return hmac.new(_user_key(), inode, hashlib.sha256).hexdigest().encode()


def _user_key() -> bytes:
    """Return the key in this user's state directory; create it if missing."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(home, "winnow", "runs.key")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=file.parent, buffering=0
        ) as draft:  # its owner's alone
            draft.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):  # another run was first
                os.link(draft.name, file)
    return file.read_bytes()
