"""A service in a thread of the test's own process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from winnow.http.service import Server, Service, listen, listener_url


@contextlib.contextmanager
def running(service: Service, listener: socket.socket) -> Iterator[None]:
    """Run a service from its first answer to its last."""
    ready = threading.Event()
    server = Server(service, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="service")
    thread.start()
    try:
        assert ready.wait(60)
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def listening(service: Service) -> Iterator[str]:
    """Run a service at a free port; its address."""
    with contextlib.closing(listen("127.0.0.1", 0, None)) as listener, running(service, listener):
        yield listener_url(listener)
