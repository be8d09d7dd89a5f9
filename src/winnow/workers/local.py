"""Processes of this machine: messages to and from one, and the driver's end of it.

A message, such as a call or its outcome, is one packet of a SOCK_SEQPACKET socket: a number and a
pickle, followed by the arrays' bytes as they are. What is too large for a packet lies in
anonymous shared memory whose descriptor goes with the packet, so that several receivers read the
same pages and nobody has a file to take away: the memory is free once the last array over it is
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from winnow.errors import WorkerError
from winnow.workers.host import describe_failure

PACKET_BYTES = 1 << 15
_NUMBER = struct.Struct("=Q")
_ALIGNMENT = 64
_PIPE_BYTES = 1 << 20
Bytes = bytes | memoryview
Follow = Callable[[asyncio.StreamReader], Coroutine[Any, Any, None]]


@dataclass(eq=False)
class Packed:
    """A value ready to be sent, to one receiver or to many."""

    inline: bytes
    """All of it; empty when it lies in shared memory."""
    descriptor: int = -1
    """The shared memory's; -1: none."""

    def __del__(self) -> None:
        """Give back what the sender holds; receivers keep theirs."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def pack(value: Any) -> Packed:
    """Serialise a value once.

    Raises:
        Exception: whatever pickle raises for a value that it cannot take.
    """
    padded = _serialise(value)
    if sum(map(len, padded)) <= PACKET_BYTES:
        return Packed(b"".join(padded))
    packed = Packed(b"", os.memfd_create("winnow", os.MFD_CLOEXEC))
    with open(packed.descriptor, "wb", closefd=False) as file:
        file.writelines(padded)
    return packed


def _serialise(value: Any) -> list[Bytes]:
    """Serialise a value into what `unpack` reads end to end."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[Bytes] = [stream, *(buffer.raw() for buffer in buffers)]
    lengths = [len(part) for part in parts]
    table = struct.pack(f"={1 + len(parts)}Q", len(parts), *lengths)
    return [each for part in (table, *parts) for each in (part, _padding(len(part)))]


def unpack(data: Bytes | mmap.mmap) -> Any:
    """Read a value from what `pack` laid out; its arrays are views of `data`, and read-only."""
    view = memoryview(data)
    (count,) = struct.unpack_from("=Q", view)
    lengths = struct.unpack_from(f"={count}Q", view, 8)
    parts, start = [], 8 * (1 + count)
    for length in lengths:
        start += len(_padding(start))
        parts.append(view[start : start + length].toreadonly())
        start += length
    return pickle.loads(parts[0], buffers=parts[1:])


@dataclass(frozen=True)
class SharedHandle:
    """A `Handle` of what lies in the anonymous memory of another process of this machine."""

    role: str
    rank: int
    """The worker's."""
    pid: int
    """Its process."""
    descriptor: int
    """The memory's in that process."""
    start: int
    size: int
    """Bytes in the memory."""

    def prefetch(self) -> None:
        """Do nothing: memory is shared at once."""

    def get(self) -> Any:
        try:
            # The process is of this user; no file is left behind that somebody must take away.
            with open(f"/proc/{self.pid}/fd/{self.descriptor}", "rb") as file:
                mapping = file.fileno(), self.size, mmap.MAP_SHARED, mmap.PROT_READ
                return unpack(mmap.mmap(*mapping, offset=self.start))
        except (OSError, ValueError) as error:
            line = f"what {self.role}[{self.rank}] wrote is lost, as its process is gone ({error})"
            raise WorkerError(line, self.role, self.rank) from error


