"""JSON over HTTP, for what scores elsewhere: sandboxes, judges, remote managers.

One client is one limit: at most `max_concurrent` requests are under way over the whole run. Its
requests are made on an event loop of its own in a thread of its own, so that it serves whoever
asks: coroutines of any loop (`post`) and threads without one (`post_blocking`).

What fails in passing is tried again, with a back-off that doubles and jitters: the statuses 429,
502, 503 and 504, connections that are refused, cut or silent. What is left is a `RemoteError`.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import httpx

from winnow.errors import RewardError

Kind = Literal["unreachable", "timeout", "status", "garbage"]
RETRY_STATUSES = frozenset({429, 502, 503, 504})
_LONGEST_BACKOFF_S = 30.0
_LONGEST_RETRY_AFTER_S = 60.0
_SHOWN = 200
"""Characters of a refusal's text that are shown."""
_SECRET_HEADER = re.compile("key|token|auth|cookie", re.IGNORECASE)
_LOOPBACK: Mapping[str, httpx.AsyncBaseTransport | None] = {
    f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")
}
"""A proxy of the environment's is never asked for these."""


class RemoteError(Exception):
    """A request that came to nothing.

    Attributes:
        kind: `unreachable` (no connection), `timeout`, `status` (a refusal), or `garbage`: an
            answer that is no JSON, too large, or cut off.
        status: of the last answer; None where there was none.
        line: one line for people, without secrets.
        after_s: seconds after which the last answer asked to be tried again.
    """

    def __init__(
        self, kind: Kind, status: int | None, line: str, after_s: float | None = None
    ) -> None:
        super().__init__(line)
        self.kind = kind
        self.status = status
        self.line = line
        self.after_s = after_s

    def __reduce__(self) -> tuple[type[RemoteError], tuple[Kind, int | None, str, float | None]]:
        return RemoteError, (self.kind, self.status, self.line, self.after_s)


class _Passing(Exception):
    """A failure that may be over soon."""

    def __init__(self, error: RemoteError) -> None:
        super().__init__(error.line)
        self.error = error


