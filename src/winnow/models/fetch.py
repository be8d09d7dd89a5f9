"""Models that lie elsewhere, as folders of this machine: URLs that fsspec reaches, hub revisions.

`local_folder` takes what a recipe names. A folder's path, or a bare hub name, stays as it is.

    s3://BUCKET/PATH, gs://, hdfs://, http://, file://    all of it is copied to the cache
    OWNER/NAME@REVISION                                   a snapshot in the hub's own cache

A copy has the listing's sizes and versions (etag, or time of change) in its name, so that weights
which change at their place make another copy, and one that is damaged is mended. It is written
beside its place and renamed when it is whole. Files that a killed process had finished are kept,
and processes of a node that want the same model wait for the one that fetches it. Loaders call
this, so that each node of a cluster has a copy of its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any, NamedTuple

from winnow.errors import ModelError
from winnow.observe.files import one_line, sync

MODEL_CACHE = "WINNOW_MODEL_CACHE"
"""Variable that names the folder of the copies; other processes of a run inherit it."""
_SKIPPED = (
    *("*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.pth", "original/*"),
    *("optimizer*", "scheduler.pt", "rng_state*", "training_args.bin", ".*", "*/.*"),
)
"""Files of a model's folder that nothing here reads."""
_PICKLED = "*.bin"
"""Weights that are read where there are no safetensors."""
_VERSIONS = "ETag", "etag", "md5Hash", "checksum", "generation", "mtime", "LastModified", "created"
"""Names under which file systems tell that a file is another one, best first."""
_PINNED = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)")
_AT_ONCE = 4
"""Files that are fetched side by side."""
_found: dict[str, str] = {}
"""The folders that this process was given; a process sees one version of a model."""

log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A file of a model elsewhere."""

    name: str
    """Its name in the file system."""
    size: int
    version: str


def is_elsewhere(path: str) -> bool:
    """Return whether `local_folder` fetches it."""
    return "://" in path or _pinned(path) is not None


def local_folder(
    path: str, field: str = "model.path", tell: Callable[[str], None] = log.info
) -> str:
    """Return the folder of this machine that holds what a recipe names, fetched if need be.

    Args:
        path: a folder, a URL, a hub name, or one with a revision.
        field: the key of the recipe that gave it, for messages.
        tell: is told before something large is fetched.

    Raises:
        ModelError: nothing is there, it cannot be reached, or the disk is full.
    """
    if path not in _found and is_elsewhere(path):
        fetch = _from_url if "://" in path else _from_hub
        _found[path] = str(fetch(path, field, tell))
    return _found.get(path, path)


def hub_commit(path: str, field: str, tell: Callable[[str], None] = log.info) -> str:
    """Return the commit that a hub name with a revision is now, and fetch it.

    Raises:
        ModelError: as `local_folder`.
    """
    return Path(local_folder(path, field, tell)).name


def cache_root() -> Path:
    """Return the folder of the copies: of memory where it lies in /dev/shm."""
    given = os.environ.get(MODEL_CACHE)
    if given:
        return Path(given).expanduser()
    common = os.environ.get("WINNOW_CACHE")
    return (Path(common) if common else Path.home() / ".cache" / "winnow") / "models"


def may_be_hub_name(path: str) -> bool:
    """Return whether a path is `name` or `owner/name`, and lies in no folder that is here."""
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path:
        return False
    owner, slash, _ = path.partition("/")
    return not (slash and Path(owner).is_dir())


def check_hub(name: str, field: str) -> None:
    """Ask once whether there is such a model: transformers asks for a minute before it gives up.

    Raises:
        ModelError: there is none, or the hub cannot be asked.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        is_known = isinstance(cached, str) or HfApi().repo_exists(name)
    # Malformed names, offline mode, and the errors of whichever HTTP library is below.
    except Exception as error:
        reason = shorten(str(error), 200, placeholder=" …") or type(error).__name__
        raise ModelError(
            f"{field} {name}: no such folder, and the hub cannot be asked for it: "
            f"{reason.rstrip('.')}; give a Hugging Face model folder"
        ) from error
    if not is_known:
        raise ModelError(
            f"{field} {name}: no such folder, and the hub has no such model; check the name"
        )


def _pinned(path: str) -> re.Match[str] | None:
    """Return name and revision of `OWNER/NAME@REVISION`; a folder of such a name is none."""
    return None if Path(path).exists() else _PINNED.fullmatch(path)


