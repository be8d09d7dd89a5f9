"""A real HTTP server over a socket that answers as it is told: rightly, late, or badly."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    line: str
    headers: dict[str, str]
    body: Any


Step = Callable[[socket.socket, Request], None]


@dataclass
class Served:
    """A server that runs, and what it has seen."""

    url: str
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def reply(
    status: int, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
) -> Step:
    """A whole answer: JSON, or the bytes given."""
    data = json.dumps(body).encode() if raw is None else raw

    def step(connection: socket.socket, _: Request) -> None:
        connection.sendall(_head(status, len(data), headers) + data)

    return step


def ok(body: Any) -> Step:
    """What should be."""
    return reply(200, body)


def cut(connection: socket.socket, _: Request) -> None:
    """The head and the beginning of an answer, and the end of the connection."""
    connection.sendall(_head(200, 1000, None) + b'{"half": ')


def hang_up(_: socket.socket, __: Request) -> None:
    """No answer: the connection ends."""


def dripping(pause_s: float) -> Step:
    """An answer of a million bytes, one at a time: no single wait is long."""

    def step(connection: socket.socket, _: Request) -> None:
        connection.sendall(_head(200, 1_000_000, None))
        gone = threading.Event()
        with contextlib.suppress(OSError):
            while not gone.wait(pause_s):
                connection.sendall(b" ")

    return step


def flood(connection: socket.socket, _: Request) -> None:
    """An answer without end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b" " * 65536)


def noise(connection: socket.socket, _: Request) -> None:
    """No HTTP at all."""
    connection.sendall(b"\x00\xffSSH-2.0\r\n\r\n")


def together(count: int, body: Any) -> Step:
    """Answers a moment after so many requests are there at once, or after a second."""
    barrier = threading.Barrier(count)

    def step(connection: socket.socket, request: Request) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(1)
        time.sleep(0.1)  # for more of them, were there any
        ok(body)(connection, request)

    return step


@contextlib.contextmanager
def serving(script: Sequence[Step]) -> Iterator[Served]:
    """A server whose n-th request gets the n-th step, and all behind it the last."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}")
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def handle(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = _read(connection)
            if request is None:
                return
            with served.lock:
                step = script[min(len(served.requests), len(script) - 1)]
                served.requests.append(request)
                served.now += 1
                served.most_at_once = max(served.most_at_once, served.now)
            try:
                step(connection, request)
            finally:
                with served.lock:
                    served.now -= 1
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(1)
            while connection.recv(4096):  # no reset before the answer is read
                pass

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threads.append(threading.Thread(target=handle, args=(connection,), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield served
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(5)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)


def _head(status: int, length: int, headers: dict[str, str] | None) -> bytes:
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {length}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _read(connection: socket.socket) -> Request | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    line, *rest = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (each.split(": ", 1) for each in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        part = connection.recv(65536)
        if not part:
            return None
        body += part
    return Request(line, headers, json.loads(body) if body else None)
