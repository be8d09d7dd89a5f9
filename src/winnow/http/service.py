"""JSON services over HTTP: an application with one POST route, and the server that runs it.

    connection ─► host or token ─► content type ─► request limit ─► body, bounded ─► handler

`winnow reward serve` and `winnow sandbox serve` are such services. A client without the token is
refused before its body is read. A service without a token accepts requests for localhost with a
JSON body only, so that pages in a local browser cannot use it, by DNS rebinding neither.

Resources that unauthenticated clients can hold are bounded: connections stay below the limit of
open files, a request's head must arrive within `_HEAD_S` seconds and its body within `_BODY_S`, and
idle connections are closed in favour of new ones. None of this is logged.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from types import FrameType
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from winnow.errors import RewardError

_HEAD_S = 10.0
_BODY_S = 30.0
_DRAIN_S = 5.0
_DRAIN_BYTES = 64 << 20
_MOST_DRAINED = 32
"""Most refused requests whose bodies are read to the end at a time; others are closed at once."""
_LAST_ANSWERS_S = 5
_BACKLOG = 100
_KERNEL_BACKLOG = 4096
_NOT_LOCAL = "a service without a token accepts requests for localhost only; set --token-env"

Handler = Callable[[Any, Request], Awaitable[dict[str, Any]]]
"""Returns the response body for a request body; may raise `Refusal`."""


class Refusal(HTTPException):  # type: ignore[misc]
    """An error response of a `JsonService`: status and message. 503 asks for a retry."""


class Service(Protocol):
    """An application that `serve` runs."""

    app: Any
    """ASGI application."""
    max_connections: int
    """Most open connections."""

    def close(self) -> None:
        """End the requests in progress, before connections are closed."""


@dataclass(eq=False)
class JsonService:
    """An ASGI application (`app`) with a JSON route and `GET /health`; for one event loop."""

    path: str
    """Route of the POST requests."""
    handle: Handler
    """Makes the response body of a POST request."""
    health: Callable[[], dict[str, Any]]
    """Makes the response body of `GET /health`."""
    max_requests: int
    """Most requests in progress, queued ones included."""
    max_body_bytes: int
    token: str | None
    error_key: str
    """Key of the message in an error response."""
    stop: Callable[[], None] = lambda: None
    """Ends the work of requests in progress, before connections are closed."""
    reserved_files: int = 0
    """Open files that handlers need."""
    active_requests: int = 0
    """Admitted requests without a response yet."""
    is_closing: bool = False
    """True once new requests get a 503."""
    _drained: int = 0

    def __post_init__(self) -> None:
        self.max_connections = connection_limit(self.reserved_files)
        # Half: refused requests need connections, too.
        self._places = min(self.max_requests, max(1, self.max_connections // 2))
        self.app = Starlette(
            routes=[
                Route(self.path, self._post, methods=["POST"]),
                Route("/health", self._get_health, methods=["GET"]),
            ]
        )

    def close(self) -> None:
        """End the requests in progress with a 503."""
        self.is_closing = True
        self.stop()

    async def _get_health(self, request: Request) -> Response:
        if self.token is None and not is_local_host_header(request.headers.get("host", "")):
            return self._error_response(Refusal(421, _NOT_LOCAL))
        return _json_response(self.health())

    async def _post(self, request: Request) -> Response:
        try:
            self._admit(request)
            self.active_requests += 1
            try:
                return _json_response(await self.handle(await self._read_json(request), request))
            finally:
                self.active_requests -= 1
        except Refusal as refusal:
            return self._error_response(refusal, is_read=await self._drain_body(request))
        except ClientDisconnect:
            return self._error_response(Refusal(400, "the client disconnected"))
        except asyncio.CancelledError:  # by uvicorn, after its graceful shutdown timed out
            return self._error_response(Refusal(503, "the service is closing"))

    def _admit(self, request: Request) -> None:
        if self.token is None and not is_local_host_header(request.headers.get("host", "")):
            raise Refusal(421, _NOT_LOCAL)
        authorization = request.headers.get("authorization", "")
        if self.token is not None and not has_token(authorization, self.token):
            raise Refusal(401, "the token is missing or wrong")
        kind = request.headers.get("content-type", "")
        # Browsers send this type to another origin only after a preflight request.
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, f"the body must be application/json, got {kind or 'nothing'}")
        if self.is_closing:
            raise Refusal(503, "the service is closing")
        if self.active_requests >= self._places:
            raise Refusal(503, f"{self.active_requests} requests are in progress, the limit")

    async def _read_json(self, request: Request) -> Any:
        most = self.max_body_bytes
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise Refusal(413, f"the body must be at most {most:,} bytes, got {length}")
        data = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise Refusal(413, f"the body must be at most {most:,} bytes")
        except TimeoutError:
            raise Refusal(408, f"the body was not received within {_BODY_S:g} s") from None
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise Refusal(400, f"the body ({len(data):,} bytes) is not JSON") from None

    async def _drain_body(self, request: Request) -> bool:
        """Read the rest of a refused request for a limited time; return whether it ended.

        A client whose connection is closed while it sends may not see the response.
        """
        if self._drained >= _MOST_DRAINED:
            return False
        remaining = max(_DRAIN_BYTES, 2 * self.max_body_bytes)
        self._drained += 1
        try:
            async with asyncio.timeout(_DRAIN_S):
                async for part in request.stream():
                    remaining -= len(part)
                    if remaining < 0:
                        return False
        except RuntimeError:  # it has been read already
            return True
        except (TimeoutError, ClientDisconnect):
            return False
        finally:
            self._drained -= 1
        return True

    def _error_response(self, refusal: Refusal, is_read: bool = True) -> Response:
        headers = {} if is_read else {"Connection": "close"}
        if refusal.status_code == 503:
            headers["Retry-After"] = "1"
        if refusal.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return _json_response({self.error_key: refusal.detail}, refusal.status_code, **headers)


def _json_response(body: dict[str, Any], status: int = 200, **headers: str) -> Response:
    # In ASCII: an answer may have lone surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(body), status, headers, "application/json")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of this machine's loopback interface."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def is_local_host_header(host: str) -> bool:
    """Return whether a `Host` header, with or without port, names a loopback address."""
    with suppress(ValueError):
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    return False


def has_token(authorization: str, token: str) -> bool:
    """Return whether an `Authorization` header has the token; `Bearer` in any case."""
    scheme, _, credentials = authorization.partition(" ")
    is_same = hmac.compare_digest(credentials.strip().encode(), token.encode())
    return is_same and scheme.lower() == "bearer"


class _Connection(H11Protocol):  # type: ignore[misc]
    """A connection with a timeout for request heads, which is closed for a new one while idle."""

    _connected_at = 0.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._connected_at = self.loop.time()
        self._start_head_timer()
        most = cast(int, self.limit_concurrency)
        if len(self.connections) >= most:
            clients = cast("set[_Connection]", self.connections)
            idle = [each for each in clients if each.cycle is None or each.cycle.response_complete]
            # The newest last: its request may be on the way.
            min(idle, key=lambda c: (c is self, c._head_timer is None, c._connected_at))._abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_S, self._abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _abort(self) -> None:
        self._cancel_head_timer()
        self.connections.discard(self)  # at once, not in the loop's next iteration
        self.transport.abort()


def connection_limit(reserved_files: int) -> int:
    """Return how many connections leave `reserved_files` open files free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # asyncio accepts three backlogs of connections before it handles the first of them.
    return max(16, min(soft, 1 << 16) - 3 * _backlog() - 64 - reserved_files)


