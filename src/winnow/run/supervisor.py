"""A supervised run: a parent process restarts it after a crash or a hang (`shutdown`)."""

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
from winnow.observe.sinks import RunInfo, Sink
from winnow.run.shutdown import _HEARTBEAT_S, EXIT_INTERRUPTED, EXIT_TERMINATED, stop_signals

FINAL_EXIT_CODES = frozenset({0, 2, EXIT_TERMINATED, EXIT_INTERRUPTED})
"""Exit codes after which a run is not restarted."""


SAME_STEP_FAILURES = 3


_LONGEST_PAUSE_S = 60.0


_EXIT_TIMEOUT_S = 5.0
"""Time for a child to exit after it closed its pipe."""


@dataclass
class Supervisor:
    """Starts a run, and restarts it after crashes and hangs.

    Args:
        command: returns the command line, given the descriptor of the pipe and the folder to
            continue.
        max_restarts: in total.
        stall_timeout_s: time without a line on the pipe after which the run is killed.
        first_pause_s: before the first restart; doubles with each failure at the same step.
        report: prints a line for the user.
        folder: the run to continue; None starts what the command names.
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
        """Run to the end; return the exit code, 128 + N after signal N."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._forward_signal, number)
        restarts = failures = 0
        while True:
            before = self._step
            code, why = await self._run_once()
            if self._stop_requested.is_set() or code in FINAL_EXIT_CODES:
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
        """Run the child once; return its exit code and a description of its end."""
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
        if self._stop_requested.is_set():  # before there was a child to forward it to
            child.terminate()
        try:
            while line := await asyncio.wait_for(lines.readline(), self.stall_timeout_s):
                self._read_line(line.decode().rstrip("\n"))
            await asyncio.wait_for(child.wait(), _EXIT_TIMEOUT_S)
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


def make_child_command(arguments: Sequence[str]) -> Callable[[int, str | None], list[str]]:
    """Return the `command` of a `Supervisor`, from the arguments of `winnow train`."""

    def command(pipe: int, folder: str | None) -> list[str]:
        continued = [] if folder is None else ["--continued", folder]
        start = [sys.executable, "-m", "winnow.cli.main", "train", "--heartbeat", str(pipe)]
        return [*start, "--parent", str(os.getpid()), *continued, *arguments]

    return command


class Heartbeat(Sink):
    """The sink that reports progress to a supervising parent, to the end of the process; without a
    pipe it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._readings: list[Callable[[], object]] = []
        self._beats = 0
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            threading.Thread(target=self._run, daemon=True).start()

    def send_folder(self, path: Path) -> None:
        """Report the run's folder, which a restart continues."""
        self._write(f"folder {path.absolute()}")

    def watch_counters(self, *readings: Callable[[], object]) -> None:
        """Report a change of these values as progress, instead of earlier ones; they are read in
        another thread."""
        self._readings = [*readings]

    def beat(self) -> None:
        """Report progress."""
        self._beats += 1

    def start(self, info: RunInfo) -> None:
        """Report the step before the first."""
        self._write(f"step {info.first_step - 1}")

    def log(self, step: int, record: Record) -> None:
        """Report a completed step."""
        self._write(f"step {step}")

    def _run(self) -> None:
        seen: list[object] = []
        while True:
            time.sleep(_HEARTBEAT_S)
            now = [self._beats, *(reading() for reading in self._readings)]
            if now != seen:
                seen = now
                self._write("beat")

    def _write(self, line: str) -> None:
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):  # the parent is gone
            os.write(self._descriptor, f"{line}\n".encode())
