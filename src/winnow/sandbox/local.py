"""The sandbox of this machine: chosen once, tried out, then shared by all that run programs.

bubblewrap comes first, Landlock where namespaces are blocked. Either must pass a trial in which
a program tries what it must not be able to do; where neither does, there is no sandbox, and
programs are not run at all. Started as root, programs run as unprivileged users, one a slot,
that no other process has: the process limit counts by user and does not bind root.
"""

from __future__ import annotations

import json
import os
import pwd
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from winnow.config.reward import SandboxConfig
from winnow.errors import RewardError
from winnow.sandbox.bubblewrap import Bubblewrap
from winnow.sandbox.landlock import Landlock
from winnow.sandbox.process import (
    ENVIRONMENT,
    Interpreter,
    find_interpreter,
    precompile,
    process_limits,
)
from winnow.sandbox.program import Program, Result, SandboxError

_FIRST_UID, _LAST_UID = 60706, 61183
"""Users that no distribution gives away (systemd's list of ranges leaves them unused)."""
_COMPILED = "main.bin"
_RUN_COMPILED = f"import marshal\nexec(marshal.loads(open({_COMPILED!r}, 'rb').read()))\n"
_TRIES = 3
_PAUSE_S = 0.2
_TRIAL_S = 20.0
_SLACK = 64
"""Processes that others of the same user may end while the limit is tried."""

Kind = Bubblewrap | Landlock
KINDS: dict[str, type[Kind]] = {"bubblewrap": Bubblewrap, "landlock": Landlock}


class NoSandboxError(RewardError):
    """No kind of sandbox holds on this machine; `reasons` says why not, by kind."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(reasons)  # what pickle makes it of again
        self.reasons = reasons

    def __str__(self) -> str:
        why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return (
            f"no sandbox works on this machine: {why}; install bubblewrap (apt-get "
            "install bubblewrap) and allow unprivileged user namespaces, or use another scorer"
        )


class LocalSandbox:
    """Runs programs, at most `max_concurrent` at once; safe to use from any thread.

    Raises:
        RewardError: this machine has no way to confine programs, or the interpreter is unfit.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if sys.platform != "linux":
            raise RewardError(
                f"rewards that run code need a sandbox, which needs Linux, and this is "
                f"{sys.platform}; run on Linux, or score with reward.function.path"
            )
        self.config = config
        self._closing = threading.Event()
        self._claims: list[socket.socket] = []
        self.slots = config.max_concurrent or len(os.sched_getaffinity(0))
        self.uids: list[int | None] = [None] * self.slots
        try:
            if os.geteuid() == 0:
                # Of one that let its user go, or was killed, some may live on: they count.
                busy = _find_busy_users()
                self.uids = [self._claim_uid(busy) for _ in range(self.slots)]
            interpreter = find_interpreter(config.python)
            self._python = interpreter.path
            self._kind = self._choose_kind(interpreter)
        except SandboxError as error:
            self.close()
            raise RewardError(f"no program can be run: {error}") from error
        except RewardError:
            self.close()
            raise
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for uid in self.uids:
            self._free.put(uid)

    @property
    def backend(self) -> str:
        """The kind in force: bubblewrap or landlock."""
        return self._kind.name

    @property
    def description(self) -> str:
        """One line for people."""
        uid = self.uids[0]
        who = "its own user" if uid is None else f"uid {uid} and on"
        return (
            f"{self.backend}, {self.slots} at once as {who}, {self.config.python}, "
            f"{self.config.memory_mb} MiB x {self.config.processes} processes each"
        )

    def run(self, program: Program, limits: SandboxConfig | None = None) -> Result:
        """Run a program in a free slot; waits for one.

        Args:
            limits: others than the recipe's.

        Raises:
            SandboxError: the sandbox failed, three times over.
        """
        uid = self._free.get()
        try:
            if program.compile_once:  # compiled once: that takes longer than most of it runs
                code = precompile(self._python, program.code)
                files = {**program.files, _COMPILED: code}
                program = replace(program, code=_RUN_COMPILED, files=files)
            for attempt in range(1, _TRIES + 1):
                try:
                    return self._kind.run(program, limits or self.config, uid)
                except SandboxError:
                    if attempt == _TRIES or self._closing.is_set():
                        raise
                time.sleep(_PAUSE_S * attempt)
        finally:
            self._free.put(uid)
        raise AssertionError("unreachable")

    def run_for(self, program: Program, time_s: float) -> Result:
        """Run a program within another time than the recipe's."""
        return self.run(program, self.config.model_copy(update={"time_s": time_s}))

    def close(self) -> None:
        """End what runs, and give the users back."""
        self._closing.set()
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _claim_uid(self, busy: Set[int]) -> int:
        """Claim an unprivileged user that no other process has, while this process lives.

        Args:
            busy: users to pass over.

        Raises:
            SandboxError: none is left.
        """
        for uid in (uid for uid in range(_FIRST_UID, _LAST_UID + 1) if uid not in busy):
            with suppress(KeyError):
                pwd.getpwuid(uid)
                continue
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                claim.bind(f"\0winnow-sandbox-{uid}")  # gone with the process, whatever ends it
            except OSError:
                claim.close()
                continue
            self._claims.append(claim)
            return uid
        raise SandboxError(f"all user ids from {_FIRST_UID} to {_LAST_UID} are in use")

    def _choose_kind(self, interpreter: Interpreter) -> Kind:
        backend = self.config.backend
        reasons: dict[str, str] = {}
        for name in KINDS if backend == "auto" else [backend]:
            try:
                kind = KINDS[name](interpreter, self._closing)
                for uid in {self.uids[0], self.uids[-1]}:
                    self._run_trial(kind, uid)
                return kind
            except SandboxError as error:
                reasons[name] = str(error)
        raise NoSandboxError(reasons)

    def _run_trial(self, kind: Kind, uid: int | None) -> None:
        """Run the trial program, and check that it could not escape.

        Raises:
            SandboxError: it cannot be run, or it can do too much.
        """
        longest_s = max(_TRIAL_S, self.config.time_s)
        limits = self.config.model_copy(update={"time_s": longest_s})
        program = trial_program(limits, os.geteuid() if uid is None else uid)
        result = kind.run(program, limits, uid)
        try:
            escapes: Sequence[str] = json.loads(result.stdout)
        except ValueError:
            who = "this user" if uid is None else f"uid {uid}"
            reason = " ".join(result.stderr.decode(errors="replace").split())[-300:]
            raise SandboxError(
                f"{self.config.python} does not run in it as {who} "
                f"({reason or f'exit code {result.exit_code}, {result.ending}'}); "
                "reward.sandbox.python must be a Python that every user may read"
            ) from None
        if escapes:
            raise SandboxError(f"the trial program escaped: {', '.join(escapes)}")


