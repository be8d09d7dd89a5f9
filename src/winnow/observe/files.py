"""Writing files so that a full disk or a crash leaves the old content or the new, never half."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from winnow.errors import WinnowError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TOLD = re.compile(r"\(os error (\d+)\)")
PARTIAL = ".partial"
"""Ending of a file that is being written; one left by a crash may be deleted."""


def disk_error(path: Path, error: OSError) -> WinnowError:
    """Word the error for a `path` that cannot be written: file, reason, remedy."""
    return WinnowError(f"cannot write {path}: {reason_and_remedy(error)}")


def reason_and_remedy(error: OSError) -> str:
    """Say why the system refused, and what to do about it: `REASON; REMEDY`."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        remedy = "free some space, or put the run on another disk with run.dir=FOLDER"
    elif error.errno in _REFUSED:
        remedy = "choose a folder that you may write to with run.dir=FOLDER"
    else:
        remedy = "check the path, or choose another folder with run.dir=FOLDER"
    return f"{reason}; {remedy}"


def system_error(error: Exception) -> OSError | None:
    """Find the system's error in one; libraries written in Rust tell it as `(os error 28)`."""
    if isinstance(error, OSError):
        return error
    told = _TOLD.search(str(error))
    return None if told is None else OSError(int(told[1]), os.strerror(int(told[1])))


@contextlib.contextmanager
def refusals_told(path: Path) -> Iterator[None]:
    """Tell a system's error within the block of the file it names, or else of `path`.

    Raises:
        WinnowError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        raise WinnowError(f"cannot use {named}: {reason_and_remedy(error)}") from error


def write_fully(descriptor: int, data: bytes) -> None:
    """Write every byte; `os.write` may stop early when a disk fills."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of `path` as one act: temporary file, fsync, rename.

    Raises:
        WinnowError: the file cannot be written; what was there before still is.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_fully(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException as error:  # Ctrl-C leaves nothing half-written either
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(path, error) from error
        raise


class AppendFile:
    """A file that takes each text whole or leaves it; errors are told with file and remedy."""

    def __init__(self, path: Path) -> None:
        """Open for appending; made if absent.

        Raises:
            WinnowError: the file cannot be written.
        """
        self._path, self._descriptor = path, -1
        with self._told():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Append and hand it to the system at once; of a write that fails nothing is left."""
        before = self.size
        with self._told():
            try:
                write_fully(self._descriptor, data)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, before)
                raise

    def sync(self) -> None:
        """Wait until all is safely on disk."""
        with self._told():
            os.fsync(self._descriptor)

    def ends_line(self, offset: int) -> bool:
        """Return whether a line ends at an offset, or none has begun."""
        if offset == 0:
            return True
        return offset <= self.size and os.pread(self._descriptor, 1, offset - 1) == b"\n"

    def truncate(self, offset: int) -> None:
        """Forget everything after an offset."""
        with self._told():
            os.ftruncate(self._descriptor, offset)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(self._path, error) from error
