"""The lock on a run's folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from winnow.checkpoints.opening import locked
from winnow.errors import ConfigError


def holder(folder: Path) -> int:
    """A child process that holds the folder; its number."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(folder):
            os.write(writer, b".")
            while True:
                time.sleep(1)
    os.read(reader, 1)
    for descriptor in (reader, writer):
        os.close(descriptor)
    return child


def test_a_folder_in_use_is_refused_until_its_holder_dies(tmp_path: Path) -> None:
    child = holder(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {child} on "), locked(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with locked(tmp_path):
        pass
