"""Tells a supervising parent, through a pipe, that a run gets on. See `winnow.runs.supervisor`.

A line is written when something has moved since the last one: tokens, updates, steps. A run
that hangs writes nothing, however busy it looks. The lines are `folder PATH`, `step N`, `beat`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from winnow.observe.names import Record
from winnow.observe.sinks import RunInfo

_INTERVAL_S = 0.5


class Heartbeat:
    """A sink that also watches counters; without a pipe it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._readings: list[Callable[[], object]] = []
        self._beats = 0
        self._closed = threading.Event()
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            threading.Thread(target=self._run, args=(os.getppid(),), daemon=True).start()

    def folder(self, path: Path) -> None:
        """The run's folder, which a restart continues."""
        self._write(f"folder {path.absolute()}")

    def watch(self, reading: Callable[[], object]) -> None:
        """Count a change of what `reading` returns as progress; called from another thread."""
        self._readings.append(reading)

    def beat(self) -> None:
        """Something moved."""
        self._beats += 1

    def start(self, info: RunInfo) -> None:
        """A run begins."""
        self._write(f"step {info.first_step - 1}")

    def log(self, step: int, record: Record) -> None:
        """A step is done."""
        self._write(f"step {step}")

    def close(self) -> None:
        """No more of steps; the counters are watched to the end of the process."""

    def _run(self, parent: int) -> None:
        seen: list[object] = []
        while not self._closed.wait(_INTERVAL_S):
            if os.getppid() != parent:
                # Nobody is left to restart or to end this run: it ends as if asked to.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            now = [self._beats, *(reading() for reading in self._readings)]
            if now != seen:
                seen = now
                self._write("beat")

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # the parent is gone, which `_run` notices
            os.write(self._descriptor, f"{line}\n".encode())
