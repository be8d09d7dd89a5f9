"""Runs one sandboxed process to its end: its output is kept, its time and output are limited."""

from __future__ import annotations

import fcntl
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from winnow.sandbox.program import OUTPUT_LIMIT, Ending, Limits, Result, SandboxError

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


@dataclass(frozen=True)
class Started:
    """A command to start, and the way to end it with all that it has started."""

    command: Sequence[str]
    descriptors: Sequence[int]
    """Descriptors that it inherits."""
    stop: Callable[[int], None]
    """Given its process id; called at most once, before it is reaped."""
    files: Callable[[], int] = lambda: 0
    """Counts the files that it has made so far."""


def run(started: Started, stdin: bytes, limits: Limits, closing: threading.Event) -> Result:
    """Run to the end, or to a limit, or until `closing` is set.

    Raises:
        SandboxError: the process cannot be started, does not end when it is killed, or the
            sandbox is being closed.
    """
    began = time.monotonic()
    source = memory_file("stdin", stdin)
    try:
        process = subprocess.Popen(
            started.command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=started.descriptors,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{started.command[0]} cannot be started: {error}") from error
    finally:
        os.close(source)
    kept: dict[int, bytearray] = {}
    ending: Ending = "finished"
    try:
        ending = _drain(process, kept, began + limits.time_s, limits, started.files, closing)
        if ending == "finished" and not _has_ended(process, began + limits.time_s):
            ending = "time_limit"
    finally:
        if ending != "finished" or process.poll() is None:
            started.stop(process.pid)
        _reap(process)
    out, err = (bytes(each) for each in kept.values())
    return Result(ending, process.returncode, out, err, time.monotonic() - began)


def told_as_by_a_shell(result: Result) -> Result:
    """Undo the code 128 + N of a process that reports a death by signal N as a shell does."""
    code = result.exit_code
    return result if code <= 128 else replace(result, exit_code=128 - code)


def memory_file(name: str, data: bytes) -> int:
    """A descriptor at the beginning of `data`, which nobody can change or make longer."""

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)  # SEAL, SHRINK, GROW, WRITE
    return descriptor


def _drain(
    process: subprocess.Popen[bytes],
    kept: dict[int, bytearray],
    until: float,
    limits: Limits,
    files: Callable[[], int],
    closing: threading.Event,
) -> Ending:
    """Read both outputs to their ends into `kept`, standard output first."""
    assert process.stdout is not None
    assert process.stderr is not None
    left, next_look = limits.output_bytes, 0.0
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            kept[stream.fileno()] = bytearray()
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            patience = until - time.monotonic()
            if patience <= 0:
                return "time_limit"
            if closing.is_set():
                raise SandboxError("the sandbox is closed")
            if (now := time.monotonic()) >= next_look:
                next_look = now + _LOOK_S
                if files() > limits.files:
                    return OUTPUT_LIMIT
            for key, _ in selector.select(min(patience, _LOOK_S)):
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                kept[key.fd] += data[:left]
                left -= len(data)
                if left < 0:
                    return OUTPUT_LIMIT
    return "finished"


def _has_ended(process: subprocess.Popen[bytes], until: float) -> bool:
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"process {process.pid} cannot be ended") from error
    finally:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
