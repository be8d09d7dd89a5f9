"""Runs to look at: folders here or behind a URL, of which parts are read and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import PurePosixPath
from threading import Lock, RLock
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from winnow.errors import WinnowError
from winnow.observe.files import one_line
from winnow.observe.rollouts import STEP_FILE

CONFIG = "config.yaml"
_TAIL_BYTES = 256
"""Bytes before the end of the last reading, by which a file that was cut back is noticed."""

T = TypeVar("T")


class UnreadableError(WinnowError):
    """A file of a run is missing, half-written or damaged; the page shows the line."""


class RunNotFoundError(UnreadableError):
    """There is no run of that name, or no longer."""


@dataclass(frozen=True)
class FileEntry:
    """A file or folder, as its file system lists it."""

    size: int
    stamp: str
    """Its time of change, or another text that changes with its content."""
    is_folder: bool
    changed_s: float | None
    """Seconds since 1970 of the last change, where the file system has it."""


ABSENT = FileEntry(0, "", False, None)


class RunFiles:
    """The files of one run, by names relative to its folder.

    Args:
        system: a file system of fsspec's.
        root: the run's folder in it.
        name: as the pages call the run; unique among those shown.
    """

    def __init__(self, system: Any, root: str, name: str) -> None:
        self._system, self.root, self.name = system, root.rstrip("/"), name
        self.is_local = _is_local(system)
        self._steps: dict[str, tuple[str, Mapping[int, FileEntry]]] = {}

    def entries(self, folder: str = "") -> dict[str, FileEntry]:
        """List a folder by name; one that is absent is empty.

        Raises:
            UnreadableError: it cannot be listed.
        """
        return _list_entries(self._system, f"{self.root}/{folder}".rstrip("/"))

    def steps(self, folder: str) -> Mapping[int, FileEntry]:
        """List the files step-N.parquet of a folder by N, in order.

        Raises:
            UnreadableError: the folder cannot be listed.
        """
        # A local folder has another time when a file in it is new, gone or replaced.
        stamp = self.entries().get(folder, ABSENT).stamp if self.is_local else ""
        cached = self._steps.get(folder)
        if cached is None or not stamp or cached[0] != stamp:
            entries = self.entries(folder).items()
            matches = ((STEP_FILE.fullmatch(name), each) for name, each in entries)
            listed = dict(sorted((int(match[1]), each) for match, each in matches if match))
            cached = self._steps[folder] = stamp, listed
        return cached[1]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the bytes [start, end) of a file.

        Raises:
            UnreadableError: it is not there, or cannot be read.
        """
        with self.explain_errors(name):
            return bytes(self._system.cat_file(self._path(name), start=start, end=end))

    @contextmanager
    def parquet(self, name: str) -> Iterator[pq.ParquetFile]:
        """Open a parquet file; errors are those of `explain_errors`."""
        with self.explain_errors(name), ExitStack() as opened:
            path = self._path(name)
            source = path if self.is_local else opened.enter_context(self._system.open(path))
            yield opened.enter_context(pq.ParquetFile(source))

    def _path(self, name: str) -> str:
        path = f"{self.root}/{name}"
        # A pipe would be waited for without an end.
        if self.is_local and os.path.exists(path) and not os.path.isfile(path):
            raise UnreadableError(f"{name} of {self.name} is not a regular file")
        return path

    @contextmanager
    def explain_errors(self, name: str) -> Iterator[None]:
        """Raise errors within the block as `UnreadableError` of one file.

        Raises:
            UnreadableError: instead of any error of reading, or of what the file holds.
        """
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnreadableError(f"{self.name} has no {name} yet, or no longer") from error
        except WinnowError:
            raise
        # Each file system has its own errors, and a file may hold anything.
        except (Exception, pa.ArrowException) as error:
            raise UnreadableError(
                f"cannot read {name} of {self.name}: {one_line(error)[:300]}"
            ) from error


class StampedCache:
    """A cache of values, each with a stamp that changes with its source file."""

    def __init__(self) -> None:
        self._lock = RLock()  # one may be made of another
        self._values: dict[str, tuple[str, Any]] = {}

    def get(self, name: str, stamp: str, make: Callable[[], T]) -> T:
        """Return the value under a name, made anew if its stamp has changed."""
        with self._lock:
            if name not in self._values or self._values[name][0] != stamp:
                self._values[name] = stamp, make()
            value: T = self._values[name][1]
        return value


