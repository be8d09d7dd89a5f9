"""Processes of this machine: their messages, and the driver's end of a connection.

A message, such as a call or its result, is one packet of a SOCK_SEQPACKET socket: a number and a
pickle, followed by the buffers of arrays. A message that is too large for a packet is written to
anonymous shared memory, whose descriptor is sent with the packet. Several receivers then map the
same pages, no file has to be removed, and the memory is freed with the last array over it.
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
_GONE_S = 5.0
"""Limit for a killed process to exit that was not connected yet."""
Bytes = bytes | memoryview
Follow = Callable[[asyncio.StreamReader], Coroutine[Any, Any, None]]


@dataclass(eq=False)
class Packed:
    """A serialised value, for one or several receivers."""

    inline: bytes
    """The value; empty if it is in shared memory."""
    descriptor: int = -1
    """Descriptor of the shared memory; -1 if there is none."""

    def __del__(self) -> None:
        """Close the sender's descriptor; receivers have their own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def pack(value: Any) -> Packed:
    """Serialise a value once.

    Raises:
        Exception: the value cannot be pickled.
    """
    padded = _serialise(value)
    if sum(map(len, padded)) <= PACKET_BYTES:
        return Packed(b"".join(padded))
    packed = Packed(b"", os.memfd_create("winnow", os.MFD_CLOEXEC))
    with open(packed.descriptor, "wb", closefd=False) as file:
        file.writelines(padded)
    return packed


def _serialise(value: Any) -> list[Bytes]:
    """Return the parts that `unpack` reads, concatenated: table of lengths, pickle, buffers."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts: list[Bytes] = [stream, *(buffer.raw() for buffer in buffers)]
    lengths = [len(part) for part in parts]
    table = struct.pack(f"={1 + len(parts)}Q", len(parts), *lengths)
    return [each for part in (table, *parts) for each in (part, _padding(len(part)))]


def unpack(data: Bytes | mmap.mmap) -> Any:
    """Deserialise a value of `pack`; its arrays are read-only views of `data`."""
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
    """A `Handle` of a value in the anonymous memory of another process of this machine."""

    role: str
    rank: int
    """Rank of the worker that stored it."""
    pid: int
    """Process of that worker."""
    descriptor: int
    """Descriptor of the memory in that process."""
    start: int
    size: int
    """Bytes of the value."""

    def prefetch(self) -> None:
        """Do nothing: the memory is mapped, not copied."""

    def get(self) -> Any:
        try:
            # The process belongs to the same user. No file has to be removed later.
            with open(f"/proc/{self.pid}/fd/{self.descriptor}", "rb") as file:
                mapping = file.fileno(), self.size, mmap.MAP_SHARED, mmap.PROT_READ
                return unpack(mmap.mmap(*mapping, offset=self.start))
        except (OSError, ValueError) as error:
            line = f"data of {self.role}[{self.rank}] is lost: its process has exited ({error})"
            raise WorkerError(line, self.role, self.rank) from error


class SharedStore:
    """A `Store` in anonymous memory, for workers of one machine.

    All values share one descriptor. The memory is freed after it is closed, or the process has
    exited, and the last array over it is gone.

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
    """Return the padding after so many bytes, with which the next part is aligned to 64."""
    return bytes(-length % _ALIGNMENT)


def send_message(channel: socket.socket, number: int, packed: Packed) -> None:
    """Send one message; the same may be sent to several sockets.

    Raises:
        BlockingIOError: the socket's buffer is full; nothing was sent.
        OSError: the receiver has closed the socket.
    """
    message = [_NUMBER.pack(number), packed.inline]
    if packed.descriptor < 0:
        channel.sendmsg(message)
    else:
        socket.send_fds(channel, message, [packed.descriptor])


def receive_message(channel: socket.socket) -> tuple[int, Bytes | mmap.mmap] | None:
    """Return the number and data of the next message; None if the sender has closed the socket.

    Raises:
        BlockingIOError: there is no message yet.
    """
    size = _NUMBER.size + PACKET_BYTES
    try:
        data, descriptors, _, _ = socket.recv_fds(channel, size, 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # Raised once if the sender left messages unread; those that it sent come after it.
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
    """One end of a socket in an event loop, with a queue of unsent messages.

    Args:
        on_message: called with the number and data of each message.
        on_peer_closed: called when the other end is closed.
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
        """Send a message now, or as soon as the socket has room."""
        self._unsent.append((number, packed))
        self._flush()

    def receive(self) -> None:
        """Handle all messages that have arrived."""
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
        """Shut the socket down; an idle process at the other end then exits."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):  # the other process has exited
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the socket down and free all resources."""
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
            except OSError:  # the other end is closed, which `receive` will see
                pass
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)


class LocalConnection:
    """The driver's end of one process of this machine (`group.WorkerConnection`).

    The process leads a new session: Ctrl-C in a terminal does not reach it, and its own children
    are killed with it.
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

        Linux kills the process when the calling thread ends.

        Args:
            variables: environment variables that override this process's.
            follow: reads its output to the end.
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
        with contextlib.suppress(OSError):  # above the user's limit; the default size will do
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        connection = cls(process, ours)
        stream, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        try:
            connection._output, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stream), process.stdout
            )
        except BaseException:  # the caller has no connection to end it by
            connection.kill()
            await connection.wait_for_exit(_GONE_S)
            await connection.release()
            raise
        connection._following = loop.create_task(follow(stream))
        return connection

    def send(self, number: int, payload: Packed, on_result: Callable[[Any], None]) -> None:
        self._waiting[number] = on_result
        self.channel.send(number, payload)

    def exit_reason(self) -> str | None:
        if self._process.returncode is not None:
            return _describe_exit(self._process.returncode)
        # Not reaped before `release`, so that no other process can get its pid.
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
        except Exception as error:  # a class that the driver cannot unpickle
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
