"""A run's state, saved in a thread: order, errors, and an end at once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unprivileged import permissions_apply

from winnow.checkpoints import run_state as module
from winnow.checkpoints.checkpoint import Manifest, Snapshot, checkpoints_in
from winnow.checkpoints.run_state import RunState
from winnow.config.trainer import TrainerConfig
from winnow.errors import CheckpointError, TransientError
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog


class Weights:
    """The `ModelStates` of a run, whose next copy is written as a test says."""

    gate: threading.Event | None = None
    error = ""

    is_written = True

    def copy(self) -> Snapshot:
        gate, error = self.gate, self.error
        assert self.is_written, "ranks still hold the copy before"
        self.is_written = False

        def save_model(folder: Path) -> None:
            folder.mkdir()
            if gate is not None:
                gate.wait(10)
            self.is_written = True
            if error:
                raise OSError(28, error)

        return Snapshot({"a": 1}, save_model)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        raise AssertionError


@contextlib.contextmanager
def saving(run: Path, keep_last: int | None = None) -> Iterator[Callable[..., RunState]]:
    """Saves of a run's steps; what they raise, the block raises."""
    weights, log = Weights(), MetricsLog(run / "metrics.jsonl")
    trainer = TrainerConfig(keep_last=keep_last)

    with (
        contextlib.closing(log),
        RunState(weights, {}, RunFolder(run), log, trainer, Manifest()) as s,
    ):

        def save(step: int, gate: threading.Event | None = None, error: str = "") -> RunState:
            weights.gate, weights.error = gate, error
            s.record_step(step, None)
            s.save()
            return s

        yield save


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints_in(run / "checkpoints")]


def test_saving_returns_at_once_and_the_next_save_waits(tmp_path: Path) -> None:
    gate = threading.Event()
    with saving(tmp_path) as save:
        save(1, gate)
        assert steps(tmp_path) == []
        threading.Timer(0.1, gate.set).start()
        save(2)
        assert 1 in steps(tmp_path)
    assert steps(tmp_path) == [1, 2]


def test_what_the_checkpoint_refers_to_is_made_durable_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(
        module, "fsync_path", lambda path: flushed.append((path.name, steps(tmp_path)))
    )
    (tmp_path / "rollouts").mkdir()
    with saving(tmp_path) as save:
        save(1)
    assert flushed == [(tmp_path.name, []), ("rollouts", [])]
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("end", ["next save", "wait", "exit"])
def test_an_error_comes_up_at_the_next_occasion(end: str, tmp_path: Path) -> None:
    def go() -> None:
        with saving(tmp_path) as save:
            state = save(1, error="No space left on device")
            if end == "next save":
                save(2)
            elif end == "wait":
                state.wait()

    with pytest.raises(CheckpointError, match="step-1: No space left on device; free some space"):
        go()
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.EIO])
def test_a_passing_error_is_tried_again_and_ends_the_run_with_75_at_the_third(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {"rename": [1, 2], "fsync": [3], "end": [7]}
    rename, fsync = Path.rename, os.fsync

    step = 0

    def fails(kind: str) -> None:
        if step in failing[kind]:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", lambda p, to: [fails("rename"), rename(p, to)][1])
    monkeypatch.setattr(os, "fsync", lambda file: [fails("fsync"), fails("end"), fsync(file)][2])
    with caplog.at_level(logging.WARNING), saving(tmp_path) as save:
        for step in (1, 2, 4, 1, 2, 5):  # two failures in a row, twice
            save(step)._join()
    assert caplog.text.count("retrying at the next checkpoint") == 4
    assert steps(tmp_path) == [4, 5]

    def end(last: list[int]) -> None:
        nonlocal step
        with saving(tmp_path / str(len(last))) as save:
            for step in last:
                save(step)._join()

    for last in ([7], [1, 2, 3, 5]):  # one at the end; three in a row
        with pytest.raises(TransientError, match=os.strerror(number)) as ended:
            end(last)
        assert ended.value.exit_code == 75
        assert not steps(tmp_path / str(len(last)))


def test_an_error_does_not_hide_the_one_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go() -> None:
        with saving(tmp_path) as save:
            save(1, error="No space left on device")
            raise ValueError("the run's own")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="own"):
        go()
    assert "No space left" in caplog.text


def test_ctrl_c_twice_gives_a_save_up_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.checkpoints.run_state._ABANDON_S", 0.05)
    gate = threading.Event()

    def go() -> None:
        with saving(tmp_path) as save:
            save(1, gate)
            time.sleep(0.05)
            raise KeyboardInterrupt

    # A save that it waited for would never end.
    with pytest.raises(KeyboardInterrupt):
        go()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    gate.set()


def test_ctrl_c_twice_stays_that_where_nothing_can_be_cleaned(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / ".step-1.replaced").mkdir(parents=True)
    folder.chmod(0o500)

    def go() -> None:
        with saving(tmp_path):
            raise KeyboardInterrupt

    try:
        with permissions_apply(), pytest.raises(KeyboardInterrupt):
            go()
    finally:
        folder.chmod(0o700)
