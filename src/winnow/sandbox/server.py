"""An HTTP server that speaks SandboxFusion's API over the local sandbox.

    POST /run_code   runs a program        GET /health   says how busy the server is

A request passes these in turn: the token, or this machine's name where there is none, the kind of
its body, a place in the queue, the body's size and time, its fields, and a wait for a free slot of
the sandbox. Whoever is refused is told why: 401 or 421, 415, 503 with Retry-After, 413 or 408, 400
or 422, and 503 again. So what a stranger can make the server hold is `places` bodies of
`max_body_bytes`.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from winnow.http.service import bears, drain, is_asked_here, is_json
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.program import Limits, SandboxError
from winnow.sandbox.request import RequestError, job_of, response_of, sandbox_failed

_BODY_S = 30.0
_RETRY_AFTER = {"Retry-After": "2"}
_CLOSE = {"Connection": "close"}
_NOT_HERE = "without a token the server is asked as localhost alone; give it one by --token-env"


@dataclass(frozen=True)
class ServerLimits:
    """What requests may ask of the server."""

    programs: Limits
    """Of each program, at most."""
    max_body_bytes: int
    max_queued: int
    """Requests that wait while the sandbox is full."""
    max_wait_s: float = 8.0
    """How long one waits: a client's patience is 10 s beyond its program's time."""


class Refusal(Exception):
    """An answer other than 200, with a line that says why."""

    def __init__(self, status: int, line: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(line)
        self.response = JSONResponse({"detail": line}, status, headers)


class SandboxServer:
    """The application; `app` is what an ASGI server runs, in one event loop."""

    def __init__(self, sandbox: LocalSandbox, limits: ServerLimits, token: str | None) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._token = token
        self._places = len(sandbox.slots) + limits.max_queued
        self._taken = 0
        self._running = 0
        self._free = asyncio.Semaphore(len(sandbox.slots))
        self._threads = ThreadPoolExecutor(len(sandbox.slots), "programs")
        self._is_closing = False
        self.app = Starlette(
            routes=[
                Route("/run_code", self._run_code, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
            ]
        )

    def stop(self) -> None:
        """End what runs; its clients are told to come back. From any thread."""
        self._is_closing = True
        self._sandbox.close()

    def close(self) -> None:
        """Let go of the threads, after the event loop has ended."""
        self.stop()
        self._threads.shutdown()

    async def _health(self, request: Request) -> JSONResponse:
        try:
            self._check_host(request)
        except Refusal as refusal:
            return refusal.response
        return JSONResponse(
            {
                "status": "closing" if self._is_closing else "ok",
                "sandbox": self._sandbox.backend,
                "max_concurrent": len(self._sandbox.slots),
                "running": self._running,
                "waiting": self._taken - self._running,
            }
        )

    async def _run_code(self, request: Request) -> JSONResponse:
        try:
            self._check_host(request)
            self._check_token(request)
            kind = request.headers.get("content-type", "")
            if not is_json(kind):
                raise Refusal(
                    415, f"the body must be application/json, got {kind or 'nothing'}", _CLOSE
                )
            if self._taken >= self._places:
                raise Refusal(
                    503, f"{self._places} requests are here already", _RETRY_AFTER | _CLOSE
                )
            self._taken += 1
            try:
                return JSONResponse(await self._result(request))
            finally:
                self._taken -= 1
        except Refusal as refusal:
            if "Connection" in refusal.response.headers:
                await drain(request, self._limits.max_body_bytes)
            return refusal.response
        except ClientDisconnect:
            return JSONResponse({"detail": "the client has gone"}, 400)

    def _check_host(self, request: Request) -> None:
        """Without a token, requests come by this machine's own name."""
        if self._token is None and not is_asked_here(request.headers.get("host", "")):
            raise Refusal(421, _NOT_HERE, _CLOSE)

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        if not bears(given, self._token):
            said = "wrong" if given.partition(" ")[2] else "missing"
            raise Refusal(401, f"the token is {said}", _CLOSE | {"WWW-Authenticate": "Bearer"})

    async def _result(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise Refusal(400, f"the body's {len(body):,} bytes are no JSON") from None
        try:
            job = job_of(given, self._limits.programs)
        except RequestError as error:
            raise Refusal(422, str(error)) from None
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Refusal(503, "no slot came free in time", _RETRY_AFTER) from None
        self._running += 1
        try:
            if self._is_closing or await request.is_disconnected():
                raise Refusal(503, "the server is closing", _RETRY_AFTER)
            loop = asyncio.get_running_loop()
            run = self._sandbox.run
            result = await loop.run_in_executor(self._threads, run, job.program, job.limits)
            return response_of(result, job)
        except (SandboxError, OSError) as error:
            if self._is_closing:
                raise Refusal(503, "the server is closing", _RETRY_AFTER) from None
            return sandbox_failed(" ".join(str(error).split()))
        finally:
            self._running -= 1
            self._free.release()

    async def _body(self, request: Request) -> bytes:
        most = self._limits.max_body_bytes
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            raise Refusal(413, f"the body must be at most {most:,} bytes, got {told}", _CLOSE)
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise Refusal(413, f"the body must be at most {most:,} bytes", _CLOSE)
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {_BODY_S:g} s", _CLOSE) from None
        return bytes(body)
