"""Processes that start at once, forked from one that has imported torch and transformers.

To import them takes seconds of CPU, and tests of kills, signals and full disks start dozens of
runs. A forked one is a process of its own all the same: it has its own memory, files and signal
handlers, and ends as Python ends. What those of one server share is the seed of Python's hashes,
so the run that they are compared with should be one started afresh.

`python -m tests.forked` is the server. It reads requests from standard input, one a line, and has
one thread, so that a fork copies no lock that somebody holds.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import pauses
from tests.spares import Spares, adopt, be_orphan

from winnow import gc_tuning

ROOT = Path(__file__).parents[1]
PRELOADED = (
    *("winnow.cli.main", "winnow.config.load", "winnow.commands.train"),
    "hydra.core.override_parser.overrides_parser",
    *("winnow.builders.warm_start", "winnow.learning.canary", "winnow.workers.child"),
    *("winnow.ranks.workers", "winnow.rollout.engine_group", "winnow.rollout.remote_engine"),
    "winnow.rollout.embedded.torch_engine",
    *("winnow.workers.group", "winnow.learning.learner", "winnow.learning.fsdp2"),
    *("winnow.models.value", "winnow.models.lora", "winnow.sandbox.local", "winnow.rewards.pool"),
    *("winnow.views.curve", "winnow.views.summary"),
    *("winnow.rewards.remote_pipeline", "transformers.models.auto.tokenization_auto"),
    *("pyarrow.compute", "matplotlib.figure", "matplotlib.backends.backend_agg"),
    "pandas",  # which pyarrow imports with its first array
    *("winnow.workers.ray.actors", "google.protobuf.json_format"),
    *("requests", "jsonschema", "uvloop"),  # of Ray, which reads its variables when it is imported
)
"""What runs and their workers import, at their start or when it is needed."""


class Forked:
    """A process of a server's, used like a `subprocess.Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None
        # Readable once the process is over: tests ask thousands of times whether it is.
        self._ends = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while the process runs."""
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.returncode = self._server.ask(wait_for=self.pid)
            os.close(self._ends)
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        """The exit code, waited for."""
        give_up = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is over."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process is over."""
        self.send_signal(signal.SIGKILL)


class Server:
    """Starts processes; what it started ends with it."""

    def __init__(
        self,
        *before: str,
        environment: Mapping[str, str] | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        """Start the server.

        Args:
            before: words before its command, such as `unshare --mount`.
            preloaded: further modules that are imported, beside `PRELOADED`.
            environment: what is read at import must stand here, such as HF_HUB_OFFLINE.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.forked", str(theirs.fileno()), *preloaded],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                **(environment or {}),
            },
        )
        theirs.close()

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        out: Path | None = None,
        err: Path | None = None,
        spares: int = 0,
    ) -> Forked:
        """Call `main` of a module with these words of a command line.

        Args:
            folder: to be in; the repository's root if None.
            environment: besides that of the server.
            out, err: files for standard output and error; None shows both on the server's error.
            spares: idle processes for what it starts, and likewise for each of these (`Spares`).
        """
        pid = self.ask(
            module=module,
            arguments=list(arguments),
            folder=str(folder or ROOT),
            environment=dict(environment or {}),
            out=str(out or ""),
            err=str(err or ""),
            spares=spares,
        )
        return Forked(self, pid)

    def ask(self, **request: Any) -> Any:
        """Send a request; the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def adopt(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a process that is this one's child: what `tests.spares.popen` takes."""

        def ask(channel: socket.socket) -> None:
            socket.send_fds(self._control, [b"."], [channel.fileno()])
            self.ask(orphan=True)

        return adopt(ask, order, descriptors)

    def close(self) -> None:
        """End the server and what still runs of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._control.close()


def main() -> None:
    """Serve until the input ends; in a forked child, be the process that was asked for."""
    with gc_tuning.disabled():
        for name in (*PRELOADED, *sys.argv[2:]):
            with contextlib.suppress(ModuleNotFoundError):  # of Ray, where it is not installed
                importlib.import_module(name)
    # A child that looked at each object to collect or to free it would copy the memory they lie in:
    # a second of CPU at its end.
    gc.collect()
    gc.freeze()
    # A child's own output goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running: set[int] = set()
    control = socket.socket(fileno=int(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        if "orphan" in request:
            _, (channel,), *_ = socket.recv_fds(control, 1, 1)
            answer = os.fork()
            if answer == 0:
                answers.close()
                control.close()
                be_orphan(channel, lambda module, words: _call(module, words, 0))
            os.waitpid(answer, 0)
            os.close(channel)
        elif "wait_for" in request:
            pid, status = os.waitpid(request["wait_for"], 0)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                control.close()
                break
            running.add(answer)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    else:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
        return
    _become(request)


def _become(request: dict[str, Any]) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for number, path in ((1, request["out"]), (2, request["err"])):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, number)
            os.close(file)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    _call(request["module"], request["arguments"], request["spares"])


def _call(module: str, words: Sequence[str], spares: int) -> None:
    """Be a process of a module."""
    if pauses.PLACE in os.environ:
        pauses.install()
    importlib.import_module("tests.winnow_command").draw_no_curve()
    if spares and module != "winnow.workers.child":
        Spares(spares, lambda module, words: _call(module, words, spares)).install()
    sys.argv = [module, *words]
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()
