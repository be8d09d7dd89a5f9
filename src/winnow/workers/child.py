"""A worker's process on this machine: `python -m winnow.workers.child DESCRIPTOR PARENT`.

Calls come over the socket DESCRIPTOR (`wire`), the first message is the job. The driver alone
decides when it ends: it takes no notice of a terminal's Ctrl-C, of SIGTERM or SIGHUP, which reach
the driver as well, and it dies with the driver, however that one ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import socket
import sys

from winnow.workers.host import Call, Host, WorkerJob, failure_of
from winnow.workers.logs import LogSender, start_sending
from winnow.workers.wire import Bytes, Channel, pack, unpack

_PR_SET_PDEATHSIG = 1
_LEFT_TO_THE_DRIVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve until the driver is gone, or kills this process."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in _LEFT_TO_THE_DRIVER:
        signal.signal(number, lambda *_: None)  # a handler; what is ignored, children ignore too
    sender = LogSender(1)
    sender.become_output()
    asyncio.run(_Server.serve(socket.socket(fileno=descriptor), sender, parent))


class _Server:
    def __init__(self, end: socket.socket, sender: LogSender, parent: int) -> None:
        self._sender, self._parent = sender, parent
        self._host = Host()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        self._channel = Channel(end, self._begin, self._is_over.set)

    @classmethod
    async def serve(cls, end: socket.socket, sender: LogSender, parent: int) -> None:
        await cls(end, sender, parent)._is_over.wait()
        os._exit(0)  # whatever still runs is of no use to anyone

    def _begin(self, number: int, data: Bytes | mmap.mmap) -> None:
        task = asyncio.get_running_loop().create_task(self._run(number, data))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, data: Bytes | mmap.mmap) -> None:
        try:
            asked: WorkerJob | Call = unpack(data)
        except BaseException as error:  # whatever a class does when it is read
            self._channel.send(number, pack(failure_of(error)))
            return
        del data  # arrays alone keep it from here on
        if isinstance(asked, WorkerJob):
            sys.path[:] = asked.python_path
            is_orphan = lambda: os.getppid() != self._parent  # noqa: E731
            start_sending(
                self._sender, self._host, asked.stall_timeout_s, asked.log_level, is_orphan
            )
        outcome = await self._host.outcome(asked)
        try:
            packed = pack(outcome)
        except Exception as error:
            packed = pack(failure_of(error))
        self._channel.send(number, packed)


def die_with(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends; exit if that has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
