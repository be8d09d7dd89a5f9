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
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from winnow.config.reward import SandboxConfig
from winnow.sandbox.process import Confinement, Interpreter, memory_file, precompile, process_limits
from winnow.sandbox.program import MAIN, Program, Result, SandboxError
from winnow.sandbox.seccomp import filter_bytes

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

    Args:
        closing: ends what runs.

    Raises:
        SandboxError: the kernel lacks a part.
    """

    name = "landlock"

    def __init__(self, interpreter: Interpreter, closing: threading.Event) -> None:
        self._interpreter, self._closing = interpreter, closing
        # The kernel's version of Landlock; 0 or less where it has none.
        libc = ctypes.CDLL(None, use_errno=True)
        self._abi = int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1))
        if self._abi < _LEAST_ABI:
            had = f"has version {self._abi}" if self._abi > 0 else "is off"
            raise SandboxError(f"Landlock {had}; version {_LEAST_ABI} (Linux 6.2) is needed")
        self._seccomp = filter_bytes()
        self._guardian = shutil.which("python3", path="/usr/bin") or sys.executable
        self._code = precompile(self._guardian, _CONFINE.read_text(encoding="utf-8"))

    def run(self, program: Program, limits: SandboxConfig, uid: int | None) -> Result:
        """Run a program.

        Args:
            uid: unprivileged user that it runs as; None keeps ours, which is one already.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        with ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="winnow-sandbox-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            _write_files(Path(folder), program.all_files)
            ends = os.pipe()
            status = stack.enter_context(open(ends[0], "rb", 0))
            writer = stack.enter_context(open(ends[1], "wb", 0))
            plan = self._plan(limits, uid, folder, writer.fileno())
            handed = [
                stack.enter_context(memory_file(name, data)).fileno()
                for name, data in (("plan", plan), ("guardian", self._code))
            ]
            command = [self._guardian, "-I", "-S", "-B", "-c", _LOAD, *map(str, handed)]
            # At SIGTERM the guardian kills the program and what it started, then ends.
            confined = Confinement(command, [*handed, writer.fileno()], signal.SIGTERM)
            result = confined.run(program.stdin, limits, self._closing)
            writer.close()
            reply = status.read(4096)
        if reply != b"confined":
            reason = " ".join(reply.decode(errors="replace").split()) or result.ending
            raise SandboxError(f"Landlock could not set the sandbox up: {reason[:300]}")
        return result

    def _plan(self, limits: SandboxConfig, uid: int | None, folder: str, status: int) -> bytes:
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
            "limits": process_limits(limits),
            "seccomp": self._seccomp,
            "status": status,
            "uid": uid,
            "parent": os.getpid(),
        }
        return marshal.dumps(plan, _MARSHAL)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files that every user may read; their names are plain."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