def _backlog() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(_BACKLOG, soft // 8))


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return a listening socket; port 0 chooses a free one.

    Raises:
        RewardError: the address cannot be used, or is not loopback and there is no token.
    """
    if not is_loopback(host) and token is None:
        raise RewardError(
            f"--host is {host}, which other machines can reach, but there is no token; "
            "name a variable with a token by --token-env, or omit --host"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_backlog())
    except (OSError, OverflowError, UnicodeError) as error:
        raise RewardError(
            f"--port is {port}, but cannot listen on {host}:{port} ({error}); choose another"
        ) from error
    # Connections inherit it. asyncio does not set it on sockets made like this one, and then a
    # response's body waits 40 ms for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listener_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):  # type: ignore[misc]
    """The uvicorn server of a service.

    Args:
        ready: called when the service accepts requests.
    """

    def __init__(self, service: Service, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                service.app,
                http=_Connection,
                ws="none",
                lifespan="off",
                log_level="error",  # warnings about bad requests could fill the disk
                access_log=False,
                server_header=False,
                backlog=_backlog(),
                limit_concurrency=service.max_connections,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
            )
        )
        self._service, self._ready = service, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            # More than asyncio's own backlog, which is what it accepts at a time.
            listener.listen(_KERNEL_BACKLOG)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        await super().shutdown(sockets)


def serve(service: Service, listener: socket.socket, banner: str) -> int:
    """Serve until SIGTERM or Ctrl-C, in the main thread; return the exit code.

    Args:
        banner: printed when the service accepts requests.
    """
    arrived: list[int] = []
    server = Server(service, lambda: print(banner, flush=True))

    def on_signal(number: int, _: FrameType | None) -> None:
        arrived.append(number)
        server.should_exit = True  # it may not have started yet

    # The server handles these signals while it runs, and raises them again at its end.
    before = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not arrived:
        raise RuntimeError("the server exited without a signal")
    print(f"winnow: stopped by {signal.Signals(arrived[0]).name}", file=sys.stderr)
    return 130 if arrived[0] == signal.SIGINT else 0
