"""A supervised run: a parent process that starts it again after a crash or a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from winnow.observe.metrics import Record
from winnow.observe.sinks import RunInfo
from winnow.run.shutdown import _BEAT_S, EXIT_INTERRUPTED, EXIT_TERMINATED, stop_signals

ENDS = frozenset({0, 2, EXIT_TERMINATED, EXIT_INTERRUPTED})
"""Exit codes after which there is nothing to restart."""


SAME_STEP_FAILURES = 3


_LONGEST_PAUSE_S = 60.0


_END_S = 5.0
"""Patience with a child that has closed its pipe."""


@dataclass
class Supervisor:
    """One run and its restarts.

    Args:
        command: starts the run, given the descriptor of the pipe and the folder to continue.
        max_restarts: in all.
        stall_timeout_s: without a line on the pipe.
        first_pause_s: before the first restart; doubles with each failure at the same step.
        report: tells the user a line.
        folder: the run to continue; None begins with what the command says.
    """

    command: Callable[[int, str | None], Sequence[str]]
    max_restarts: int
    stall_timeout_s: float
    first_pause_s: float = 1.0
    report: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr))
    folder: str | None = None
    _child: asyncio.subprocess.Process | None = None
    _step: int = -1
    _stop_requested: asyncio.Event = field(default_factory=asyncio.Event)

    def run(self) -> int:
        """Run to the end; return the exit code, 128 + N for a run that signal N killed."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._forward_signal, number)
        restarts = failures = 0
        while True:
            before = self._step
            code, why = await self._run_once()
            if self._stop_requested.is_set() or code in ENDS:
                return code
            failures = failures + 1 if self._step == before else 1
            where = f"after step {self._step}" if self._step >= 0 else "before its first step"
            message = f"winnow: the run {why} {where}"
            if failures >= SAME_STEP_FAILURES:
                times = f"{failures} times in a row"
                self.report(f"{message}, {times}; see log.txt in its folder for the reason")
                return code
            if restarts >= self.max_restarts:
                self.report(f"{message}, and trainer.max_restarts={self.max_restarts} is used up")
                return code
            restarts += 1
            pause = min(self.first_pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
            self.report(f"{message}; restart {restarts} of {self.max_restarts} in {pause:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_requested.wait(), pause)
                return code

    async def _run_once(self) -> tuple[int, str]:
        """Run the child once; return its exit code, and in words how it ended."""
        reader, writer = os.pipe()
        lines = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reader, "rb")
        )
        try:
            child = self._child = await asyncio.create_subprocess_exec(
                *self.command(writer, self.folder), pass_fds=(writer,), process_group=0
            )
        finally:
            os.close(writer)
        if self._stop_requested.is_set():  # while there was no child to tell
            child.terminate()
        try:
            while line := await asyncio.wait_for(lines.readline(), self.stall_timeout_s):
                self._read_line(line.decode().rstrip("\n"))
            await asyncio.wait_for(child.wait(), _END_S)
        except TimeoutError:
            pass
        finally:
            has_hung = not lines.at_eof()
            pipe.close()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        status = await child.wait()
        self._child = None
        if has_hung:
            return 128 + signal.SIGKILL, f"made no progress for {self.stall_timeout_s:g} s"
        if status < 0:
            return 128 - status, f"was killed by {signal.Signals(-status).name}"
        return status, f"ended with exit code {status}"

    def _read_line(self, line: str) -> None:
        kind, _, value = line.partition(" ")
        if kind == "folder":
            self.folder = value
        elif kind == "step":
            self._step = max(self._step, int(value))

    def _forward_signal(self, number: int) -> None:
        self._stop_requested.set()
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)


def winnow_command(arguments: Sequence[str]) -> Callable[[int, str | None], list[str]]:
    """Make the command line of a child from the words after `winnow train`."""

    def command(pipe: int, folder: str | None) -> list[str]:
        continued = [] if folder is None else ["--continued", folder]
        start = [sys.executable, "-m", "winnow.cli.main", "train", "--heartbeat", str(pipe)]
        return [*start, "--parent", str(os.getpid()), *continued, *arguments]

    return command


class Heartbeat:
    """The sink that tells a supervising parent of progress; without a pipe it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._readings: list[Callable[[], object]] = []
        self._beats = 0
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            threading.Thread(target=self._run, daemon=True).start()

    def send_folder(self, path: Path) -> None:
        """Tell the run's folder, which a restart continues."""
        self._write(f"folder {path.absolute()}")

    def watch(self, *readings: Callable[[], object]) -> None:
        """Count a change of what these return as progress, in the place of those before; they are
        called from another thread."""
        self._readings = [*readings]

    def beat(self) -> None:
        """Note that something moved."""
        self._beats += 1

    def start(self, info: RunInfo) -> None:
        """Tell the step before the first."""
        self._write(f"step {info.first_step - 1}")

    def log(self, step: int, record: Record) -> None:
        """Tell a step that is done."""
        self._write(f"step {step}")

    def close(self) -> None:
        """Do nothing: counters are watched to the end of the process."""

    def _run(self) -> None:
        seen: list[object] = []
        while True:
            time.sleep(_BEAT_S)
            now = [self._beats, *(reading() for reading in self._readings)]
            if now != seen:
                seen = now
                self._write("beat")

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # the parent is gone, and this process is told
            os.write(self._descriptor, f"{line}\n".encode())
