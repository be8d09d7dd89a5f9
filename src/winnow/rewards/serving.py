"""The service that `reward/manager=remote` asks: JSON over HTTP before a manager of this machine.

    POST /        verl's arguments -> {"score": …, "acc": …, …} or {"error": "one line"}
    GET  /health  {"status": "ok", "scored": 12}

An `error` is the answer's own. Refused are a body that is too long (413), or no such question
(400), a wrong token (401), and more answers than are taken in at once (503 with Retry-After).
Who can reach the port can have answers scored; so it listens on this machine alone, unless there
is a token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.errors import RewardError
from winnow.rewards.managers.protocol import Manager
from winnow.rewards.managers.remote import plain
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BODY_S = 30.0
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Limits:
    """What the service takes in."""

    max_waiting: int = 1024
    """Answers at once, those in work included."""
    max_body_bytes: int = 8 << 20


class _Refusal(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def make_app(manager: Manager, token: str | None = None, limits: Limits = Limits()) -> Starlette:
    """The service over a manager, which is closed with it.

    Raises:
        RewardError: starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import Response as Reply
        from starlette.routing import Route
    except ImportError as error:
        raise RewardError(
            "winnow reward serve needs starlette; pip install 'winnow[serve]'"
        ) from error
    waiting = 0

    def reply(
        said: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        # In ASCII: an answer may hold halves of surrogate pairs, which no UTF-8 has.
        return Reply(json.dumps(said), status, headers, "application/json")

    async def score(request: Request) -> Response:
        nonlocal waiting
        try:
            _authorise(request, token)
            if waiting >= limits.max_waiting:
                raise _Refusal(503, f"{waiting} answers are in work, which is the limit")
            waiting += 1
            try:
                prompt, text = _question(await _body(request, limits.max_body_bytes))
                return reply(_said(await manager.score(prompt, text)))
            finally:
                waiting -= 1
        except RewardError as error:  # of the manager: nothing can be scored any more
            return reply({"error": str(error)}, 500)
        except _Refusal as refusal:
            headers = {"Retry-After": "1"} if refusal.status == 503 else {}
            return reply({"error": str(refusal)}, refusal.status, headers)

    async def health(request: Request) -> Response:
        return reply({"status": "ok", "scored": manager.scored})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        manager.close()

    routes = [Route("/", score, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan)


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that takes connections; port 0 chooses a free one.

    Raises:
        RewardError: it is not to be had, or others could reach a service without a token.
    """
    if host not in LOOPBACK and token is None:
        raise RewardError(
            f"--host is {host}, which others can reach, and there is no token; "
            "name a variable that holds one with --token-env, or leave --host out"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise RewardError(
            f"--port is {port}, but {host}:{port} cannot be listened at ({error}); choose another"
        ) from error


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until a signal ends it.

    Raises:
        RewardError: uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise RewardError(
            "winnow reward serve needs uvicorn; pip install 'winnow[serve]'"
        ) from error
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


def _authorise(request: Request, token: str | None) -> None:
    if token is None:
        return
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise _Refusal(401, "the token is missing or wrong")


async def _body(request: Request, most: int) -> Any:
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                data += part
                if len(data) > most:
                    raise _Refusal(413, f"the body is longer than {most:,} bytes")
    except TimeoutError:
        raise _Refusal(408, f"the body did not come within {_BODY_S:g} s") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Refusal(400, "the body is no JSON") from error


def _question(body: Any) -> tuple[Prompt, str]:
    if not isinstance(body, dict):
        raise _Refusal(400, f"the body must be an object, got {type(body).__name__}")
    for name in ("data_source", "solution_str"):
        if not isinstance(body.get(name), str):
            raise _Refusal(400, f"{name} must be a text")
    info = body.get("extra_info") or {}
    if not isinstance(info, dict):
        raise _Refusal(400, "extra_info must be an object")
    source, truth = body["data_source"], body.get("ground_truth")
    prompt = Prompt("", _NO_TOKENS, "", source, truth, {"extra_info": info})
    return prompt, body["solution_str"]


def _said(result: Score | Failure) -> dict[str, Any]:
    if isinstance(result, Failure):
        return {"error": result.line}
    rest = {name: _finite(plain(value)) for name, value in result.extra.items()}
    return {**rest, "score": result.reward, "acc": result.accuracy}


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return value