class GrowingFile:
    """A file that a run appends to, and cuts back or replaces when it is resumed."""

    def __init__(self, files: RunFiles, name: str) -> None:
        self._files, self._name = files, name
        self.offset = 0
        """Bytes of the lines that were read."""
        self._tail = b""

    def read_lines(self, size: int) -> tuple[bytes, bool]:
        """Read the whole lines that were added.

        Args:
            size: bytes of the file now.

        Returns:
            The lines, and True if they are those of another file, from its beginning.

        Raises:
            UnreadableError: the file cannot be read.
        """
        start = max(self.offset - _TAIL_BYTES, 0)
        seen = self.offset - start
        content = self._files.read(self._name, start, size) if size > start else b""
        is_new = size < self.offset or content[:seen] != self._tail
        if is_new:
            content, seen, self.offset = self._files.read(self._name, 0, size), 0, 0
        lines = content[seen : content.rfind(b"\n") + 1]
        self.offset += len(lines)
        self._tail = content[: seen + len(lines)][-_TAIL_BYTES:]
        return lines, is_new


class RunSet:
    """The runs under some places, searched again whenever they are listed.

    Args:
        places: run folders, folders that hold runs, or URLs of either.

    Raises:
        UnreadableError: a place is not there, or its file system cannot be used.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = [_open_place(each) for each in places]
        self._runs: dict[str, RunFiles] = {}
        self._lock = Lock()  # several pages ask at once

    @property
    def is_local(self) -> bool:
        """True if every place lies on this machine's file systems."""
        return all(_is_local(system) for system, _ in self._places)

    def discover(self) -> dict[str, RunFiles]:
        """Find the runs, by name.

        Raises:
            UnreadableError: a place cannot be listed.
        """
        with self._lock:
            roots = {
                root: system
                for system, path in self._places
                for root in _find_run_roots(system, path, self._runs)
            }
            for root in self._runs.keys() - roots.keys():
                del self._runs[root]
            taken = {each.name for each in self._runs.values()}
            for root, system in roots.items():
                if root not in self._runs:
                    first = PurePosixPath(root).name
                    names = chain([first], (f"{first} ({number})" for number in count(2)))
                    name = next(each for each in names if each not in taken)
                    taken.add(name)
                    self._runs[root] = RunFiles(system, root, name)
            return {self._runs[root].name: self._runs[root] for root in roots}


def _open_place(place: str) -> tuple[Any, str]:
    try:
        system, path = fsspec.core.url_to_fs(place)
        path = str(path).rstrip("/")
        exists = system.exists(path)
    except Exception as error:  # each file system has its own errors
        raise UnreadableError(f"cannot open {place}: {one_line(error)[:300]}") from error
    if not exists:
        raise UnreadableError(
            f"{place} does not exist; give a run's folder, a folder of runs, or the URL of one"
        )
    return system, path


def _find_run_roots(system: Any, path: str, cached: Container[str]) -> Iterator[str]:
    entries = _list_entries(system, path)
    if CONFIG in entries:
        yield path
        return
    for name, entry in sorted(entries.items()):
        if entry.is_folder and not name.startswith("."):
            root = f"{path}/{name}"
            with suppress(OSError):
                # Of a known one the folder's entry is enough: elsewhere each question is a request.
                if (root in cached and not _is_local(system)) or system.exists(f"{root}/{CONFIG}"):
                    yield root


def _list_entries(system: Any, path: str) -> dict[str, FileEntry]:
    try:
        if _is_local(system):
            return dict(_list_local(path))
        listed = system.ls(path, detail=True, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except Exception as error:  # each file system has its own errors
        raise UnreadableError(f"cannot list {path}: {one_line(error)[:300]}") from error
    return {PurePosixPath(each["name"]).name: _make_entry(each) for each in listed}


def _list_local(path: str) -> Iterator[tuple[str, FileEntry]]:
    with os.scandir(path) as listed:
        for each in listed:
            with suppress(OSError):  # gone meanwhile, or a link that leads nowhere
                stat = each.stat()
                stamp = f"{stat.st_size} {stat.st_mtime_ns}"
                yield each.name, FileEntry(stat.st_size, stamp, each.is_dir(), stat.st_mtime)


def _make_entry(info: dict[str, Any]) -> FileEntry:
    times = (info.get(key) for key in ("mtime", "LastModified", "last_modified", "created"))
    changed = next((each for each in times if each), None)
    seconds = changed.timestamp() if isinstance(changed, datetime) else changed
    size = int(info.get("size") or 0)
    return FileEntry(
        size,
        f"{size} {info.get('ETag', changed)}",
        info.get("type") == "directory",
        float(seconds) if isinstance(seconds, int | float) else None,
    )


def _is_local(system: Any) -> bool:
    protocol = system.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)