def _from_hub(path: str, field: str, tell: Callable[[str], None]) -> Path:
    """Return the folder of a revision in the hub's cache; offline, of one that is there already."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RevisionNotFoundError

    match = _pinned(path)
    assert match is not None
    name, revision = match.groups()
    where = f"{field} {name} at revision {revision}"
    skipped = [*_SKIPPED]
    check_hub(name, field)
    try:
        found = HfApi().model_info(name, revision=revision)
        names = [file.rfilename for file in found.siblings or ()]
        skipped += [_PICKLED] if any(n.endswith(".safetensors") for n in names) else []
        tell(f"Fetching {name}@{revision} from the hub")
    except RevisionNotFoundError as error:
        raise ModelError(f"{where}: the hub has no such revision; check model.revision") from error
    except Exception as error:  # offline, or whatever the HTTP library below says
        log.info("%s: the hub cannot be asked: %s", where, one_line(error))
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=skipped))
    except Exception as error:
        reason = shorten(one_line(error), 200, placeholder=" …").rstrip(".")
        raise ModelError(f"{where}: cannot be fetched: {reason}; check revision and access") from (
            error
        )


def _from_url(url: str, field: str, tell: Callable[[str], None]) -> Path:
    """Return the copy of what lies at a URL now, made if there is none."""
    from filelock import FileLock

    files, root = _file_system(url, field)
    entries = _listing(files, root, url, field)
    told = json.dumps([url, {name: entry[1:] for name, entry in sorted(entries.items())}])
    name = re.sub(r"[^\w.-]+", "_", PurePosixPath(root).name) or "model"
    cache = cache_root()
    target = cache / f"{name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    if _is_whole(target, entries):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{target.name}.lock"):
            if not _is_whole(target, entries):  # another process has fetched it meanwhile
                _fetch(url, files, root, entries, target, field, tell)
    except OSError as error:
        raise ModelError(
            f"{field} {url}: cannot be kept in {cache}: {error.strerror or one_line(error)}; "
            "choose another folder in model.cache_dir"
        ) from error
    return target


def _file_system(url: str, field: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ModelError(
            f"{field} {url}: cannot be used: {one_line(error)}; install what it asks for, or give "
            "another URL"
        ) from error
    # What a listing was some minutes ago would hide that weights have changed.
    files.invalidate_cache()
    return files, root


def _listing(files: Any, root: str, url: str, field: str) -> dict[str, _Entry]:
    """List the files of a model by their paths in its folder."""
    try:
        found: dict[str, Any] = files.find(root, detail=True)
        if not found:  # some file systems leave out what they cannot reach
            files.ls(root)
        base = PurePosixPath(root)
        entries = {}
        for name, info in found.items():
            path = PurePosixPath(name.rstrip("/")).relative_to(base)
            if ".." in path.parts:
                raise ValueError(f"the key {name} leads out of the model's folder")
            if any(fnmatchcase(str(path), pattern) for pattern in _SKIPPED):
                continue
            if info.get("size") is None:  # servers of HTTP tell it of single files alone
                info = files.info(name)
            version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
            entries[str(path)] = _Entry(name, int(info["size"]), version)
    except FileNotFoundError:
        entries = {}
    except Exception as error:  # each file system has errors of its own
        raise _unreachable(url, field, error) from error
    if not entries.keys() & {"config.json", "adapter_config.json", "tokenizer_config.json"}:
        raise ModelError(
            f"{field} {url}: no Hugging Face folder lies there ({len(entries)} files, no "
            "config.json); check the URL"
        )
    if any(name.endswith(".safetensors") for name in entries):
        entries = {n: entry for n, entry in entries.items() if not fnmatchcase(n, _PICKLED)}
    return entries


def _fetch(
    url: str,
    files: Any,
    root: str,
    entries: Mapping[str, _Entry],
    target: Path,
    field: str,
    tell: Callable[[str], None],
) -> None:
    """Copy the files to a draft that keeps those which an earlier try has finished."""
    draft = target.with_name(f".{target.name}.partial")
    if target.exists():  # damaged: what is whole in it need not come again
        shutil.rmtree(draft, ignore_errors=True)
        target.rename(draft)
    missing = {n: e for n, e in entries.items() if _size(draft / n) != e.size}
    size, free = sum(e.size for e in missing.values()), shutil.disk_usage(target.parent).free
    if size > free:
        raise ModelError(
            f"{field} {url}: {size / 1e9:.1f} GB do not fit into {target.parent}, which has "
            f"{free / 1e9:.1f} GB left; free some space, or choose another folder in "
            "model.cache_dir"
        )
    tell(f"Fetching {url} ({size / 1e9:.2f} GB in {len(missing)} files) to {target}")

    def get(name: str) -> None:
        path = draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        files.get_file(entries[name].name, str(part))
        if _size(part) != entries[name].size:
            raise ValueError(f"{name} has {_size(part)} bytes, not {entries[name].size}")
        sync(part)
        part.rename(path)

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(get, missing))
        files.invalidate_cache()
    except Exception as error:
        raise _unreachable(url, field, error) from error
    if _listing(files, root, url, field) != entries:
        shutil.rmtree(draft, ignore_errors=True)
        raise ModelError(f"{field} {url}: changed while it was fetched; start again once it rests")
    draft.rename(target)


def _unreachable(url: str, field: str, error: Exception) -> ModelError:
    reason = shorten(one_line(error), 200, placeholder=" …").rstrip(".")
    return ModelError(f"{field} {url}: cannot be fetched: {reason}; mend the access")


def _is_whole(target: Path, entries: Mapping[str, _Entry]) -> bool:
    return all(_size(target / name) == entry.size for name, entry in entries.items())


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
