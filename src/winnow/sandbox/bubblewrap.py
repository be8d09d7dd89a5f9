"""Programs in namespaces of their own, made by `bwrap` (bubblewrap).

A program sees /usr read-only, a small folder in memory and a few devices; it has no network, no
/proc, no other process to see or signal. Resource limits are set inside, where the process limit
counts the program's own namespace (Linux 5.14 and newer). `bwrap` is process 1 there: when it
ends, the kernel ends all that is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from contextlib import ExitStack, suppress
from functools import partial

from winnow.sandbox.interpreter import Interpreter
from winnow.sandbox.process import Started, memory_file, run
from winnow.sandbox.program import Limits, Program, Result, SandboxError, Slot
from winnow.sandbox.seccomp import filter_bytes

FOLDER = "/tmp"
MAIN = "main.py"
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Bubblewrap:
    """Starts programs under bwrap.

    Raises:
        SandboxError: a part is missing.
    """

    name = "bubblewrap"

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        # A list of folders of ours: the environment's PATH may hold anything.
        self._bwrap = _tool("bwrap", "bubblewrap")
        self._prlimit = _tool("prlimit", "util-linux")
        self._setpriv = _tool("setpriv", "util-linux")
        seccomp = filter_bytes()
        if seccomp is None:
            raise SandboxError(f"there is no system call filter for {os.uname().machine}")
        self._seccomp = seccomp

    def run(self, program: Program, limits: Limits, slot: Slot, closing: threading.Event) -> Result:
        """Run a program.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        with ExitStack() as stack:

            def hand_over(name: str, data: bytes) -> int:
                descriptor = memory_file(name, data)
                stack.callback(os.close, descriptor)
                return descriptor

            status, writer = os.pipe()
            stack.callback(os.close, status)
            close_writer = stack.enter_context(ExitStack())
            close_writer.callback(os.close, writer)
            files = {MAIN: program.code.encode("utf-8", "surrogatepass"), **program.files}
            handed = {name: hand_over(name, data) for name, data in files.items()}
            filter_ = hand_over("seccomp", self._seccomp)
            command = self._command(limits, slot, handed, filter_, writer)
            descriptors = [*handed.values(), filter_, writer]
            stop = partial(_kill_group)
            result = run(Started(command, descriptors, stop), program.stdin, limits, closing)
            close_writer.close()
            said = _read_all(status)
        if b'"child-pid"' not in said:
            reason = " ".join(result.stderr.decode(errors="replace").split())
            raise SandboxError(
                f"bwrap could not set the sandbox up ({result.ending}): {reason[:300]}"
            )
        # bwrap reports a death by signal N as a shell does.
        code = result.exit_code
        return result if code <= 128 else Result(**{**vars(result), "exit_code": 128 - code})

    def _command(
        self, limits: Limits, slot: Slot, files: dict[str, int], seccomp: int, status: int
    ) -> list[str]:
        drop = []
        if slot.uid is not None:
            who = str(slot.uid)
            drop = [self._setpriv, "--reuid", who, "--regid", who, "--clear-groups", "--"]
        view = ["--ro-bind", "/usr", "/usr"]
        for link in _LINKS:
            if os.path.islink(f"/{link}"):
                view += ["--symlink", os.readlink(f"/{link}"), f"/{link}"]
            elif os.path.isdir(f"/{link}"):
                view += ["--ro-bind", f"/{link}", f"/{link}"]
        view += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
        view += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
        view += ["--dev", "/dev", "--size", str(limits.scratch_bytes), "--tmpfs", FOLDER]
        for folder in self._interpreter.folders_outside_usr:
            view += ["--ro-bind", folder, folder]
        for name, descriptor in files.items():
            view += ["--perms", "0644", "--file", str(descriptor), f"{FOLDER}/{name}"]
        return [
            *drop, self._bwrap,
            "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
            "--cap-drop", "ALL", "--hostname", "sandbox",
            *view, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER,
            "--seccomp", str(seccomp), "--json-status-fd", str(status), "--",
            self._prlimit, f"--as={limits.memory_bytes}", f"--cpu={limits.cpu_s}",
            f"--nproc={limits.processes}", f"--nofile={limits.open_files}",
            f"--fsize={limits.scratch_bytes}", "--core=0", "--msgqueue=0", "--memlock=0", "--",
            self._interpreter.path, "-s", f"{FOLDER}/{MAIN}",
        ]  # fmt: skip


def _tool(name: str, package: str) -> str:
    path = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        raise SandboxError(f"{name} is not installed (Debian's package {package})")
    return path


def _kill_group(process: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 4096):
        parts.append(part)
    return b"".join(parts)
