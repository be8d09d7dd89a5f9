"""JSON over HTTP, for remote services: sandboxes, judges, reward managers, engines.

A client sends at most `max_concurrent` requests at a time in the whole run. It has an event loop in
a thread, so that coroutines of any loop (`post`) and plain threads (`post_blocking`) can share it.

Transient errors are retried with jittered exponential backoff: statuses 429, 502, 503 and 504, and
connections that are refused, closed early or time out. Any other error, and the last of these, is
raised as a `RemoteError`.
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
"""Characters of a response that an error shows."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)
_LOOPBACK: Mapping[str, httpx.AsyncBaseTransport | None] = {
    f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")
}
"""Hosts that are reached without the environment's proxy."""


@dataclass(eq=False)
class RemoteError(Exception):
    """A request that failed."""

    line: str
    """Message of one line, without secrets."""
    status: int | None = None
    """HTTP status of an error; None if no response came, or none that is complete and JSON."""
    retry_after_s: float | None = None
    """Seconds of the response's `Retry-After`."""
    is_transient: bool = False
    """True if a retry may succeed."""

    def __str__(self) -> str:
        return self.line


@dataclass(eq=False)
class JsonClient:
    """A client of one service; safe to use from any thread and any event loop.

    Raises:
        RewardError: the URL is not valid.
    """

    base_url: str
    """Prefix of all paths."""
    token: str | None = field(default=None, repr=False)
    """Sent as `Authorization: Bearer`, and redacted in every error."""
    max_concurrent: int = 64
    """Most requests at a time, those that wait for a retry included."""
    tries: int = 3
    """Most attempts of a request."""
    backoff_s: float = 0.5
    """Delay before the first retry; it doubles with each."""
    max_bytes: int = 32 << 20
    """Largest response, decompressed."""

    def __post_init__(self) -> None:
        try:
            self._url = httpx.URL(self.base_url.rstrip("/"))
        except httpx.InvalidURL as error:
            line = f"{self.base_url} is not a valid URL ({error}); correct it"
            raise RewardError(line) from None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON and return the JSON of the response.

        Args:
            path: relative to the base URL.
            body: JSON data; None sends a GET.
            timeout_s: for each attempt, from connecting to the end of the response.

        Raises:
            RemoteError: the request failed.
            ValueError: the body is not JSON data, or has NaN.
        """
        return await asyncio.wrap_future(self.submit(self.request(path, body, timeout_s)))

    def post_blocking(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON as `post` does, from a thread without an event loop."""
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
            if self._thread is None:
                self._thread = self._start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self) -> threading.Thread:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(self.max_concurrent)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        self._client = httpx.AsyncClient(
            headers=headers, timeout=None, limits=_LIMITS, mounts=_LOOPBACK
        )
        run, name = self._loop.run_forever, f"http {self._url.host}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Cancel all requests; each raises a RemoteError. May be called twice."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            asyncio.run_coroutine_threadsafe(self._cancel_requests(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _cancel_requests(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await loop.shutdown_default_executor()

    async def request(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON as `post` does; call it on this client's event loop."""
        try:
            async with self._slots:
                for number in range(1, self.tries + 1):
                    try:
                        return await self.attempt(path, body, timeout_s, number)
                    except RemoteError as error:
                        if not error.is_transient:
                            raise
                        if number == self.tries:
                            error.line += f" ({number} attempts)" if number > 1 else ""
                            raise error from None
                        await asyncio.sleep(self._retry_delay_s(number, error.retry_after_s))
        except asyncio.CancelledError:
            if self._is_closed:
                raise self._closed_error() from None
            raise
        raise AssertionError("unreachable")

    async def attempt(self, path: str, body: Any, timeout_s: float, number: int) -> Any:
        """Send a request once; `request` calls this for each attempt.

        Args:
            number: of the attempt, from 1.
        """
        async with self._open_response(path, body, timeout_s) as response:
            data = await self._read_body(response)
        if not response.is_success:
            raise self._response_error(response, data)
        return self._parse_json(data)

    async def stream_events(self, path: str, body: Any, idle_s: float) -> AsyncGenerator[Any]:
        """Send a request once and yield the JSON of each server-sent event; call it on this loop.

        Args:
            idle_s: longest wait for the next part of the response.

        Raises:
            RemoteError: the request failed, is not an event stream, or ended without `[DONE]`.
        """
        async with self._open_response(path, body, None, idle_s) as response:
            kind = response.headers.get("Content-Type", "")
            if not response.is_success or not kind.startswith("text/event-stream"):
                raise self._response_error(response, await self._read_body(response))
            async for line in response.aiter_lines():
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield self._parse_json(text)
        raise self.make_error("closed the stream before [DONE]", is_transient=True)

    @asynccontextmanager
    async def _open_response(
        self, path: str, body: Any, timeout_s: float | None, idle_s: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request once and yield its response; network errors become RemoteErrors.

        Args:
            timeout_s: from connecting to the end of the block.
            idle_s: for each wait.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        method, url = "GET" if body is None else "POST", f"{self._url}/{path.lstrip('/')}"
        response = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, url, content=content, timeout=idle_s) as response,
            ):
                yield response
        except (TimeoutError, httpx.TimeoutException):
            reason = f"did not answer within {idle_s or timeout_s:g} s"
            raise self.make_error(reason, is_transient=True) from None
        except httpx.DecodingError as error:
            reason = f"sent a body that cannot be decoded: {one_line(error)}"
            raise self.make_error(reason) from None
        except httpx.RequestError as error:
            reason = "cannot be reached" if response is None else "closed the connection early"
            raise self.make_error(f"{reason}: {one_line(error)}", is_transient=True) from None

    def _response_error(self, response: httpx.Response, data: bytes) -> RemoteError:
        status = response.status_code
        if response.is_success:
            reason = f"answered with {len(data):,} bytes that are not an event stream"
            return self.make_error(reason)
        text = " ".join(data[: 20 * _SHOWN].decode(errors="replace").split())
        reason = f"answered {status}{': ' if text else ''}{text}"
        retry_after_s = _parse_retry_after(response.headers.get("Retry-After"))
        return self.make_error(reason, status, retry_after_s, status in RETRY_STATUSES)

    def _parse_json(self, data: str | bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self.make_error(f"answered with {len(data):,} bytes that are not JSON") from None

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
        """Return an error of this service, shortened to one line and without the token."""
        reason = self.redact_token(reason)
        reason = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN]}…"
        return RemoteError(f"{self._url} {reason}", status, retry_after_s, is_transient)

    def redact_token(self, text: str) -> str:
        """Return the text with the token replaced."""
        return text.replace(self.token, "(secret)") if self.token else text

    def _closed_error(self) -> RemoteError:
        return self.make_error("gets no request: the client is closed")

    def _retry_delay_s(self, tries: int, retry_after_s: float | None) -> float:
        most = min(self.backoff_s * 2.0 ** (tries - 1), _LONGEST_BACKOFF_S)
        # Not a run's random numbers: jitter changes times, never scores.
        backoff_s = most * random.SystemRandom().uniform(0.5, 1.0)
        # Retry-After: 0 does not disable the backoff.
        return max(backoff_s, min(retry_after_s or 0.0, LONGEST_RETRY_AFTER_S))


def read_token(variable: str | None, field: str) -> str | None:
    """Return the token of an environment variable; None if no variable is named.

    Args:
        field: config key or option that names the variable, for errors.

    Raises:
        RewardError: the variable is unset or empty, or its value cannot be sent in a header.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        line = f"{field} is {variable}, which is not set in the environment; export {variable}"
        raise RewardError(line)
    if not token.isascii() or not token.isprintable() or " " in token:
        raise RewardError(
            f"{field} is {variable}, whose value must be printable ASCII without spaces; "
            f"export another {variable}"
        )
    return token


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header: a number or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
