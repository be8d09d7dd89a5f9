"""Processes of this machine: the driver's end of one, and worker groups made of them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from winnow.errors import WinnowError
from winnow.workers.group import WorkerGroup
from winnow.workers.host import failure_of, free_port, merged_environment
from winnow.workers.logs import LogReceiver
from winnow.workers.protocol import OnLog, RankInfo
from winnow.workers.wire import Bytes, Channel, Packed, pack, unpack

_PIPE_BYTES = 1 << 20
_THIS_MACHINE = "127.0.0.1"
Output = asyncio.StreamReader
Following = Coroutine[Any, Any, None]


async def start_local(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    size: int,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    on_log: OnLog | None = None,
    devices: Sequence[int | None] | None = None,
) -> WorkerGroup:
    """Start workers in processes of this machine.

    Call it from a thread that lives as long as they are to: Linux kills them when it ends.

    Args:
        path: `module:Class` of the worker (`protocol`).
        kwargs: what each is made with, beside its rank.
        environment: variables for them, over this process's own.
        stall_timeout_s: how long a call may be under way without progress.
        on_log: gets their lines; by default they go to this process's logging.
        devices: `RankInfo.device_index` by rank; by default the CPU.

    Raises:
        WorkerError, WinnowError: one cannot be made; no process is left.
    """
    if not hasattr(os, "memfd_create"):
        raise WinnowError("workers in processes of their own need Linux; use cluster=local there")
    indices = [None] * size if devices is None else list(devices)
    assert len(indices) == size >= 1
    port = free_port(_THIS_MACHINE)
    variables = merged_environment(environment or {})
    infos = [
        RankInfo(rank, size, _THIS_MACHINE, port, device) for rank, device in enumerate(indices)
    ]
    links: list[tuple[LocalConnection, LogReceiver]] = []
    try:
        for rank in range(size):
            listener = LogReceiver(role, rank, on_log)
            link = await LocalConnection.start("winnow.workers.child", variables, listener.follow)
            links.append((link, listener))
    except BaseException:
        for link, _ in links:
            link.kill()
            await link.gone(1.0)
            await link.release()
        raise
    group = WorkerGroup(role, links, pack, stall_timeout_s)
    await group.start(path, kwargs, infos)
    return group


class LocalConnection:
    """The driver's end of one process of this machine (`group.WorkerConnection`).

    The process leads a session of its own: a terminal's Ctrl-C does not reach it, and what it
    started is killed with it.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self.pid = process.pid
        self.when_cut: Callable[[], None] = lambda: None
        """Called when the process has closed its end of the socket."""
        self._channel = Channel(end, self._take, lambda: self.when_cut())
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._output: asyncio.ReadTransport | None = None
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, module: str, variables: Mapping[str, str], follow: Callable[[Output], Following]
    ) -> LocalConnection:
        """Start `python -m MODULE DESCRIPTOR PARENT`, which reads calls from the socket.

        Linux kills the process when the thread that calls this ends.

        Args:
            variables: for the process, over this process's own.
            follow: reads what it prints, to the end.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # more than this user may have: the usual size does
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **variables},
            )
        except BaseException:
            ours.close()
            os.close(reader)
            raise
        finally:
            theirs.close()
            os.close(writer)
        link = cls(process, ours)
        stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        link._output, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
        )
        link._following = loop.create_task(follow(stream))
        return link

    @property
    def is_cut(self) -> bool:
        """True if the process has closed its end of the socket."""
        return self._channel.is_cut

    def send(self, number: int, payload: Packed, tell: Callable[[Any], None]) -> None:
        self._waiting[number] = tell
        self._channel.send(number, payload)

    def receive(self) -> None:
        """Take in what has come."""
        self._channel.receive()

    def ending(self) -> str | None:
        if self._process.returncode is not None:
            return _in_words(self._process.returncode)
        # It is not reaped before `release`: until then no stranger can have its number.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        sign = 1 if ended.si_code == os.CLD_EXITED else -1
        return _in_words(sign * ended.si_status)

    def hang_up(self) -> None:
        """Take and send no more; an idle process then ends by itself."""
        self._channel.hang_up()

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self, timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        while self.ending() is None:
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.002)
        return True

    async def release(self) -> None:
        self._process.poll()
        self._channel.close()
        if self._output is not None:
            self._output.close()
        if self._following is not None:
            self._following.cancel()

    def _take(self, number: int, data: Bytes | mmap.mmap) -> None:
        try:
            said = unpack(data)
        except Exception as error:  # a class that the driver cannot read
            said = failure_of(error)
        self._waiting.pop(number)(said)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
