"""JSON over HTTP, for what runs elsewhere: sandboxes, judges, remote managers, engines.

One client is one limit: at most `max_concurrent` requests are under way over the whole run. Its
requests are made on an event loop in a thread, both the client's own, so that it serves coroutines
of any loop (`post`) and threads without one (`post_blocking`) alike.

A request that fails in passing is tried again, with a back-off that doubles and jitters: at the
statuses 429, 502, 503 and 504, and where a connection is refused, cut or silent. Any other failure,
and the last of these, is a `RemoteError`.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from winnow.errors import RewardError
from winnow.observe.files import one_line

T = TypeVar("T")
RETRY_STATUSES = frozenset({429, 502, 503, 504})
_LONGEST_BACKOFF_S = 30.0
LONGEST_RETRY_AFTER_S = 60.0
_SHOWN = 200
"""Characters of a refusal's text that are shown."""
_LOOPBACK: Mapping[str, httpx.AsyncBaseTransport | None] = {
    f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")
}
"""A proxy of the environment's is never asked for these."""


@dataclass(eq=False)
class RemoteError(Exception):
    """A request that came to nothing."""

    line: str
    """One line for people, without secrets."""
    status: int | None = None
    """Status of a refusal; None where no answer came, or none that is whole and JSON."""
    retry_after_s: float | None = None
    """Seconds after which a refusal asks to be tried again."""
    is_transient: bool = False
    """True if the same request may be answered later."""

    def __str__(self) -> str:
        return self.line


