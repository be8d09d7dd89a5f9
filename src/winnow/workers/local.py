"""Workers on this machine: the object itself, for a debugger, or processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from winnow.errors import WinnowError, WorkerError
from winnow.workers.environment import free_port, merged
from winnow.workers.group import WorkerGroupCore
from winnow.workers.host import CLOSE, Call, Host, Job, Outcome, failure_of
from winnow.workers.log_receiver import LogReceiver
from winnow.workers.protocol import OnLog, RankInfo
from winnow.workers.wire import Packed, pack, receive, send, unpack

log = logging.getLogger(__name__)

_PIPE_BYTES = 1 << 20
_THIS_MACHINE = "127.0.0.1"


class InProcess:
    """One worker in the driver's own process (`protocol.WorkerGroup`).

    Arguments and results are the objects themselves. Nothing limits how long a method takes: it may
    stand in a debugger. Its log is the driver's.
    """

    size = 1

    def __init__(self, role: str, environment: Mapping[str, str]) -> None:
        self.role = role
        self._host = Host()
        self._failure: WinnowError | None = None
        self._before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def progress(self) -> tuple[int | None, ...]:
        """The worker's own."""
        return (self._host.progress,)

    async def start(self, job: Job) -> None:
        """Make the worker."""
        try:
            await self._run("__init__", job)
        except BaseException:
            await self.close()
            raise

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method; its result as a list of one."""
        return [await self._run(method, Call(method, args, kwargs))]

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method with the positional arguments in a list of one."""
        if len(arguments) != 1:
            raise ValueError(f"{self.role} has 1 worker, got arguments for {len(arguments)}")
        return [await self._run(method, Call(method, tuple(arguments[0])))]

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method; the rank is 0."""
        if rank != 0:
            raise IndexError(f"{self.role} has 1 worker, got rank {rank}")
        return await self._run(method, Call(method, args, kwargs))

    def processes(self) -> list[int]:
        """None of its own."""
        return []

    async def close(self) -> None:
        """Have the worker's `close()` run, unless it failed."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        try:
            if self._failure is None:
                await self._host.run(CLOSE)
        except Exception as error:
            log.error("%s[0] failed in close: %s", self.role, failure_of(error).traceback)
        finally:
            for name, value in self._before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    async def _run(self, method: str, asked: Job | Call) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise WorkerError(f"the workers {self.role} were ended by this run", self.role, -1)
        task = asyncio.get_running_loop().create_task(self._done(method, asked))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)  # a call that is cancelled goes on, as elsewhere

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # where nobody waits any more, nobody is to be told

    async def _done(self, method: str, asked: Job | Call) -> Any:
        if self._failure is not None:
            raise self._failure
        try:
            return await self._host.run(asked)
        except WinnowError as error:
            self._failure = error
            raise
        except Exception as error:
            failure = failure_of(error)
            line = f"{self.role}[0] failed in {method}"
            log.error("%s: %s", line, failure.traceback)
            line = f"{line}: {failure.line}; the log has its traceback"
            self._failure = WorkerError(line, self.role, 0)
            raise self._failure from error


async def start_in_process(
    role: str, path: str, kwargs: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
) -> InProcess:
    """Make a worker in this process.

    Raises:
        WorkerError, WinnowError: it cannot be made.
    """
    group = InProcess(role, environment or {})
    info = RankInfo(0, 1, _THIS_MACHINE, free_port(_THIS_MACHINE), None)
    await group.start(Job(path, kwargs, info, float("inf"), logging.INFO, tuple(sys.path)))
    return group


async def start_local(
    role: str,
    path: str,
    kwargs: Mapping[str, Any],
    size: int,
    environment: Mapping[str, str] | None = None,
    stall_timeout_s: float = float("inf"),
    on_log: OnLog | None = None,
    devices: Sequence[int | None] | None = None,
) -> WorkerGroupCore:
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
    level = logging.getLogger("winnow").getEffectiveLevel()
    variables = merged(environment or {})
    jobs = [
        Job(
            path,
            kwargs,
            RankInfo(rank, size, _THIS_MACHINE, port, indices[rank]),
            stall_timeout_s,
            level,
            tuple(sys.path),
        )
        for rank in range(size)
    ]
    links: list[tuple[LocalLink, LogReceiver]] = []
    try:
        for rank in range(size):
            listener = LogReceiver(role, rank, on_log)
            links.append((await LocalLink.start(variables, listener), listener))
    except BaseException:
        for link, _ in links:
            link.kill()
            await link.gone(1.0)
            await link.release()
        raise
    group = WorkerGroupCore(role, links, pack, stall_timeout_s)
    await group.start(jobs)
    return group


class LocalLink:
    """The driver's end of one process of this machine (`group.WorkerConnection`)."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self.pid = process.pid
        self._unsent: deque[tuple[int, Packed]] = deque()
        self._waiting: dict[int, Callable[[Outcome], None]] = {}
        self._output: asyncio.ReadTransport | None = None
        self._following: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel, self._read)

    @classmethod
    async def start(cls, variables: Mapping[str, str], listener: LogReceiver) -> LocalLink:
        """Start a process that waits for its job."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):  # more than this user may have: the usual size does
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        command = [sys.executable, "-P", "-m", "winnow.workers.child"]
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # of its own, to be killed with what it started
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
        stream = asyncio.StreamReader()
        link._output, _ = await link._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
        )
        link._following = link._loop.create_task(listener.follow(stream))
        return link

    def send(self, number: int, payload: Packed, tell: Callable[[Outcome], None]) -> None:
        """Have a call run."""
        self._waiting[number] = tell
        self._unsent.append((number, payload.duplicate()))
        self._write()

    def ending(self) -> str | None:
        """In words how the process ended."""
        if self._process.returncode is not None:
            return _in_words(self._process.returncode)
        # It is not reaped before `release`: until then no stranger can have its number.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        sign = 1 if ended.si_code == os.CLD_EXITED else -1
        return _in_words(sign * ended.si_status)

    def kill(self) -> None:
        """End the process and what it started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self, timeout_s: float) -> bool:
        """Wait until the process has ended."""
        give_up = time.monotonic() + timeout_s
        while self.ending() is None:
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.002)
        return True

    async def release(self) -> None:
        """Reap the process, close the socket and the pipe."""
        self._process.poll()
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()
        for _, payload in self._unsent:
            payload.release()
        self._unsent.clear()
        if self._output is not None:
            self._output.close()
        if self._following is not None:
            self._following.cancel()

    def _read(self) -> None:
        try:
            message = receive(self._channel)
        except BlockingIOError:
            return
        if message is None:
            self._loop.remove_reader(self._channel)
            return
        number, data = message
        try:
            outcome: Outcome = unpack(data)
        except Exception as error:  # a class that the driver cannot read
            outcome = failure_of(error)
        self._waiting.pop(number)(outcome)

    def _write(self) -> None:
        while self._unsent:
            number, payload = self._unsent[0]
            try:
                send(self._channel, number, payload)
            except BlockingIOError:
                self._loop.add_writer(self._channel, self._write)
                return
            except OSError:  # its death is about to be seen
                pass
            self._unsent.popleft()
            payload.release()
        self._loop.remove_writer(self._channel)


def _in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = " (by hand, or for want of memory)" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{why}"
