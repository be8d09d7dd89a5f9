"""Writing files so that a full disk or a crash leaves the old content or the new, never half."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
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
def writing(path: Path) -> Iterator[None]:
    """Raise a system's error within the block as `disk_error` of `path`.

    Raises:
        WinnowError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


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


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of `path` as one act: temporary file, fsync, rename.

    Raises:
        WinnowError: the file cannot be written; what was there before still is.
    """
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(data)
            sync(partial)
            partial.replace(path)
        except BaseException:  # Ctrl-C leaves nothing half-written either
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a draft that takes the place of the folder `target` when the block is done.

    An error within leaves nothing. A crash may leave `.NAME.partial`, which may be deleted, or
    `.NAME.replaced`, which is what was there before and whole.
    """
    draft, old = (target.with_name(f".{target.name}.{kind}") for kind in ("partial", "replaced"))
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        for path in [*draft.rglob("*"), draft]:  # else the rename could outrun the contents
            sync(path)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class AppendFile:
    """A file that takes each text whole or leaves it; errors are told with file and remedy."""

    def __init__(self, path: Path) -> None:
        """Open for appending; made if absent.

        Raises:
            WinnowError: the file cannot be written.
        """
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Append and hand it to the system at once; of a write that fails nothing is left."""
        before, rest = self.size, memoryview(data)
        with writing(self.path):
            try:
                while rest:  # a write may stop early when a disk fills
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise

    def sync(self) -> None:
        """Wait until all is safely on disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def truncate(self, offset: int) -> None:
        """Forget everything after an offset."""
        with writing(self.path):
            self._file.truncate(offset)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()
