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
from collections import deque

from winnow.workers.host import Call, Host, Job, Outcome, failure_of
from winnow.workers.logs import LogSender, start_sending
from winnow.workers.wire import Bytes, Packed, pack, receive, send, unpack

_PR_SET_PDEATHSIG = 1
_LEFT_TO_THE_DRIVER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve until the driver is gone, or kills this process."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    for number in _LEFT_TO_THE_DRIVER:
        signal.signal(number, lambda *_: None)  # a handler; what is ignored, children ignore too
    teller = LogSender(1)
    teller.become_output()
    asyncio.run(_Server(socket.socket(fileno=descriptor), teller, parent).serve())


class _Server:
    def __init__(self, channel: socket.socket, teller: LogSender, parent: int) -> None:
        self._channel, self._teller, self._parent = channel, teller, parent
        channel.setblocking(False)
        self._host = Host()
        self._unsent: deque[tuple[int, Packed]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()

    async def serve(self) -> None:
        asyncio.get_running_loop().add_reader(self._channel, self._read)
        await self._is_over.wait()
        os._exit(0)  # whatever still runs is of no use to anyone

    def _read(self) -> None:
        try:
            message = receive(self._channel)
        except BlockingIOError:
            return
        if message is None:
            self._is_over.set()
            return
        task = asyncio.get_running_loop().create_task(self._run(*message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, number: int, data: Bytes | mmap.mmap) -> None:
        try:
            asked: Job | Call = unpack(data)
        except BaseException as error:  # whatever a class does when it is read
            self._answer(number, failure_of(error))
            return
        del data  # arrays alone keep it from here on
        if isinstance(asked, Job):
            sys.path[:] = asked.python_path
            start_sending(
                self._teller,
                self._host,
                asked.stall_timeout_s,
                asked.log_level,
                lambda: os.getppid() != self._parent,
            )
        self._answer(number, await self._host.outcome(asked))

    def _answer(self, number: int, outcome: Outcome) -> None:
        try:
            packed = pack(outcome)
        except Exception as error:
            packed = pack(failure_of(error))
        self._unsent.append((number, packed))
        self._write()

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            try:
                send(self._channel, *self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._channel, self._write)
                return
            except OSError:
                self._is_over.set()
                return
            self._unsent.popleft()[1].release()
        loop.remove_writer(self._channel)


def die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; be gone if it has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
