"""One process a run: a lock on its folder, which the system takes back however the holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from winnow.errors import ConfigError
from winnow.observe.files import disk_error, write_fully

LOCK_FILE = ".lock"
"""Its name in a run's folder. It stays there: a lock file that comes and goes can be held twice."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder while the block runs.

    Raises:
        ConfigError: another process holds it; says which.
        WinnowError: the lock file cannot be made.
    """
    path = folder / LOCK_FILE
    try:
        # Not inherited by programs that scorers start; a copy of the descriptor would hold on.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error(path, error) from error
    try:
        _take(descriptor, folder)
        with contextlib.suppress(OSError):  # a full disk: only the message below would miss it
            os.ftruncate(descriptor, 0)
            write_fully(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise ConfigError(
            f"{folder} is in use by {holder}; wait for it, end it, or choose another run.name"
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise disk_error(folder / LOCK_FILE, error) from error
        log.warning("%s lies on a file system without locks: start one process only", folder)
