"""A sandbox in a process of its own, as root or as an ordinary user, with either backend."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from winnow.config.sandbox import SandboxConfig
from winnow.rewards.sandbox.bubblewrap import Bubblewrap
from winnow.rewards.sandbox.interpreter import find_interpreter
from winnow.rewards.sandbox.local import LocalSandbox
from winnow.rewards.sandbox.program import Limits, Program, Result, SandboxError

ORDINARY_UID = 61500
"""Of no account, as good as any; systemd gives out the range above 61184 for a moment only."""
USERS = ("root", "ordinary") if os.geteuid() == 0 else ("ordinary",)
BACKENDS = ("bubblewrap", "landlock")


def need_bubblewrap() -> None:
    """Skip where the package is missing."""
    try:
        Bubblewrap(find_interpreter("/usr/bin/python3"))
    except SandboxError as error:
        pytest.skip(f"{error}; apt-get install bubblewrap")


class Host:
    """A process that holds a sandbox and does as it is told."""

    def __init__(self, user: str, config: SandboxConfig, before: Callable[[], None] | None = None):
        ours, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                _serve(theirs, user, config, before)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()
        self._pipe = ours
        self.description: str = self.answer()

    def answer(self) -> Any:
        """What it says next."""
        kind, value = pickle.loads(self._pipe.recv_bytes())
        if kind == "error":
            raise value
        return value

    def has_answered(self) -> bool:
        """Whether there is something to read, were it the end."""
        return self._pipe.poll()

    def ask(self, code: str, stdin: bytes = b"", **limits: Any) -> None:
        """Have a program run, and do not wait for it."""
        self._pipe.send_bytes(pickle.dumps((Program(code, stdin), limits)))

    def run(self, code: str, stdin: bytes = b"", **limits: Any) -> Result:
        """Run a program in its sandbox."""
        self.ask(code, stdin, **limits)
        result = self.answer()
        assert isinstance(result, Result)
        return result

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _serve(
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
            limits = Limits(**{**vars(sandbox.limits), **changes})
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
