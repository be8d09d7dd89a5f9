"""The lock on a run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from winnow.errors import ConfigError
from winnow.runs.resume import locked

HOLD = """
import sys, time
from pathlib import Path
from winnow.runs.resume import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_folder_in_use_is_refused_until_its_holder_dies_however(
    death: int, tmp_path: Path
) -> None:
    process = holder(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on "), locked(tmp_path):
        pass
    os.kill(process.pid, death)
    process.communicate()
    with locked(tmp_path):
        pass


def test_a_folder_can_be_taken_again_and_again(tmp_path: Path) -> None:
    for _ in range(3):
        with locked(tmp_path):
            assert f"process {os.getpid()}" in (tmp_path / ".lock").read_text()


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ConfigError, match="in use"), locked(tmp_path):
        pass
