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
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from winnow.config.reward import SandboxConfig
from winnow.errors import RewardError
from winnow.sandbox.bubblewrap import Bubblewrap
from winnow.sandbox.interpreter import Interpreter, compiled, find_interpreter
from winnow.sandbox.landlock import Landlock
from winnow.sandbox.program import Limits, Program, Result, SandboxError, Slot
from winnow.sandbox.trial import trial

_FIRST_UID, _LAST_UID = 60706, 61183
"""Users that no distribution gives away (systemd's list of ranges leaves them unused)."""
_COMPILED = "main.bin"
_RUN_COMPILED = f"import marshal\nexec(marshal.loads(open({_COMPILED!r}, 'rb').read()))\n"
_TRIES = 3
_PAUSE_S = 0.2
_TRIAL_S = 20.0


class Kind(Protocol):
    """One way to confine a program."""

    @property
    def name(self) -> str:
        """As in `reward.sandbox.backend`."""
        ...

    def run(self, program: Program, limits: Limits, slot: Slot, closing: threading.Event) -> Result:
        """Run a program; raises SandboxError where it cannot."""
        ...


KINDS: dict[str, Callable[[Interpreter], Kind]] = {"bubblewrap": Bubblewrap, "landlock": Landlock}


class NoSandboxError(RewardError):
    """No kind of sandbox holds on this machine; `reasons` says why not, by kind."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = reasons
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            f"no sandbox holds here, so no program is run. {why}. Install bubblewrap (apt-get "
            "install bubblewrap) and allow unprivileged user namespaces, or take another scorer"
        )

    def __reduce__(self) -> tuple[type[NoSandboxError], tuple[Mapping[str, str]]]:
        return NoSandboxError, (self.reasons,)


class LocalSandbox:
    """Runs programs, at most `max_concurrent` at once; safe to use from any thread.

    Raises:
        RewardError: this machine has no way to confine programs, or the interpreter is unfit.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if sys.platform != "linux":
            raise RewardError(
                f"rewards that run code need Linux, and this is {sys.platform}: there is no "
                "sandbox here; run on Linux, or score with reward.function.path"
            )
        self.config = config
        self.limits = Limits.of(config)
        self._closing = threading.Event()
        self._claims: list[socket.socket] = []
        count = config.max_concurrent or len(os.sched_getaffinity(0))
        self.slots = [Slot(number, None) for number in range(count)]
        try:
            if os.geteuid() == 0:
                # Of one that let its user go, or was killed, some may live on: they count.
                busy = _users_with_processes()
                self.slots = [Slot(number, self._claim_uid(busy)) for number in range(count)]
            interpreter = find_interpreter(config.python)
            self._python = interpreter.path
            self._kind = self._chosen(interpreter)
        except SandboxError as error:
            self.close()
            raise RewardError(f"no program can be run: {error}") from error
        except RewardError:
            self.close()
            raise
        self._compiled: dict[str, bytes] = {}
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)

    @property
    def backend(self) -> str:
        """Which kind is in force: bubblewrap or landlock."""
        return self._kind.name

    @property
    def description(self) -> str:
        """One line for people."""
        who = "its own user" if self.slots[0].uid is None else f"uid {self.slots[0].uid} and on"
        return (
            f"{self.backend}, {len(self.slots)} at once as {who}, {self.config.python}, "
            f"{self.config.memory_mb} MiB x {self.config.processes} processes each"
        )

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run a program in a free slot; waits for one.

        Args:
            limits: others than the recipe's.

        Raises:
            SandboxError: the sandbox failed, three times over.
        """
        slot = self._free.get()
        try:
            program = self._ready(program)
            for attempt in range(1, _TRIES + 1):
                try:
                    return self._kind.run(program, limits or self.limits, slot, self._closing)
                except SandboxError:
                    if attempt == _TRIES or self._closing.is_set():
                        raise
                time.sleep(_PAUSE_S * attempt)
        finally:
            self._free.put(slot)
        raise AssertionError("unreachable")

    def run_for(self, program: Program, time_s: float) -> Result:
        """The same within another time than the recipe's."""
        return self.run(program, replace(self.limits, time_s=time_s))

    def close(self) -> None:
        """End what runs, and give the users back."""
        self._closing.set()
        for claim in self._claims:
            claim.close()
        self._claims.clear()

    def _ready(self, program: Program) -> Program:
        """The program, with code of ours compiled: that takes longer than most of it runs."""
        if not program.is_ours:
            return program
        code = self._compiled.get(program.code)
        if code is None:
            code = self._compiled[program.code] = compiled(self._python, program.code)
        return replace(program, code=_RUN_COMPILED, files={**program.files, _COMPILED: code})

    def _claim_uid(self, busy: Set[int]) -> int:
        """An unprivileged user that nobody has, held while this process lives.

        Args:
            busy: users that are passed over.

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
        raise SandboxError(f"all users from {_FIRST_UID} to {_LAST_UID} are taken")

    def _chosen(self, interpreter: Interpreter) -> Kind:
        wanted = self.config.backend
        reasons: dict[str, str] = {}
        for name in KINDS if wanted == "auto" else [wanted]:
            try:
                kind = KINDS[name](interpreter)
                for slot in {self.slots[0], self.slots[-1]}:
                    self._try_out(kind, slot)
                return kind
            except SandboxError as error:
                reasons[name] = str(error)
        raise NoSandboxError(reasons)

    def _try_out(self, kind: Kind, slot: Slot) -> None:
        """See that a program in the sandbox cannot do what it must not.

        Raises:
            SandboxError: it cannot be run, or it can do too much.
        """
        limits = replace(self.limits, time_s=max(_TRIAL_S, self.limits.time_s))
        program = trial(limits, slot.uid if slot.uid is not None else os.geteuid())
        result = kind.run(program, limits, slot, self._closing)
        try:
            escapes: Sequence[str] = json.loads(result.stdout)
        except ValueError:
            said = " ".join(result.stderr.decode(errors="replace").split())[-300:]
            raise SandboxError(
                f"{self.config.python} does not run in it as {_who(slot)} "
                f"({said or f'exit code {result.exit_code}, {result.ending}'}); "
                "reward.sandbox.python must be a Python that every user may read"
            ) from None
        if escapes:
            raise SandboxError(f"it does not hold: {', '.join(escapes)}")


def _users_with_processes() -> set[int]:
    """Whose there are, dying ones included."""
    users = set[int]()
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has just ended
            _, _, rest = status.read_text(encoding="utf-8", errors="replace").partition("\nUid:")
            users.update(map(int, rest.split(maxsplit=1)[:1]))
    return users


def _who(slot: Slot) -> str:
    return "this user" if slot.uid is None else f"uid {slot.uid}"