def _find_busy_users() -> set[int]:
    """List the users of all processes, dying ones included."""
    users = set[int]()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has just ended
            _, _, rest = status.read_text(encoding="utf-8", errors="replace").partition("\nUid:")
            users.update(map(int, rest.split(maxsplit=1)[:1]))
    return users


_TRIAL = """
import json, os, resource, socket, sys, time
expected = json.loads(sys.stdin.read())
escaped = []


def forbidden(what, attempt, *errors):
    try:
        attempt()
    except errors:
        return
    escaped.append(what)


def touch(path):
    open(path, "w").close()


def create(make, remove):
    path = f"{folder}/winnow-trial-{os.getpid()}"
    make(path)
    remove(path)


if os.getuid() != expected["uid"] or os.getuid() == 0 or os.getgid() == 0:
    escaped.append(f"programs run as user {os.getuid()}, group {os.getgid()}")
forbidden("files outside can be read", lambda: open("/etc/passwd"), OSError)
forbidden("other processes can be seen", lambda: os.listdir("/proc"), OSError)
forbidden("/usr can be written", lambda: open("/usr/escaped", "w"), OSError)
for folder in ("/var/tmp", "/dev/shm"):
    forbidden("folders can be made in " + folder, lambda: create(os.mkdir, os.rmdir), OSError)
    forbidden("files can be made in " + folder, lambda: create(touch, os.remove), OSError)
forbidden("the network can be used", lambda: socket.socket(), OSError)
forbidden("processes can be signalled", lambda: os.kill(os.getppid(), 0), OSError)
forbidden("memory has no limit", lambda: bytearray(expected["memory"]), MemoryError)
strange = set(os.environ) - set(expected["environment"])
if strange:
    escaped.append("the environment holds " + ", ".join(sorted(strange)))
for name, most in expected["limits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        escaped.append(name + " is not set")
for started in range(expected["processes"] + 1):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    except BlockingIOError:
        break
else:
    escaped.append("processes have no limit")
print(json.dumps(escaped))
"""


def trial_program(limits: SandboxConfig, uid: int) -> Program:
    """Make the trial program, which a sandbox must contain before it runs any other.

    It tries what is forbidden and prints what it managed, as a JSON list.

    Args:
        uid: user that it should find itself to be.
    """
    expected = {
        "uid": uid,
        "memory": limits.memory_mb << 20,
        "processes": limits.processes + _SLACK,
        "environment": [*ENVIRONMENT, "PWD", "LC_CTYPE"],
        "limits": {
            f"RLIMIT_{name.upper()}": most
            for name, most in process_limits(limits).items()
            if name not in ("nproc", "msgqueue")  # the first is tried, the second not in all
        },
    }
    return Program(_TRIAL, json.dumps(expected).encode())
