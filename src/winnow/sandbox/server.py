"""An HTTP service that speaks SandboxFusion's API over the local sandbox.

    POST /run_code   runs a program        GET /health   says how busy the server is

Beyond the refusals of `winnow.http.service` a request may have wrong fields (422), or find no free
slot of the sandbox in time (503). So what a stranger can make the server hold is a place in the
queue, with one body of `max_body_bytes`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from winnow.http.service import JsonService, Refusal
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.program import Limits, SandboxError
from winnow.sandbox.request import job_of, response_of, sandbox_failed

_FILES_PER_PROGRAM = 8
"""Descriptors that a running program costs its server, at most."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of what requests may ask of the server."""

    programs: Limits
    """Upper bounds for each program."""
    max_body_bytes: int
    max_queued: int
    """Requests that wait while the sandbox is full."""
    max_wait_s: float = 8.0
    """Seconds that one waits: a client's patience is 10 s beyond its program's time."""


class SandboxServer:
    """Runs programs for the clients of its `service`; all in one event loop."""

    def __init__(self, sandbox: LocalSandbox, limits: ServerLimits, token: str | None) -> None:
        self._sandbox, self._limits = sandbox, limits
        slots = len(sandbox.slots)
        self._running = 0
        self._free = asyncio.Semaphore(slots)
        self._threads = ThreadPoolExecutor(slots, "programs")
        self.service = JsonService(
            "/run_code",
            self._answer,
            self._health,
            slots + limits.max_queued,
            limits.max_body_bytes,
            token,
            "detail",
            sandbox.close,
            slots * _FILES_PER_PROGRAM,
        )

    def close(self) -> None:
        """Let go of the threads, after the event loop has ended."""
        self._sandbox.close()
        self._threads.shutdown()

    def _health(self) -> dict[str, Any]:
        return {
            "status": "closing" if self.service.is_closing else "ok",
            "sandbox": self._sandbox.backend,
            "max_concurrent": len(self._sandbox.slots),
            "running": self._running,
            "waiting": self.service.taken - self._running,
        }

    async def _answer(self, body: Any, request: Request) -> dict[str, Any]:
        job = job_of(body, self._limits.programs)
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Refusal(503, "no slot came free in time") from None
        self._running += 1
        try:
            if self.service.is_closing or await request.is_disconnected():
                raise Refusal(503, "the service is closing")
            loop = asyncio.get_running_loop()
            run = self._sandbox.run
            result = await loop.run_in_executor(self._threads, run, job.program, job.limits)
            return response_of(result, job)
        except (SandboxError, OSError) as error:
            if self.service.is_closing:
                raise Refusal(503, "the service is closing") from None
            return sandbox_failed(" ".join(str(error).split()))
        finally:
            self._running -= 1
            self._free.release()
