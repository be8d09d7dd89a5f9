"""Programs confined by Landlock, seccomp and resource limits: where namespaces are blocked.

A program may read /usr and its own files and write nothing; it has no network and no signals
(seccomp). It still sees that processes and files of others exist, and nothing of what they hold.
Each runs under a guardian, `confine.py`, that ends what the program leaves behind.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from winnow.sandbox.interpreter import Interpreter, compiled
from winnow.sandbox.process import Started, memory_file, run, told_as_by_a_shell
from winnow.sandbox.program import Limits, Program, Result, SandboxError, Slot
from winnow.sandbox.seccomp import filter_bytes

MAIN = "main.py"
_CONFINE = Path(__file__).with_name("confine.py")
_READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LANDLOCK_CREATE_RULESET = 444
_LOAD = "import marshal, sys; exec(marshal.loads(open(int(sys.argv[2]), 'rb').read()))"
_MARSHAL = 2
"""A version that every Python 3 reads: the guardian's may be another than ours."""
_LEAST_ABI = 3
"""Oldest version that is used: before it, a file could be truncated without the right to write."""


class Landlock:
    """Starts programs under Landlock.

    Raises:
        SandboxError: the kernel lacks a part.
    """

    name = "landlock"

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._abi = landlock_abi()
        if self._abi < _LEAST_ABI:
            had = f"has version {self._abi}" if self._abi > 0 else "is off"
            raise SandboxError(f"Landlock {had}; version {_LEAST_ABI} (Linux 6.2) is needed")
        seccomp = filter_bytes()
        if seccomp is None:
            raise SandboxError(f"there is no system call filter for {os.uname().machine}")
        self._seccomp = seccomp
        self._guardian = shutil.which("python3", path="/usr/bin") or sys.executable
        self._code = compiled(self._guardian, _CONFINE.read_text(encoding="utf-8"))

    def run(self, program: Program, limits: Limits, slot: Slot, closing: threading.Event) -> Result:
        """Run a program.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        folder = tempfile.mkdtemp(prefix="winnow-sandbox-")
        status, writer = os.pipe()
        try:
            os.chmod(folder, 0o755)
            files = {MAIN: program.code.encode("utf-8", "surrogatepass"), **program.files}
            for name, data in files.items():
                path = Path(folder, name)
                for parent in reversed(path.relative_to(folder).parents[:-1]):
                    Path(folder, parent).mkdir(exist_ok=True)
                    Path(folder, parent).chmod(0o755)
                path.write_bytes(data)
                path.chmod(0o644)
            plan = memory_file("plan", self._plan(limits, slot, folder, writer))
            code = memory_file("guardian", self._code)
            try:
                command = [self._guardian, "-I", "-S", "-B", "-c", _LOAD, str(plan), str(code)]
                started = Started(command, [plan, code, writer], _ask_to_end)
                result = run(started, program.stdin, limits, closing)
            finally:
                os.close(plan)
                os.close(code)
                os.close(writer)
                writer = -1
            said = os.read(status, 4096)
        finally:
            os.close(status)
            if writer >= 0:
                os.close(writer)
            shutil.rmtree(folder, ignore_errors=True)
        if said != b"confined":
            reason = " ".join(said.decode(errors="replace").split()) or result.ending
            raise SandboxError(f"Landlock could not set the sandbox up: {reason[:300]}")
        return told_as_by_a_shell(result)

    def _plan(self, limits: Limits, slot: Slot, folder: str, status: int) -> bytes:
        plan = {
            "abi": self._abi,
            "command": [self._interpreter.path, "-s", f"{folder}/{MAIN}"],
            "folder": folder,
            "readable": [
                path
                for path in (*_READABLE, *self._interpreter.folders_outside_usr, folder)
                if os.path.exists(path)
            ],
            "devices": [path for path in _DEVICES if os.path.exists(path)],
            "limits": {
                "RLIMIT_AS": limits.memory_bytes,
                "RLIMIT_CPU": limits.cpu_s,
                "RLIMIT_NPROC": limits.processes,
                "RLIMIT_NOFILE": limits.open_files,
                "RLIMIT_FSIZE": limits.scratch_bytes,
                "RLIMIT_CORE": 0,
                "RLIMIT_MSGQUEUE": 0,
                "RLIMIT_MEMLOCK": 0,
            },
            "seccomp": self._seccomp.hex(),
            "status": status,
            "uid": slot.uid,
            "parent": os.getpid(),
        }
        return marshal.dumps(plan, _MARSHAL)


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 or less where it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1))


def _ask_to_end(guardian: int) -> None:
    """The guardian kills the program and what it started, then ends."""
    with suppress(ProcessLookupError):
        os.kill(guardian, signal.SIGTERM)
