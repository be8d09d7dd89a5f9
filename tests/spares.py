"""Processes forked beforehand, for a process to start what would be another Python of winnow's.

A run starts Pythons of its own: a supervisor its child, a driver its ranks and engines. Each would
import torch for seconds of CPU. A process of `tests.forked` has forked a few idle children first,
while it had one thread and nothing open. Where it then starts `python -m` one of `MODULES`, through
`subprocess.Popen`, an idle child becomes that process: it gets the words, the variables and the
descriptors, and its session or group. A test's own process, which has threads and files, adopts one
that the server forks instead (`adopt`). All the rest is as after an exec: a process of its own, the
same parent, which alone waits for it, and the system's default for each signal.

What differs: hashes of strings have the server's seed, `PYTHON...` variables come too late, and the
kernel shows the server's command line, so the name (`/proc/PID/comm`) says which module it is.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MODULES = "winnow.cli.main", "winnow.workers.child"
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LONGEST_NAME = 15
_prctl = ctypes.CDLL(None).prctl
_MESSAGE_BYTES = 1 << 18


class Spares:
    """Idle children of this process, which must have one thread and no file open to be kept.

    Args:
        count: how many there are; when they are used up, processes start as usual.
        become: called in a child with its module and the words after it.
    """

    def __init__(self, count: int, become: Callable[[str, Sequence[str]], None]) -> None:
        self._idle: list[tuple[int, socket.socket]] = []
        for _ in range(count):
            self._idle.append(self._fork(become))

    def take(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Have the oldest child become what is ordered; its process id.

        Args:
            descriptors: for standard input, output and error, then those that are to be passed on.
        """
        pid, channel = self._idle.pop(0)
        with channel:
            socket.send_fds(channel, [json.dumps(order).encode()], list(descriptors))
            channel.recv(1)  # it is in its session, and can be killed with that
        return pid

    def install(self) -> None:
        """Use them from now on for what `subprocess.Popen` starts."""
        subprocess.Popen = popen(  # type: ignore[misc]
            lambda order, descriptors: self.take(order, descriptors) if self._idle else None
        )

    def _fork(self, become: Callable[[str, Sequence[str]], None]) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        for channel in (ours, *(channel for _, channel in self._idle)):
            channel.close()
        be_spare(theirs, parent, become)
        raise AssertionError


def be_spare(
    channel: socket.socket, parent: int, become: Callable[[str, Sequence[str]], None]
) -> None:
    """Wait for an order, in a process of its own, and carry it out to the process's end."""
    _prctl(_PR_SET_NAME, b"spare")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    message, descriptors, *_ = socket.recv_fds(channel, _MESSAGE_BYTES, 32)
    if not message:
        os._exit(0)
    _prctl(_PR_SET_PDEATHSIG, 0)
    order = json.loads(message)
    _take_place(order, descriptors, channel)
    become(order["module"], order["words"])
    sys.exit()


def popen(take: Callable[[dict[str, Any], list[int]], int | None]) -> type:
    """What can stand for `subprocess.Popen`, and has processes of `MODULES` taken.

    Args:
        take: what is ordered, and its descriptors, to a process id; None starts one as usual.
    """

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *args: Any) -> None:
            usual = super()._execute_child  # type: ignore[misc]
            asked = inspect.signature(usual).bind(*args).arguments
            ends = asked["p2cread"], asked["c2pwrite"], asked["errwrite"]
            standard = [own if fd < 0 else fd for own, fd in enumerate(ends)]
            order = _order(asked)
            pid = None if order is None else take(order, [*standard, *asked["pass_fds"]])
            if pid is None:
                usual(*args)
                return
            self.pid = pid
            self._child_created = True
            asked_pipes = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread")]
            asked_pipes += [asked[name] for name in ("c2pwrite", "errread", "errwrite")]
            self._close_pipe_fds(*asked_pipes)  # type: ignore[attr-defined]

    return Popen


def adopt(ask: Callable[[socket.socket], None], order: dict[str, Any], fds: Sequence[int]) -> int:
    """Have a server fork a process that becomes this one's child, and what is ordered; its id.

    Args:
        ask: has the server do that, and `be_orphan` with the other end of this socket.
        fds: as for `Spares.take`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # An orphan becomes the child of the nearest ancestor that says this of itself.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        with theirs:
            ask(theirs)
        pid = int(ours.recv(16))
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    with ours:
        socket.send_fds(ours, [json.dumps(order).encode()], list(fds))
        ours.recv(1)
    return pid


def be_orphan(channel: int, become: Callable[[str, Sequence[str]], None]) -> None:
    """Leave a spare, forked from this process, to the process that adopts it, and end this one."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.0005)
    with socket.socket(fileno=channel) as orders:
        orders.send(str(os.getpid()).encode())
        be_spare(orders, os.getppid(), become)


def _order(asked: dict[str, Any]) -> dict[str, Any] | None:
    """What a command asks for, if it runs one of `MODULES` in this Python."""
    command = [str(word) for word in asked["args"]]
    if command[0] != sys.executable or "-m" not in command[1:3]:
        return None
    module, *words = command[command.index("-m") + 1 :]
    if module not in MODULES:
        return None
    environment = os.environ if asked["env"] is None else asked["env"]
    return {
        "module": module,
        "words": words,
        "folder": str(asked["cwd"] or os.getcwd()),
        "environment": dict(environment),
        "descriptors": list(asked["pass_fds"]),
        "session": asked["start_new_session"],
        "group": asked["process_group"],
    }


def _take_place(order: dict[str, Any], descriptors: Sequence[int], channel: socket.socket) -> None:
    """Be where and what an exec would have made of this process."""
    name = order["module"].rpartition(".")[2]
    _prctl(_PR_SET_NAME, name[:_LONGEST_NAME].encode())
    if order["session"]:
        os.setsid()
    elif order["group"] is not None and order["group"] >= 0:
        os.setpgid(0, order["group"])
    channel.send(str(os.getpid()).encode())
    channel.close()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    wanted = [0, 1, 2, *order["descriptors"]]
    # Out of the way first: one may have the number that another is to get.
    high = max(*wanted, *map(int, os.listdir("/proc/self/fd"))) + 1
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, high + place)
    os.closerange(0, high)
    for place, number in enumerate(wanted):
        os.dup2(high + place, number)
        os.close(high + place)
