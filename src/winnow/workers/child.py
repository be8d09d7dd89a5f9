"""A worker's process on this machine: `python -m winnow.workers.child DESCRIPTOR PARENT`.

Calls come over the socket DESCRIPTOR (`local`), the first message is the job. The driver alone
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

from winnow.workers.host import Host, describe_failure
from winnow.workers.local import Bytes, Channel, pack, unpack
from winnow.workers.logs import LogSender
from winnow.workers.threads import spawn

_PR_SET_PDEATHSIG = 1
_DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Serve until the driver is gone, or kills this process."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    for number in _DRIVER_SIGNALS:
        signal.signal(number, lambda *_: None)  # a handler; what is ignored, children ignore too
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
            del data  # arrays alone keep it from here on
            packed = pack(await host.handle(request))
        except BaseException as error:  # of a class when it is read, or a result that cannot travel
            packed = pack(describe_failure(error))
        channel.send(number, packed)

    def on_message(number: int, data: Bytes | mmap.mmap) -> None:
        spawn(run_call(number, data), tasks)

    channel = Channel(end, on_message, is_over.set)
    await is_over.wait()
    os._exit(0)  # whatever still runs is of no use to anyone


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have Linux signal this process when the thread that started it ends; exit if it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
