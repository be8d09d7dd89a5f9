"""Messages between two processes of one machine: calls, their outcomes, and the arrays in them.

A message is one packet of a SOCK_SEQPACKET socket: a number and a pickle, with the arrays' bytes
beside it as they are. What is too large for a packet lies in anonymous shared memory whose
descriptor goes with the packet, so that several receivers read the same pages and nobody has a file
to take away: the memory is free once the last array over it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PACKET_BYTES = 1 << 15
_NUMBER = struct.Struct("=Q")
_LENGTH = struct.Struct("=Q")
_ALIGNMENT = 64
_WRITE_BYTES = 1 << 30
Bytes = bytes | memoryview


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
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = _laid_out([stream, *(buffer.raw() for buffer in buffers)])
    if sum(len(part) for part in parts) <= PACKET_BYTES:
        return Packed(b"".join(parts))
    descriptor = os.memfd_create("winnow", os.MFD_CLOEXEC)
    try:
        for part in parts:
            _write(descriptor, part)
    except BaseException:
        os.close(descriptor)
        raise
    return Packed(b"", descriptor)


def unpack(data: Bytes | mmap.mmap) -> Any:
    """Read a value from what `pack` laid out; its arrays are views of `data`."""
    view = memoryview(data)
    (count,) = _LENGTH.unpack_from(view)
    lengths = [_LENGTH.unpack_from(view, _LENGTH.size * (1 + i))[0] for i in range(count)]
    start = _LENGTH.size * (1 + count)
    parts = []
    for length in lengths:
        start += -start % _ALIGNMENT
        parts.append(view[start : start + length])
        start += length
    return pickle.loads(parts[0], buffers=[part.toreadonly() for part in parts[1:]])


def send(channel: socket.socket, number: int, packed: Packed) -> None:
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


def receive(channel: socket.socket) -> tuple[int, Bytes | mmap.mmap] | None:
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
        on_cut: called once the other end is closed.
    """

    def __init__(
        self,
        end: socket.socket,
        on_message: Callable[[int, Bytes | mmap.mmap], None],
        on_cut: Callable[[], None],
    ) -> None:
        end.setblocking(False)
        self._socket, self._on_message, self._on_cut = end, on_message, on_cut
        self._unsent: deque[tuple[int, Packed]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end, self.receive)
        self.is_cut = False

    def send(self, number: int, packed: Packed) -> None:
        """Send a message now or as soon as the socket takes it."""
        self._unsent.append((number, packed))
        self._flush()

    def receive(self) -> None:
        """Take in what has come."""
        while not self.is_cut:
            try:
                message = receive(self._socket)
            except BlockingIOError:
                return
            if message is not None:
                self._on_message(*message)
                continue
            self.is_cut = True
            self._loop.remove_reader(self._socket)
            self._on_cut()

    def hang_up(self) -> None:
        """Take and send no more; the other end sees the socket closed."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):  # the other process is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give back what is held."""
        self.hang_up()
        self._socket.close()
        self._unsent.clear()

    def _flush(self) -> None:
        while self._unsent:
            try:
                send(self._socket, *self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError:  # the other end is gone, which is about to be read
                pass
            self._unsent.popleft()
        self._loop.remove_writer(self._socket)


def _laid_out(parts: Sequence[Bytes]) -> list[Bytes]:
    """Lay out a table of the parts' lengths, then the parts, each beginning at a multiple of 64."""
    sizes = [len(part) for part in parts]
    table = b"".join(_LENGTH.pack(size) for size in (len(parts), *sizes))
    found: list[Bytes] = [table]
    end = len(table)
    for part, size in zip(parts, sizes, strict=True):
        gap = -end % _ALIGNMENT
        found += [bytes(gap), part]
        end += gap + size
    return found


def _write(descriptor: int, part: Bytes) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
