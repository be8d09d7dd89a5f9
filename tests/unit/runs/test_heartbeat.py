"""What a run tells its supervisor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.observe.sinks import RunInfo
from winnow.runs.process import Heartbeat


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)


def lines(reader: int) -> list[str]:
    try:
        return os.read(reader, 65536).decode().splitlines()
    except BlockingIOError:
        return []


def test_it_beats_while_something_moves_and_only_then(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.runs.process._BEAT_S", 0.001)
    reader, writer = pipe
    looks, count = threading.Semaphore(0), 0

    def reading() -> int:
        looks.release()
        return count

    def looked() -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(2):  # when the second begins, what the first saw has been told
            looks.acquire()

    heartbeat = Heartbeat(writer)
    heartbeat.watch(reading)
    looked()
    lines(reader)
    looked()
    assert lines(reader) == []
    count = 1
    looked()
    assert lines(reader) == ["beat"]
    heartbeat.beat()
    looked()
    assert lines(reader) == ["beat"]
    heartbeat.watch(lambda: 0)  # from now on, in the place of the count
    time.sleep(0.2)
    lines(reader)
    count = 2
    time.sleep(0.2)
    assert lines(reader) == []


def test_it_names_the_folder_and_each_step(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = pipe
    heartbeat = Heartbeat(writer)
    heartbeat.folder(tmp_path)
    heartbeat.start(RunInfo("a", 9, first_step=4))
    heartbeat.log(4, {})
    told = [line for line in lines(reader) if line != "beat"]
    assert told == [f"folder {tmp_path}", "step 3", "step 4"]
    assert not os.get_inheritable(writer)


def test_without_a_supervisor_it_writes_nowhere_and_watches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("winnow.runs.process._BEAT_S", 0.01)
    asked = []
    threads = threading.active_count()
    heartbeat = Heartbeat(None)
    heartbeat.watch(lambda: asked.append("asked"))
    heartbeat.folder(tmp_path)
    heartbeat.start(RunInfo("a", 9))
    heartbeat.log(1, {})
    heartbeat.beat()
    time.sleep(0.1)
    assert threading.active_count() == threads
    assert asked == []
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
