"""A worker in a Ray actor: the actor's class. It runs in the actor's process.

Calls come as Ray delivers them, in any order, and run in that of their numbers. What the process
prints and logs goes to the driver by a connection of its own (`logs`), not by Ray's log files.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

from winnow.workers.array_refs import SplitResult
from winnow.workers.host import (
    Call,
    CallResult,
    Host,
    Outcome,
    WorkerJob,
    failure_of,
    free_port,
)
from winnow.workers.logs import LogSender, start_sending
from winnow.workers.ray.wire import Parcel, unpack

CONNECT_S = 60.0


@dataclass(frozen=True)
class Place:
    """The process and the node of an actor."""

    pid: int
    namespace: str
    """Names the machine's boot and its space of process ids: two that agree see each other's."""
    address: str
    """The node's, as it reaches the driver."""
    free_port: int


class RayWorker:
    """Hosts one worker.

    Args:
        driver: host and port at which the driver takes logs.
        token: tells the driver which worker this is; no other process knows it.
    """

    def __init__(self, driver: tuple[str, int], token: str) -> None:
        self._driver, self._token = driver, token
        self._stream: socket.socket | None = None
        self._host = Host()
        self._next = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    async def connect(self) -> Place:
        """Send what is printed to the driver from now on; returns where this process is.

        Raises:
            OSError: the driver cannot be reached from this node.
        """
        self._stream = socket.create_connection(self._driver, timeout=CONNECT_S)
        self._stream.settimeout(None)
        self._stream.sendall(f"{self._token}\n".encode())
        self._teller = LogSender(self._stream.fileno())
        self._teller.become_output()
        address = self._stream.getsockname()[0]
        return Place(os.getpid(), process_namespace(), address, free_port(address))

    async def call(self, number: int, parcel: Parcel) -> tuple[Outcome, Any]:
        """Run a call when all before it have begun.

        Returns:
            The outcome, and apart from it what the result keeps here.
        """
        if number != self._next:
            turn = self._early[number] = asyncio.get_running_loop().create_future()
            await turn
        self._next += 1
        if self._next in self._early:
            self._early.pop(self._next).set_result(None)
        try:
            asked: WorkerJob | Call = unpack(parcel)
        except Exception as error:  # such as a class that is not to be found here
            return failure_of(error), None
        if isinstance(asked, WorkerJob):
            sys.path += [path for path in asked.python_path if path not in sys.path]
            if os.path.isdir(asked.folder):  # else each path must be whole
                os.chdir(asked.folder)
            start_sending(
                self._teller, self._host, asked.stall_timeout_s, asked.log_level, self._is_orphan
            )
        outcome = await self._host.outcome(asked)
        if isinstance(outcome, CallResult) and isinstance(outcome.value, SplitResult):
            return outcome, outcome.value.block.take()
        return outcome, None

    def _is_orphan(self) -> bool:
        """Return whether the driver has closed the connection, or is gone."""
        assert self._stream is not None
        try:
            return self._stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def process_namespace() -> str:
    """Name the processes that this one can see: the machine's boot, and its namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
