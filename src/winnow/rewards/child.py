"""The pool's end of one worker process: what it was sent, what it says, how it ended."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from winnow.rewards.wire import Job, Reply, Unpacker, pack

log = logging.getLogger(__name__)

KEPT_OUTPUT_BYTES = 4096
_READ_BYTES = 1 << 18
_PIPE_BYTES = 1 << 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# One core a worker; and sets of strings are in the same order in each of them.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(eq=False)
class Child:
    """One worker process. Nothing here blocks but `end`, for the moment a killed process takes.

    The process leads a session of its own: a terminal's Ctrl-C does not reach it, and what it
    started is killed with it.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    output: int
    """Where its standard output and error come out, and are kept from the terminal."""
    born: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_async: bool = False
    is_retiring: bool = False
    is_alone: bool = False
    """It has, or had, an item that is to have the process to itself."""
    refusal: str | None = None
    """Why the user's file cannot be used."""
    sent: dict[int, float] = field(default_factory=dict)
    """Items it has, by id in the order sent, with the time from which each may be under way."""
    batch_began: float = 0.0
    batch_size: int = 0
    printed: bytes = b""
    printed_bytes: int = 0
    _unsent: bytearray = field(default_factory=bytearray)
    _unpacker: Unpacker = field(default_factory=Unpacker)

    @classmethod
    def start(cls, job: Job) -> Child:
        """A new process, about to load what scores.

        Call it from a thread that lives as long as the process may: Linux kills the process
        when that thread ends.
        """
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        with theirs:
            command = [sys.executable, "-P", "-m", "winnow.rewards.worker"]
            try:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**os.environ, **_ENVIRONMENT},
                )
            finally:
                os.close(writer)
        ours.setblocking(False)
        os.set_blocking(reader, False)
        with suppress(OSError):  # more than this user may have: the usual size does
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        child = cls(process, ours, reader)
        child._unsent += pack(job)
        child.flush()
        return child

    def send(self, items: Mapping[int, bytes]) -> None:
        """Queue packed items to go out."""
        if not items:
            return
        now = time.monotonic()
        if not self.sent:
            self.batch_began, self.batch_size = now, 0
        self.batch_size += len(items)
        for number, packed in items.items():
            self.sent[number] = now
            self._unsent += packed

    def flush(self) -> bool:
        """Send what the socket takes; False when something is left."""
        if self._unsent:
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                del self._unsent[: self.socket.send(self._unsent)]
        return not self._unsent

    def read(self) -> list[Reply] | None:
        """What it has said since the last time; None when it is gone."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            return None
        return list(self._unpacker.feed(data)) if data else None

    def answered(self, number: int) -> bool:
        """Take an item off; False when it was not there. The next one's time begins."""
        if self.sent.pop(number, None) is None:
            return False
        if self.sent and not self.is_async:
            head = next(iter(self.sent))
            self.sent[head] = time.monotonic()
        return True

    def deadline(self, timeout_s: float, grace_s: float) -> float:
        """When the item in work has had its time; that of the oldest of an async function's."""
        return next(iter(self.sent.values())) + timeout_s + (grace_s if self.is_async else 0.0)

    def read_output(self) -> bool:
        """Drain what its scorers print, keeping the beginning; False at the end."""
        try:
            data = os.read(self.output, _PIPE_BYTES)
        except BlockingIOError:
            return True
        self.printed += data[: KEPT_OUTPUT_BYTES - len(self.printed)]
        self.printed_bytes += len(data)
        return bool(data)

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM; 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def has_ended(self) -> bool:
        """Whether the process is over; it is not reaped yet."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self) -> None:
        """End the process and all that it started, now."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Hang up; an idle process then ends by itself."""
        self.socket.close()

    def end(self, patience_s: float) -> int | None:
        """See the process end, and clean up after it.

        Args:
            patience_s: how long it may take to end by itself; then it is killed.

        Returns:
            Its exit code, or -N after signal N; None when it did not end by itself in time.
        """
        give_up = time.monotonic() + patience_s
        while not self.has_ended() and time.monotonic() < give_up:
            time.sleep(0.002)
        # Before it is reaped: until then no stranger can have its number.
        had_ended = self.has_ended()
        self.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that the kernel holds on to
            self.process.wait(5.0)
        for _ in range(4):
            if not self.read_output():
                break
        os.close(self.output)
        if self.printed:
            log.info(
                "a scorer's process wrote %d bytes to its output; it begins with: %s",
                self.printed_bytes,
                self.output_text,
                extra={"printed": self.printed.decode(errors="replace")},
            )
        return self.process.returncode if had_ended else None

    @property
    def output_text(self) -> str:
        """The beginning of what was printed."""
        return self.printed.decode(errors="replace").rstrip()


def ending_in_words(code: int | None) -> str:
    """How a process ended by itself."""
    if code is None:
        return "cut its connection"
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
