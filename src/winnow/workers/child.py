"""A worker's process on this machine: `python -m winnow.workers.child DESCRIPTOR PARENT`.

Calls arrive at the socket DESCRIPTOR (`local`); the first is a `WorkerSpec`. The process ignores
SIGINT, SIGTERM and SIGHUP, which a terminal sends to the driver, too: the driver ends it, and Linux
kills it if the driver dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import socket
import sys

from winnow.workers.host import Host, describe_failure
from winnow.workers.local import Bytes, Channel, pack, unpack
from winnow.workers.logs import LogSender
from winnow.workers.threads import spawn

_PR_SET_PDEATHSIG = 1
_DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve calls until the driver exits or kills this process."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    for number in _DRIVER_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children inherit
    sender = LogSender(1)
    sender.redirect_output()
    host = Host(sender, is_orphan=lambda: os.getppid() != parent)
    asyncio.run(_serve(socket.socket(fileno=descriptor), host))


async def _serve(end: socket.socket, host: Host) -> None:
    tasks: set[asyncio.Task[None]] = set()
    is_over = asyncio.Event()

    async def run_call(number: int, data: Bytes | mmap.mmap) -> None:
        try:
            request = unpack(data)
            del data  # only arrays refer to it from now on
            packed = pack(await host.handle(request))
        except BaseException as error:  # when unpickling the request or pickling the result
            packed = pack(describe_failure(error))
        channel.send(number, packed)

    def on_message(number: int, data: Bytes | mmap.mmap) -> None:
        spawn(run_call(number, data), tasks)

    channel = Channel(end, on_message, is_over.set)
    await is_over.wait()
    os._exit(0)  # without waiting for running calls


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux signal this process when the thread that started it ends; exit if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
