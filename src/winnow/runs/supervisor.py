"""Supervision of a run: a parent without torch, that starts it again when it dies or hangs.

The child is the same command with a pipe on which it tells of progress (`Heartbeat`), a line when
something has moved since the last one: tokens, updates, steps. A run that hangs writes nothing,
however busy it looks. The lines are `folder PATH`, `step N`, `beat`.
It has a process group of its own, so that Ctrl-C reaches it once, through the parent, and that
whatever it started can be ended with it.

| the child | the parent |
|---|---|
| ends with 0, 2, 75 or 130: done, a user's mistake, stopped | ends with the same code |
| is killed by a signal, or ends with another code: crashed | starts it again, after a pause |
| tells of no progress for `trainer.stall_timeout_s` | kills it and starts it again |
| fails three times without a step in between | gives up with its code |
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from winnow.observe.metrics import Record
from winnow.observe.sinks import RunInfo

ENDS = frozenset({0, 2, 75, 130})
"""Exit codes after which there is nothing to restart."""
SAME_STEP_FAILURES = 3
_LONGEST_PAUSE_S = 60.0
_BEAT_S = 0.5
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Supervisor:
    """One run and its restarts.

    Args:
        command: starts the run, given the descriptor of the pipe and the folder to continue.
        max_restarts: in all.
        stall_timeout_s: without a line on the pipe.
        first_pause_s: before the first restart; doubles with each failure at the same step.
        say: tells the user a line.
        folder: the run to continue; None begins with what the command says.
    """

    command: Callable[[int, str | None], Sequence[str]]
    max_restarts: int
    stall_timeout_s: float
    first_pause_s: float = 1.0
    say: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr))
    folder: str | None = None
    _child: subprocess.Popen[bytes] | None = None
    _step: int = -1
    _asked: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Run to the end; return the exit code, 128 + N for a run that signal N killed."""
        restarts = failures = 0
        reached = self._step
        with self._forwarding():
            while True:
                code, why = self._run_once()
                if self._is_stopping() or code in ENDS:
                    return code
                failures = failures + 1 if self._step == reached else 1
                reached = self._step
                where = f"after step {self._step}" if self._step >= 0 else "before its first step"
                if failures >= SAME_STEP_FAILURES:
                    self.say(
                        f"winnow: the run {why} {where}, {failures} times in a row; "
                        "see log.txt in its folder for the reason"
                    )
                    return code
                if restarts >= self.max_restarts:
                    self.say(
                        f"winnow: the run {why} {where}, and trainer.max_restarts="
                        f"{self.max_restarts} is used up"
                    )
                    return code
                restarts += 1
                pause = min(self.first_pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
                self.say(
                    f"winnow: the run {why} {where}; restart {restarts} of "
                    f"{self.max_restarts} in {pause:g} s"
                )
                self._pause(pause)
                if self._is_stopping():
                    return code

    def _run_once(self) -> tuple[int, str]:
        """Run the child once; return its exit code, and in words how it ended."""
        reader, writer = os.pipe()
        try:
            child = self._child = subprocess.Popen(
                self.command(writer, self.folder), pass_fds=(writer,), process_group=0
            )
        finally:
            os.close(writer)
        if self._is_stopping():  # asked for while there was no child to tell
            child.terminate()
        try:
            has_hung = not self._listen(reader)
        finally:
            os.close(reader)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if child.poll() is None:
                    # Closed its pipe or hangs: either way there is no more to wait for.
                    self._await_end(child)
                os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
        self._child = None
        if has_hung:
            return 128 + signal.SIGKILL, f"made no progress for {self.stall_timeout_s:g} s"
        if status < 0:
            return 128 - status, f"was killed by {signal.Signals(-status).name}"
        return status, f"ended with exit code {status}"

    def _await_end(self, child: subprocess.Popen[bytes]) -> None:
        """Wait for a child whose pipe is closed, and kill one that does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)
            return
        os.killpg(child.pid, signal.SIGKILL)

    def _listen(self, reader: int) -> bool:
        """Follow the child to its end; return False if it tells of no progress for too long."""
        rest = b""
        last = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while True:
                left = last + self.stall_timeout_s - time.monotonic()
                if left <= 0:
                    self._kill()
                    return False
                if not selector.select(min(left, 1.0)):
                    continue
                data = os.read(reader, 65536)
                if not data:
                    return True
                last = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _is_stopping(self) -> bool:
        """Return whether a signal asked this process to end; it may come at any time."""
        return bool(self._asked)

    def _take(self, line: str) -> None:
        kind, _, value = line.partition(" ")
        if kind == "folder":
            self.folder = value
        elif kind == "step":
            self._step = max(self._step, int(value))

    def _kill(self) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_stopping() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in _FORWARDED}
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in taken:
            signal.signal(number, self._forward)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)


def winnow_command(arguments: Sequence[str]) -> Callable[[int, str | None], list[str]]:
    """Make the command line of a child from the words after `winnow train`."""

    def command(pipe: int, folder: str | None) -> list[str]:
        more = [] if folder is None else ["--continued", folder]
        start = [sys.executable, "-m", "winnow.cli.main", "train", "--heartbeat", str(pipe), *more]
        return [*start, *arguments]

    return command


class Heartbeat:
    """The sink that tells a supervising parent of progress; without a pipe it does nothing."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._readings: list[Callable[[], object]] = []
        self._beats = 0
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
            threading.Thread(target=self._run, args=(os.getppid(),), daemon=True).start()

    def folder(self, path: Path) -> None:
        """Tell the run's folder, which a restart continues."""
        self._write(f"folder {path.absolute()}")

    def watch(self, reading: Callable[[], object]) -> None:
        """Count a change of what `reading` returns as progress; called from another thread."""
        self._readings.append(reading)

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

    def _run(self, parent: int) -> None:
        seen: list[object] = []
        while True:
            time.sleep(_BEAT_S)
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
