"""Programs in separate namespaces, made by `bwrap` (bubblewrap).

A program sees /usr read-only, a small folder in memory and a few devices; it has no network, no
/proc, no other process to see or signal. Resource limits are set inside, where the process limit
counts the program's own namespace (Linux 5.14 and newer). `bwrap` is process 1 there: when it
ends, the kernel ends all that is left.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from contextlib import ExitStack, suppress

from winnow.config.reward import SandboxConfig
from winnow.sandbox.process import Confinement, Interpreter, memory_file, process_limits
from winnow.sandbox.program import MAIN, Program, Result, SandboxError
from winnow.sandbox.seccomp import filter_bytes

FOLDER = "/tmp"
_CHILD = re.compile(rb'"child-pid": *(\d+)')
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


class Bubblewrap:
    """Starts programs under bwrap.

    Args:
        closing: ends what runs.

    Raises:
        SandboxError: a part is missing.
    """

    name = "bubblewrap"

    def __init__(self, interpreter: Interpreter, closing: threading.Event) -> None:
        self._interpreter, self._closing = interpreter, closing
        # A list of folders of ours: the environment's PATH may hold anything.
        self._bwrap = _find_tool("bwrap", "bubblewrap")
        self._prlimit = _find_tool("prlimit", "util-linux")
        self._setpriv = _find_tool("setpriv", "util-linux")
        self._choom = _find_tool("choom", "util-linux")
        self._seccomp = filter_bytes()

    def run(self, program: Program, limits: SandboxConfig, uid: int | None) -> Result:
        """Run a program.

        Args:
            uid: unprivileged user that it runs as; None keeps ours, which is one already.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(memory_file(name, data)).fileno()
                for name, data in program.all_files.items()
            }
            seccomp = stack.enter_context(memory_file("seccomp", self._seccomp)).fileno()
            status, writer = os.pipe()
            stack.callback(os.close, status)
            stack.callback(os.close, writer)
            command = self._command(limits, uid, files, seccomp, writer)
            descriptors = [*files.values(), seccomp, writer]
            report = _BwrapStatus(status, limits.scratch_mb << 20)
            confined = Confinement(command, descriptors, signal.SIGKILL, report.count_files)
            result = confined.run(program.stdin, limits, self._closing)
            has_begun = report.child_pid() is not None
        if not has_begun:
            reason = " ".join(result.stderr.decode(errors="replace").split())
            raise SandboxError(
                f"bwrap could not set the sandbox up ({result.ending}): {reason[:300]}"
            )
        return result

    def _command(
        self,
        limits: SandboxConfig,
        uid: int | None,
        files: dict[str, int],
        seccomp: int,
        status: int,
    ) -> list[str]:
        # Where memory runs out, the kernel is to end a program and not the trainer.
        drop = [self._choom, "-n", "1000", "--"]
        if uid is not None:
            who = str(uid)
            drop += [self._setpriv, "--reuid", who, "--regid", who, "--clear-groups", "--"]
        view = ["--ro-bind", "/usr", "/usr"]
        for link in _LINKS:
            if os.path.islink(f"/{link}"):
                view += ["--symlink", os.readlink(f"/{link}"), f"/{link}"]
            elif os.path.isdir(f"/{link}"):
                view += ["--ro-bind", f"/{link}", f"/{link}"]
        for path in ("/etc/ld.so.cache", "/etc/alternatives"):
            view += ["--ro-bind-try", path, path]
        view += ["--dev", "/dev", "--size", str(limits.scratch_mb << 20), "--tmpfs", FOLDER]
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
            self._prlimit, *(f"--{name}={n}" for name, n in process_limits(limits).items()), "--",
            self._interpreter.path, "-s", f"{FOLDER}/{MAIN}",
        ]  # fmt: skip


def _find_tool(name: str, package: str) -> str:
    path = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin")
    if path is None:
        raise SandboxError(f"{name} is not installed (Debian's package {package})")
    return path


class _BwrapStatus:
    """Reads what bwrap reports of the process that it has started."""

    def __init__(self, descriptor: int, scratch_bytes: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._output, self._scratch_bytes = descriptor, b"", scratch_bytes

    def child_pid(self) -> int | None:
        """The process id of the program; None while it has not begun."""
        with suppress(BlockingIOError):
            while part := os.read(self._descriptor, 4096):
                self._output += part
        match = _CHILD.search(self._output)
        return int(match.group(1)) if match else None

    def count_files(self) -> int:
        """Count the files and folders in the program's scratch folder.

        bwrap cannot bound the inodes of a tmpfs, so they are counted from outside.
        """
        child = self.child_pid()
        if child is None:
            return 0
        try:
            scratch = os.statvfs(f"/proc/{child}/root{FOLDER}")
        except OSError:  # it has ended
            return 0
        # Until its root is in place, the program's process still has that of this machine.
        is_mounted = scratch.f_blocks * scratch.f_frsize < self._scratch_bytes + scratch.f_frsize
        return scratch.f_files - scratch.f_ffree if is_mounted else 0