class SharedStore:
    """A `Store` in anonymous memory, for workers of one machine.

    It has one descriptor, whatever it holds, and the memory is free once that is closed, or the
    process is gone, and the last array over it.

    Args:
        role, rank: the worker.
    """

    def __init__(self, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self._descriptor, self._end = -1, 0

    def put(self, value: Any) -> SharedHandle:
        if self._descriptor < 0:
            self._descriptor = os.memfd_create("winnow", os.MFD_CLOEXEC)
        start = self._end + -self._end % mmap.ALLOCATIONGRANULARITY
        with open(self._descriptor, "wb", closefd=False) as file:
            file.seek(start)
            file.writelines(_serialise(value))
            self._end = file.tell()
        place = self._descriptor, start, self._end - start
        return SharedHandle(self._role, self._rank, os.getpid(), *place)

    def clear(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._end = -1, 0


def _padding(length: int) -> bytes:
    """Return what comes after so many bytes, so that each part begins at a multiple of 64."""
    return bytes(-length % _ALIGNMENT)


def send_message(channel: socket.socket, number: int, packed: Packed) -> None:
    """Send one message; it may go to several sockets.

    Raises:
        BlockingIOError: the socket takes no more for now; nothing was sent.
        OSError: the receiver is gone.
    """
    message = [_NUMBER.pack(number), packed.inline]
    if packed.descriptor < 0:
        channel.sendmsg(message)
    else:
        socket.send_fds(channel, message, [packed.descriptor])


def receive_message(channel: socket.socket) -> tuple[int, Bytes | mmap.mmap] | None:
    """Take the next message: its number and what `unpack` reads; None when the sender is gone.

    Raises:
        BlockingIOError: none has come.
    """
    size = _NUMBER.size + PACKET_BYTES
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, size, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # Told once, of a sender that left messages unread, and before those that it sent.
        data, descriptors, _, _ = socket.recv_fds(channel, size, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    (number,) = _NUMBER.unpack_from(data)
    if not descriptors:
        return number, memoryview(data)[_NUMBER.size :]
    try:
        return number, mmap.mmap(descriptors[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptors[0])


class Channel:
    """One end of a socket in an event loop; messages that do not go at once wait here.

    Args:
        on_message: gets the number of each message, and what `unpack` reads.
        on_peer_closed: called once the other end is closed.
    """

    def __init__(
        self,
        end: socket.socket,
        on_message: Callable[[int, Bytes | mmap.mmap], None],
        on_peer_closed: Callable[[], None] = lambda: None,
    ) -> None:
        end.setblocking(False)
        self._socket, self._on_message, self.on_peer_closed = end, on_message, on_peer_closed
        self._unsent: deque[tuple[int, Packed]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self.receive)
        self.is_peer_closed = False
        """True if the other end has closed the socket."""

    def send(self, number: int, packed: Packed) -> None:
        """Send a message now or as soon as the socket takes it."""
        self._unsent.append((number, packed))
        self._flush()

    def receive(self) -> None:
        """Take in what has come."""
        while not self.is_peer_closed:
            try:
                message = receive_message(self._socket)
            except BlockingIOError:
                return
            if message is not None:
                self._on_message(*message)
                continue
            self.is_peer_closed = True
            self._loop.remove_reader(self._socket)
            self.on_peer_closed()

    def shut_down(self) -> None:
        """Take and send no more; an idle process at the other end then ends by itself."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):  # the other process is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give back what is held."""
        self.shut_down()
        self._socket.close()
        self._unsent.clear()

    def _flush(self) -> None:
        while self._unsent:
            try:
                send_message(self._socket, *self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:  # the other end is gone, which is about to be read
                pass
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)


class LocalConnection:
    """The driver's end of one process of this machine (`group.WorkerConnection`).

    The process leads a new session: a terminal's Ctrl-C does not reach it, and what it
    started is killed with it.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket) -> None:
        self._process = process
        self.pid = process.pid
        self.channel = Channel(end, self._on_message)
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._output: asyncio.ReadTransport | None = None
        self._following: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, module: str, variables: Mapping[str, str], follow: Follow
    ) -> LocalConnection:
        """Start `python -m MODULE DESCRIPTOR PARENT`, which reads calls from the socket.

        Linux kills the process when the thread that calls this ends.

        Args:
            variables: for the process, over this process's own.
            follow: reads what it prints, to the end.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                    bufsize=0,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**os.environ, **variables},
                )
        except BaseException:
            ours.close()
            raise
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # more than this user may have: the usual size does
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        connection = cls(process, ours)
        stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        connection._output, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), process.stdout
        )
        connection._following = loop.create_task(follow(stream))
        return connection

    def send(self, number: int, payload: Packed, on_result: Callable[[Any], None]) -> None:
        self._waiting[number] = on_result
        self.channel.send(number, payload)

    def exit_reason(self) -> str | None:
        if self._process.returncode is not None:
            return _describe_exit(self._process.returncode)
        # It is not reaped before `release`: until then no stranger can have its number.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        sign = 1 if ended.si_code == os.CLD_EXITED else -1
        return _describe_exit(sign * ended.si_status)

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait_for_exit(self, timeout_s: float) -> bool:
        give_up = time.monotonic() + timeout_s
        while self.exit_reason() is None:
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.002)
        return True

    async def release(self) -> None:
        self._process.poll()
        self.channel.close()
        if self._output is not None:
            self._output.close()
        if self._following is not None:
            self._following.cancel()

    def _on_message(self, number: int, data: Bytes | mmap.mmap) -> None:
        try:
            reply = unpack(data)
        except Exception as error:  # a class that the driver cannot read
            reply = describe_failure(error)
        self._waiting.pop(number)(reply)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
