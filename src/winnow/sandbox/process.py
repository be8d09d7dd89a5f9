"""One confined process run to its end, and the Python that runs in it.

The process's output is kept; its time and output are limited.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import IO, BinaryIO

from winnow.config.reward import SandboxConfig
from winnow.sandbox.program import OUTPUT_LIMIT, Ending, Result, SandboxError

_READ_BYTES = 1 << 16
_LOOK_S = 0.1
_STOP_S = 10.0
"""Seconds that a killed process may take to be gone before that is a fault of the sandbox."""

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All that a program finds in its environment."""
_PARTS = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, "
    "sys.base_exec_prefix, *sys.version_info[:2]]))"
)
_COMPILE = (
    "import marshal, sys; read = sys.stdin.buffer.read; "
    "sys.stdout.buffer.write(marshal.dumps(compile(read(), 'main.py', 'exec')))"
)
_OLDEST = (3, 8)
_ASK_S = 30.0


@dataclass(frozen=True)
class Confinement:
    """A command that confines a program, and the way to end it with all that it has started."""

    command: Sequence[str]
    descriptors: Sequence[int]
    """Descriptors that it inherits."""
    stop: signal.Signals
    """Ends the command's process group."""
    count_files: Callable[[], int] = lambda: 0
    """Counts the files that the program has made so far."""

    def run(self, stdin: bytes, limits: SandboxConfig, closing: threading.Event) -> Result:
        """Run to the end, or to a limit, or until `closing` is set.

        Raises:
            SandboxError: the process cannot be started, does not end when it is killed, or the
                sandbox is being closed.
        """
        began = time.monotonic()
        out, err = bytearray(), bytearray()
        ending: Ending | None = None
        (stdout, their_stdout), (stderr, their_stderr) = _pipe(), _pipe()
        with stdout, stderr:
            with memory_file("stdin", stdin) as source, their_stdout, their_stderr:
                try:
                    process = subprocess.Popen(
                        self.command,
                        stdin=source,
                        stdout=their_stdout,
                        stderr=their_stderr,
                        pass_fds=self.descriptors,
                        env=dict(ENVIRONMENT),
                        cwd="/",
                        start_new_session=True,
                    )
                except OSError as error:
                    raise SandboxError(f"{self.command[0]} cannot be started: {error}") from error
            try:
                outputs: dict[IO[bytes], bytearray] = {stdout: out, stderr: err}
                ending = self._read_outputs(outputs, began + limits.time_s, limits, closing)
                if ending == "finished":
                    process.wait(max(0.0, began + limits.time_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                ending = "time_limit"
            finally:
                if process.returncode is None:
                    self._kill(process)
        code = process.returncode
        if code > 128:  # as a shell reports that its child died by a signal
            code = 128 - code
        return Result(ending, code, bytes(out), bytes(err), time.monotonic() - began)

    def _read_outputs(
        self,
        outputs: Mapping[IO[bytes], bytearray],
        until: float,
        limits: SandboxConfig,
        closing: threading.Event,
    ) -> Ending:
        """Read both outputs to their ends."""
        remaining, next_look = limits.output_kb << 10, 0.0
        # Each file takes memory that no limit counts.
        most_files = max(1000, limits.scratch_mb << 8)
        with selectors.DefaultSelector() as selector:
            for stream, buffer in outputs.items():
                selector.register(stream, selectors.EVENT_READ, buffer)
            while selector.get_map():
                now = time.monotonic()
                if now >= until:
                    return "time_limit"
                if closing.is_set():
                    raise SandboxError("the sandbox is closed")
                if now >= next_look:
                    next_look = now + _LOOK_S
                    if self.count_files() > most_files:
                        return OUTPUT_LIMIT
                for key, _ in selector.select(min(until - now, _LOOK_S)):
                    data = os.read(key.fd, _READ_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    key.data.extend(data[:remaining])
                    remaining -= len(data)
                    if remaining < 0:
                        return OUTPUT_LIMIT
        return "finished"

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        # Not reaped yet, so its number is still its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, self.stop)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"process {process.pid} cannot be killed") from error


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """Return the two ends of a pipe that cannot be opened anew through /proc/PID/fd.

    Under Landlock a solution sees the process of its tests there, which prints the verdict.
    """
    reader, writer = os.pipe()
    os.fchmod(reader, 0)  # the system call filter lets no program change it back
    return open(reader, "rb", 0), open(writer, "wb", 0)


def process_limits(limits: SandboxConfig) -> dict[str, int]:
    """Return the limits of `setrlimit` for each process, by their names in small letters."""
    return {
        "as": limits.memory_mb << 20,
        "cpu": int(limits.time_s) + 2,  # a second line behind the wall clock
        "nproc": limits.processes,
        "nofile": limits.open_files,
        "fsize": limits.scratch_mb << 20,
        "core": 0,
        "msgqueue": 0,
        "memlock": 0,
    }


def memory_file(name: str, data: bytes) -> BinaryIO:
    """Return a file at the beginning of `data`, which nobody can change or make longer."""
    file = open(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(data)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0xF)  # SEAL, SHRINK, GROW, WRITE
    return file


@dataclass(frozen=True)
class Interpreter:
    """A Python that runs programs, and the folders that it needs."""

    path: str
    folders_outside_usr: tuple[str, ...]


def find_interpreter(path: str) -> Interpreter:
    """Ask an interpreter for its parts.

    Raises:
        SandboxError: it is missing, is no Python, or is too old.
    """
    where = f"reward.sandbox.python is {path}"
    file = os.path.expanduser(path)
    if not os.path.isabs(file) or not os.access(file, os.X_OK) or os.path.isdir(file):
        raise SandboxError(f"{where}: no such program; give the absolute path of a Python")
    try:
        executable, prefix, base, base_exec, *version = json.loads(_run_interpreter(file, _PARTS))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"{where}: not a Python ({type(error).__name__})") from error
    if tuple(version) < _OLDEST:
        release = ".".join(map(str, version))
        raise SandboxError(f"{where}: Python {release}, but 3.8 or newer is required")
    real = os.path.realpath(executable)
    needed = {prefix, base, base_exec, os.path.dirname(executable), os.path.dirname(real)}
    outside = {os.path.abspath(folder) for folder in needed if not _is_below(folder, "/usr")}
    outside -= {"/bin"}  # a link into /usr, or bound as it is
    if "/" in outside:
        raise SandboxError(f"{where}: its library is in /; give one in /usr or another folder")
    tops = [f for f in outside if not any(f != other and _is_below(f, other) for other in outside)]
    return Interpreter(executable, tuple(sorted(tops)))


@cache
def precompile(python: str, code: str) -> bytes:
    """Compile Winnow's code once, as an interpreter loads it with `marshal`; it is not run.

    Raises:
        SandboxError: it cannot be compiled.
    """
    try:
        return _run_interpreter(python, _COMPILE, code.encode())
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{python} cannot compile ({type(error).__name__})") from error


def _run_interpreter(python: str, code: str, stdin: bytes = b"") -> bytes:
    """Return what an interpreter prints outside of any sandbox, for Winnow's code."""
    return subprocess.run(
        [python, "-I", "-c", code],
        input=stdin,
        env=dict(ENVIRONMENT),
        capture_output=True,
        timeout=_ASK_S,
        check=True,
    ).stdout


def _is_below(folder: str, top: str) -> bool:
    return os.path.commonpath([os.path.abspath(folder), top]) == top
