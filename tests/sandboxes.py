"""A sandbox in a process of its own, as root or as an ordinary user, with either backend."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import struct
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.services import running

from winnow.cli import doctor
from winnow.cli.doctor import Finding
from winnow.config.reward import SandboxConfig
from winnow.http.service import listen, listener_url
from winnow.sandbox.bubblewrap import Bubblewrap
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.process import find_interpreter
from winnow.sandbox.program import Program, Result, SandboxError
from winnow.sandbox.server import SandboxServer

ORDINARY_UID = 61500
"""Of no account, as good as any; systemd gives out the range above 61184 for a moment only."""
USERS = ("root", "ordinary") if os.geteuid() == 0 else ("ordinary",)
BACKENDS = ("bubblewrap", "landlock")
_IS_ROOT = os.geteuid() == 0
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER_NAMESPACE = 0x10000000
_SET_CHILD_SUBREAPER = 36
_LONGEST_S = 120.0
# A process that is forked from this one has whatever threads a library starts again after a fork,
# and who has threads can enter no user namespace.
_FRESH = multiprocessing.get_context("forkserver")
_FRESH.set_forkserver_preload(["tests.sandboxes", "winnow.cli.doctor"])


def need_bubblewrap() -> None:
    """Skip where the package is missing."""
    try:
        Bubblewrap(find_interpreter("/usr/bin/python3"), threading.Event())
    except SandboxError as error:
        pytest.skip(f"{error}; apt-get install bubblewrap")


class Host:
    """A process that holds a sandbox and does as it is told."""

    def __init__(self, user: str, config: SandboxConfig, before: Callable[[], None] | None = None):
        self._pipe, theirs = _FRESH.Pipe()
        self._process = _FRESH.Process(target=_serve, args=(theirs, user, config, before))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        try:
            self.description: str = self.answer()
        except BaseException:
            self.close()
            raise

    def answer(self) -> Any:
        """What it says next."""
        assert self._pipe.poll(_LONGEST_S), "the process that holds the sandbox hangs"
        kind, value = pickle.loads(self._pipe.recv_bytes())
        if kind == "error":
            raise value
        return value

    def ask(
        self, code: str, stdin: bytes = b"", files: Mapping[str, bytes] | None = None, **limits: Any
    ) -> None:
        """Have a program run, and do not wait for it."""
        self._pipe.send_bytes(pickle.dumps((Program(code, stdin, files or {}), limits)))

    def run(
        self, code: str, stdin: bytes = b"", files: Mapping[str, bytes] | None = None, **limits: Any
    ) -> Result:
        """Run a program in its sandbox."""
        self.ask(code, stdin, files, **limits)
        result = self.answer()
        assert isinstance(result, Result)
        return result

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        _end(self._process)


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(_LONGEST_S)
    process.kill()
    process.join()


def _serve(
    pipe: Connection, user: str, config: SandboxConfig, before: Callable[[], None] | None
) -> None:
    try:
        _hold(pipe, user, config, before)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _hold(
    pipe: Connection, user: str, config: SandboxConfig, before: Callable[[], None] | None
) -> None:
    try:
        if before is not None:
            before()
        if user == "ordinary" and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
            os.setresuid(ORDINARY_UID, ORDINARY_UID, ORDINARY_UID)
        sandbox = LocalSandbox(config)
    except Exception as error:
        pipe.send_bytes(pickle.dumps(("error", error)))
        return
    pipe.send_bytes(pickle.dumps(("value", sandbox.description)))
    while True:
        try:
            program, changes = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            limits = sandbox.config.model_copy(update=changes)
            answer = ("value", sandbox.run(program, limits))
        except Exception as error:
            answer = ("error", error)
        pipe.send_bytes(pickle.dumps(answer))


@contextlib.contextmanager
def host(
    user: str, config: SandboxConfig, before: Callable[[], None] | None = None
) -> Iterator[Host]:
    """A host that is closed at the end; raises what its sandbox raises."""
    made = Host(user, config, before)
    try:
        yield made
    finally:
        made.close()


def block_namespaces(first: int = 0, count: int = 65536) -> None:
    """Go where no user namespace can be made, as on a hardened system; keep the users given."""
    user, group = os.geteuid(), os.getegid()
    if not _IS_ROOT:
        first, count = user, 1
    pid = os.getpid()
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:  # it has rights outside
        os.close(go)
        if os.read(ready, 1) and _IS_ROOT:
            Path(f"/proc/{pid}/gid_map").write_text(f"{first} {first} {count}")
            Path(f"/proc/{pid}/uid_map").write_text(f"{first} {first} {count}")
        os._exit(0)
    try:
        if _LIBC.unshare(_NEW_USER_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), "unshare, as a process with threads may not")
        os.write(go, b"!")
    finally:
        os.close(go)
        status = os.waitpid(helper, 0)[1]
    assert status == 0
    if not _IS_ROOT:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def block_landlock() -> None:
    """Have the kernel say that it knows no Landlock."""
    code = b"".join(
        struct.pack("=HBBI", *each)
        for each in [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050026),
                     (0x06, 0, 0, 0x7FFF0000)]
    )  # fmt: skip
    program = struct.pack("=HxxxxxxQ", len(code) // 8, ctypes.addressof(keep := _buffer(code)))
    assert keep
    assert _LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert _LIBC.prctl(22, 2, program, 0, 0) == 0


def _buffer(code: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(code, len(code))


def block_all() -> None:
    """Both."""
    block_namespaces()
    block_landlock()


def block_nothing() -> None:
    """Leave all as it is."""


def keep_in(folder: Path) -> None:
    """Keep a host's files there, and adopt what a program leaves behind."""
    tempfile.tempdir = str(folder)
    assert _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def sandboxes_where(block: Callable[[], None]) -> list[Finding]:
    """What `winnow doctor` finds in a process that has blocked something for good."""
    ours, theirs = _FRESH.Pipe(duplex=False)
    process = _FRESH.Process(target=_find, args=(theirs, block))
    process.start()
    theirs.close()
    try:
        assert ours.poll(_LONGEST_S), "the process that looks for sandboxes hangs"
        return list(ours.recv())
    finally:
        _end(process)


def _find(pipe: Connection, block: Callable[[], None]) -> None:
    block()
    pipe.send(list(doctor._check_sandboxes()))


@contextlib.contextmanager
def served(
    config: SandboxConfig, token: str | None = None, **changes: Any
) -> Iterator[tuple[str, LocalSandbox]]:
    """The address of a server over a local sandbox, in a thread of this process.

    Args:
        changes: arguments of `SandboxServer`.
    """
    with (
        contextlib.closing(listen("127.0.0.1", 0, token)) as listener,
        contextlib.closing(LocalSandbox(config)) as sandbox,
    ):
        options = {"max_body_bytes": 1 << 22, "max_queued": 256, **changes}
        with (
            contextlib.closing(SandboxServer(sandbox, token, **options)) as server,
            running(server.service, listener),
        ):
            yield listener_url(listener), sandbox
