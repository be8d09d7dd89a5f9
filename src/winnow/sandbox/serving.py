"""Runs the sandbox server until a signal ends it.

uvicorn runs in a thread beside the main one, which waits for SIGTERM and Ctrl-C: then programs
are ended, their clients told to come back, connections closed, and nothing is left behind.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import uvicorn

from winnow.config.reward import SandboxConfig
from winnow.errors import RewardError
from winnow.http.service import is_loopback
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.program import Limits
from winnow.sandbox.server import SandboxServer, ServerLimits

_MORE_CONNECTIONS = 1024
"""Idle ones, beyond those whose requests have a place."""
_LAST_ANSWERS_S = 5


def serve(
    host: str,
    port: int,
    config: SandboxConfig,
    limits: Callable[[Limits], ServerLimits],
    token: str | None,
    say: Callable[[str], None],
) -> int:
    """Serve until a signal comes; its number.

    Args:
        port: 0 takes any that is free.
        limits: those of the server, from the sandbox's own.
        say: told one line when the server can be asked.

    Raises:
        RewardError: the address cannot be had or needs a token, or there is no sandbox here.
    """
    if token is None and not is_loopback(host):
        raise RewardError(
            f"--host is {host}, where other machines may run programs on this one; name the "
            "environment variable with a token in --token-env, or take --host 127.0.0.1"
        )
    arrived: list[int] = []
    came = threading.Event()

    def take(number: int, _: FrameType | None) -> None:
        arrived.append(number)
        came.set()

    with (
        closing(_listener(host, port)) as listener,
        closing(LocalSandbox(config)) as sandbox,
        _signals(take),
    ):
        address = listener.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        with running(sandbox, limits(sandbox.limits), token, listener, came.set):
            say(f"sandbox at http://{shown}:{address[1]} ({sandbox.description})")
            came.wait()
    if not arrived:
        raise RuntimeError("the server ended by itself")
    return arrived[0]


@contextmanager
def running(
    sandbox: LocalSandbox,
    limits: ServerLimits,
    token: str | None,
    listener: socket.socket,
    ended: Callable[[], None],
) -> Iterator[None]:
    """A server in a thread of its own, from its first answer to its last.

    Args:
        ended: called when it ends, by itself too.
    """
    with closing(SandboxServer(sandbox, limits, token)) as application:
        server = uvicorn.Server(
            uvicorn.Config(
                application.app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                limit_concurrency=len(sandbox.slots) + limits.max_queued + _MORE_CONNECTIONS,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )

        def run() -> None:
            try:
                server.run([listener])
            finally:
                ended()

        thread = threading.Thread(target=run, name="sandbox server")
        thread.start()
        try:
            yield
        finally:
            application.stop()
            server.should_exit = True
            thread.join()


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise RewardError(
            f"no server can listen at --host {host} --port {port}: {said}; choose another"
        ) from None


@contextmanager
def _signals(take: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {n: signal.signal(n, take) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