@dataclass(eq=False)
class JsonClient:
    """A client of one service; safe to use from any thread and any event loop.

    Raises:
        RewardError: the address is none.
    """

    base_url: str
    """Paths are put behind it; a section of the configuration has checked it."""
    token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer`, and kept out of every error."""
    max_concurrent: int = 64
    """Requests under way at once, their pauses between tries included."""
    tries: int = 3
    """Times that a request is sent in all."""
    backoff_s: float = 0.5
    """Pause after the first try; it doubles with each."""
    max_bytes: int = 32 << 20
    """Longest answer that is read, unpacked."""

    def __post_init__(self) -> None:
        try:
            self._url = httpx.URL(self.base_url.rstrip("/"))
        except httpx.InvalidURL as error:
            raise RewardError(f"{self.base_url} is no address ({error}); mend it") from None
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.token is not None:
            self._headers["Authorization"] = f"Bearer {self.token}"
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON and wait for JSON.

        Args:
            path: behind the base address.
            body: plain data; None asks by GET.
            timeout_s: for each try, from its connection to the end of its answer.

        Raises:
            RemoteError: no usable answer came.
            ValueError: the body is no plain data, or holds NaN.
        """
        return await asyncio.wrap_future(self.submit(self.request(path, body, timeout_s)))

    def post_blocking(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON and wait for JSON, as `post` does, in a thread without an event loop."""
        return self.submit(self.request(path, body, timeout_s)).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on this client's event loop; it may call `request`.

        Raises:
            RemoteError: the client is closed.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise self._closed_error()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(self.max_concurrent)
                self._client = httpx.AsyncClient(
                    headers=self._headers,
                    timeout=None,
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
                    mounts=_LOOPBACK,
                )
                run, name = self._loop.run_forever, f"http {self._url.host}"
                self._thread = threading.Thread(target=run, name=name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End all requests; each then fails as unreachable. May be called twice."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._cancel_requests(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def _cancel_requests(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await loop.shutdown_default_executor()

    async def request(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON and wait for JSON, as `post` does, on this client's event loop."""
        try:
            async with self._slots:
                for number in range(1, self.tries + 1):
                    try:
                        return await self.attempt(path, body, timeout_s, number)
                    except RemoteError as error:
                        if not error.is_transient:
                            raise
                        if number == self.tries:
                            error.line += f", {number} times over" if number > 1 else ""
                            raise error from None
                        await asyncio.sleep(self._retry_delay_s(number, error.retry_after_s))
        except asyncio.CancelledError:
            if self._is_closed:
                raise self._closed_error() from None
            raise
        raise AssertionError("unreachable")

    async def attempt(self, path: str, body: Any, timeout_s: float, number: int) -> Any:
        """Send a request once; `request` calls this, and again after a passing error.

        Args:
            number: of the try, from 1.
        """
        async with self._open_response(path, body, timeout_s) as response:
            data = await self._read_body(response)
        if not response.is_success:
            raise self._response_error(response, data)
        return self._parse_json(data)

    async def stream_events(
        self, path: str, body: Any, idle_timeout_s: float
    ) -> AsyncGenerator[Any]:
        """Send a request once, on this client's event loop; yield the JSON of each event it sends.

        Args:
            idle_timeout_s: longest wait for the next part of the answer.

        Raises:
            RemoteError: it was refused, is no stream of events, or ended without `[DONE]`.
        """
        async with self._open_response(path, body, None, idle_timeout_s) as response:
            kind = response.headers.get("Content-Type", "")
            if not response.is_success or not kind.startswith("text/event-stream"):
                raise self._response_error(response, await self._read_body(response))
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield self._parse_json(text)
        raise self.make_error("ended its answer early", is_transient=True)

    @asynccontextmanager
    async def _open_response(
        self, path: str, body: Any, timeout_s: float | None, idle_timeout_s: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request once and open its answer; what goes wrong meanwhile is a RemoteError.

        Args:
            timeout_s: from the connection to the end of the block.
            idle_timeout_s: for each wait.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        method, url = "GET" if body is None else "POST", f"{self._url}/{path.lstrip('/')}"
        response = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(
                    method, url, content=content, timeout=idle_timeout_s
                ) as response,
            ):
                yield response
        except (TimeoutError, httpx.TimeoutException):
            reason = f"did not answer within {idle_timeout_s or timeout_s:g} s"
            raise self.make_error(reason, is_transient=True) from None
        except httpx.DecodingError as error:
            raise self.make_error(
                f"answered with what cannot be unpacked: {one_line(error)}"
            ) from None
        except httpx.RequestError as error:
            reason = "cannot be reached" if response is None else "cut its answer off"
            raise self.make_error(f"{reason}: {one_line(error)}", is_transient=True) from None

    def _response_error(self, response: httpx.Response, data: bytes) -> RemoteError:
        status = response.status_code
        if response.is_success:
            return self.make_error(
                f"answered with {len(data):,} bytes that are no stream of events"
            )
        text = " ".join(data[: 20 * _SHOWN].decode(errors="replace").split())
        reason = f"answered {status}{': ' if text else ''}{text}"
        retry_after_s = _parse_retry_after(response.headers.get("Retry-After"))
        return self.make_error(reason, status, retry_after_s, status in RETRY_STATUSES)

    def _parse_json(self, data: str | bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self.make_error(f"answered with {len(data):,} bytes that are no JSON") from None

    async def _read_body(self, response: httpx.Response) -> bytes:
        parts = bytearray()
        async for part in response.aiter_bytes():
            parts += part
            if len(parts) > self.max_bytes:
                raise self.make_error(f"answered with more than {self.max_bytes:,} bytes")
        return bytes(parts)

    def make_error(
        self,
        reason: str,
        status: int | None = None,
        retry_after_s: float | None = None,
        is_transient: bool = False,
    ) -> RemoteError:
        """Return the error for what this service did, cut to a line and without the token."""
        reason = self.redact_token(reason)
        reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}…"
        return RemoteError(f"{self._url} {reason}", status, retry_after_s, is_transient)

    def redact_token(self, text: str) -> str:
        """Return the text with the token taken out."""
        return text.replace(self.token, "(secret)") if self.token else text

    def _closed_error(self) -> RemoteError:
        return self.make_error("is not asked any more: the client is closed")

    def _retry_delay_s(self, tries: int, retry_after_s: float | None) -> float:
        most = min(self.backoff_s * 2.0 ** (tries - 1), _LONGEST_BACKOFF_S)
        # Jitter is no part of a run's random numbers: it moves times, never scores.
        backoff_s = most * random.SystemRandom().uniform(0.5, 1.0)
        # A server that asks for no pause at all does not switch ours off.
        return max(backoff_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))


def read_token(variable: str | None, field: str) -> str | None:
    """The token that an environment variable holds; None where none is named.

    Args:
        field: that names the variable, for the error.

    Raises:
        RewardError: there is no such variable, it is empty, or no header can hold what it does.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"{field} is {variable}, but there is no such environment variable; export {variable}"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise RewardError(
            f"{field} is {variable}, whose value must consist of ASCII characters without blanks "
            f"and breaks; export another {variable}"
        )
    return token


def _parse_retry_after(value: str | None) -> float | None:
    """Seconds that a server asks for: a number, or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