class HttpJson:
    """A client of one service; safe to use from any thread and any event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        max_concurrent: int = 64,
        retries: int = 3,
        retry_statuses: frozenset[int] = RETRY_STATUSES,
        backoff_s: float = 0.5,
        max_bytes: int = 32 << 20,
    ) -> None:
        """Describe the service; nothing is connected yet.

        Args:
            base_url: paths are put behind it.
            token: sent as `Authorization: Bearer`, and kept out of every error.
            headers: sent with each request.
            max_concurrent: requests under way at once, their pauses between tries included.
            retries: how often a request is tried in all.
            retry_statuses: answers after which it is tried again.
            backoff_s: pause after the first try; it doubles with each.
            max_bytes: longest answer that is read, unpacked.

        Raises:
            ValueError: the address is none of HTTP, or the token cannot be sent.
        """
        self._url = _address(base_url)
        self.place = str(self._url.copy_with(userinfo=b"", query=None, fragment=None)).rstrip("/")
        self._headers = {"Accept": "application/json", **(headers or {})}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._secrets = _secrets(token, self._url, self._headers)
        self._max_concurrent = max_concurrent
        self._tries = max(1, retries)
        self._retry_statuses = retry_statuses
        self._backoff_s = backoff_s
        self._max_bytes = max_bytes
        self.retried = 0
        """Tries beyond the first, so far."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._semaphore: asyncio.Semaphore | None = None
        self._is_closed = False

    async def post(self, path: str, body: Any, timeout_s: float) -> Any:
        """Send JSON and wait for JSON.

        Args:
            path: behind the base address.
            body: plain data.
            timeout_s: for each try, from its connection to the end of its answer.

        Raises:
            RemoteError: no usable answer came.
            ValueError: the body is no plain data, or holds NaN.
        """
        return await asyncio.wrap_future(self._begin(path, body, timeout_s))

    def post_blocking(self, path: str, body: Any, timeout_s: float) -> Any:
        """The same for a thread without an event loop."""
        return self._begin(path, body, timeout_s).result()

    async def aclose(self) -> None:
        """End all requests; each then fails as unreachable. May be called twice."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """The same for a thread without an event loop."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _begin(self, path: str, body: Any, timeout_s: float) -> Future[Any]:
        content = json.dumps(body, allow_nan=False).encode()
        with self._lock:
            if self._is_closed:
                raise self._closed_error()
            if self._loop is None:
                self._start()
            assert self._loop is not None
            work = self._request(path.lstrip("/"), content, timeout_s)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._semaphore = asyncio.Semaphore(self._max_concurrent)
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            mounts=_LOOPBACK,
        )
        name = f"http {self._url.host}"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def _end(self) -> None:
        """On the loop of our own: cancel what runs, then let go of the connections."""
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _request(self, path: str, content: bytes, timeout_s: float) -> Any:
        assert self._semaphore is not None
        try:
            async with self._semaphore:
                for attempt in range(1, self._tries + 1):
                    try:
                        return await self._try(path, content, timeout_s)
                    except _Passing as passing:
                        if attempt == self._tries:
                            raise self._final(passing.error) from None
                        self.retried += 1
                        await asyncio.sleep(self._pause_s(attempt, passing.error.after_s))
        except asyncio.CancelledError:
            if self._is_closed:
                raise self._closed_error() from None
            raise
        raise AssertionError("unreachable")

    async def _try(self, path: str, content: bytes, timeout_s: float) -> Any:
        assert self._client is not None
        url = f"{str(self._url).rstrip('/')}/{path}"
        headers = {"Content-Type": "application/json"}
        status = None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", url, content=content, headers=headers) as response,
            ):
                status = response.status_code
                data = await self._read(response)
        except TimeoutError:
            raise _Passing(
                self._error("timeout", status, f"did not answer within {timeout_s:g} s")
            ) from None
        except httpx.RequestError as error:
            raise self._broken(error, status) from None
        if not 200 <= status < 300:
            refusal = self._refused(status, data)
            refusal.after_s = _retry_after_s(response.headers.get("Retry-After"))
            if status in self._retry_statuses:
                raise _Passing(refusal)
            raise refusal
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            said = f"answered with {len(data):,} bytes that are no JSON"
            raise self._error("garbage", status, said) from None

    async def _read(self, response: httpx.Response) -> bytes:
        parts = bytearray()
        async for part in response.aiter_bytes():
            parts += part
            if len(parts) > self._max_bytes:
                said = f"answered with more than {self._max_bytes:,} bytes"
                raise self._error("garbage", response.status_code, said)
        return bytes(parts)

    def _broken(self, error: httpx.RequestError, status: int | None) -> Exception:
        """A connection that was not made, or not kept."""
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, httpx.DecodingError):
            return self._error("garbage", status, f"answered with what cannot be unpacked: {said}")
        if status is not None:
            return _Passing(self._error("garbage", status, f"cut its answer off ({said})"))
        return _Passing(self._error("unreachable", None, f"cannot be reached: {said}"))

    def _refused(self, status: int, data: bytes) -> RemoteError:
        text = " ".join(data[: 20 * _SHOWN].decode(errors="replace").split())
        return self._error("status", status, f"answered {status}{': ' if text else ''}{text}")

    def _error(self, kind: Kind, status: int | None, said: str) -> RemoteError:
        for secret in self._secrets:
            said = said.replace(secret, "(secret)")
        said = said if len(said) <= _SHOWN else f"{said[:_SHOWN]}…"
        return RemoteError(kind, status, f"{self.place} {said}")

    def _final(self, error: RemoteError) -> RemoteError:
        if self._tries == 1:
            return error
        line = f"{error.line}, {self._tries} times over"
        return RemoteError(error.kind, error.status, line, error.after_s)

    def _closed_error(self) -> RemoteError:
        return self._error("unreachable", None, "is not asked any more: the client is closed")

    def _pause_s(self, attempt: int, after_s: float | None) -> float:
        most = min(self._backoff_s * 2.0 ** (attempt - 1), _LONGEST_BACKOFF_S)
        # Jitter is no part of a run's random numbers: it moves times, never scores.
        own_s = most * random.SystemRandom().uniform(0.5, 1.0)
        # A server that asks for no pause at all does not switch ours off.
        return max(own_s, min(after_s or 0.0, _LONGEST_RETRY_AFTER_S))


def token_of(variable: str | None, field: str) -> str | None:
    """The token that an environment variable holds; None where none is named.

    Args:
        field: that names the variable, for the error.

    Raises:
        RewardError: there is no such variable, or it is empty.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"{field} is {variable}, but there is no such environment variable; export {variable}"
        )
    return token


def _address(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"the address is no URL ({error})") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("the address must begin with http:// or https:// and name a host")
    if url.query or url.fragment:
        raise ValueError("the address must end with its path: no ? and no #")
    return url


def _secrets(token: str | None, url: httpx.URL, headers: Mapping[str, str]) -> list[str]:
    """What no error may show."""
    if token is not None and (not token.isascii() or not token.isprintable() or " " in token):
        raise ValueError("the token must consist of ASCII characters without blanks and breaks")
    told = [value for name, value in headers.items() if _SECRET_HEADER.search(name)]
    return [text for text in (token, url.password, *told) if text]


def _retry_after_s(value: str | None) -> float | None:
    """Seconds that a server asks for: a number, or a date."""
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    with suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
