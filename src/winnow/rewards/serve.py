"""The service that `reward/manager=remote` asks: JSON over HTTP before a manager of this machine.

    POST /        verl's arguments -> {"score": …, "acc": …, …} or {"error": "one line"}
    GET  /health  {"status": "ok", "scored": 12}

An `error` is the answer's own. Refused are a body that is no JSON (415), too long (413), or no such
question (400), a wrong token (401), more answers than are taken in at once, and one that has waited
too long (503 with Retry-After). What nobody waits for any more is not scored. Who can reach the
port can have answers scored; so it listens on this machine alone, and is asked by its own name
(else 421), unless there is a token.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from winnow.errors import RewardError
from winnow.http.service import bears, drain, is_asked_here, is_json, is_loopback
from winnow.rewards.managers.protocol import Manager
from winnow.rewards.managers.remote import plain
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

QUEUE_S = 8.0
"""How long an answer waits for a worker: a client's patience is 10 s beyond the answer's time."""
_BODY_S = 30.0
_LAST_ANSWERS_S = 5
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Limits:
    """What the service takes in."""

    max_waiting: int = 1024
    """Answers at once, those in work included."""
    max_body_bytes: int = 8 << 20
    max_answer_s: float = 10.0 + QUEUE_S
    """For one answer: the time of the function, and what it may wait for a worker."""


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
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response as Reply
        from starlette.routing import Route
    except ImportError as error:
        raise RewardError(
            "winnow reward serve needs starlette; pip install 'winnow-rl[serve]'"
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
            _admit(request, token)
            if waiting >= limits.max_waiting:
                raise _Refusal(503, f"{waiting} answers are in work, which is the limit")
            waiting += 1
            try:
                prompt, text = _question(await _body(request, limits.max_body_bytes))
                return reply(_said(await _scored(manager, prompt, text, request, limits)))
            finally:
                waiting -= 1
        except ClientDisconnect:
            return reply({"error": "the client has gone"}, 400)
        except asyncio.CancelledError:  # by uvicorn, after the last answers' time
            return reply({"error": "the service is closing"}, 503, {"Retry-After": "1"})
        except RewardError as error:  # of the manager: nothing can be scored any more
            return reply({"error": str(error)}, 500)
        except _Refusal as refusal:
            await drain(request, limits.max_body_bytes)
            headers = {"Retry-After": "1"} if refusal.status == 503 else {}
            return reply({"error": str(refusal)}, refusal.status, headers)

    async def health(request: Request) -> Response:
        if token is None and not is_asked_here(request.headers.get("Host", "")):
            return reply({"error": _NOT_HERE}, 421)
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
    if not is_loopback(host) and token is None:
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


def serve(app: Starlette, listener: socket.socket) -> int:
    """Serve until a signal ends it; its number. In the main thread.

    Raises:
        RewardError: uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise RewardError(
            "winnow reward serve needs uvicorn; pip install 'winnow-rl[serve]'"
        ) from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
    )
    server = uvicorn.Server(config)
    with _signals(server) as arrived:
        server.run(sockets=[listener])
    if not arrived:
        raise RuntimeError("the server ended by itself")
    return arrived[0]


@contextmanager
def _signals(server: uvicorn.Server) -> Iterator[list[int]]:
    """Those that arrive; uvicorn hands on what has ended it, which would end this process, too."""
    arrived: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        arrived.append(number)
        server.should_exit = True

    before = {n: signal.signal(n, take) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_NOT_HERE = "without a token the service is asked as localhost alone; give it one by --token-env"


def _admit(request: Request, token: str | None) -> None:
    if token is None and not is_asked_here(request.headers.get("Host", "")):
        raise _Refusal(421, _NOT_HERE)
    if token is not None and not bears(request.headers.get("Authorization", ""), token):
        raise _Refusal(401, "the token is missing or wrong")
    if not is_json(request.headers.get("Content-Type", "")):
        raise _Refusal(415, "the body must be application/json")


async def _scored(
    manager: Manager, prompt: Prompt, text: str, request: Request, limits: Limits
) -> Score | Failure:
    """The score, while the client waits for it: what nobody waits for, workers do not begin."""
    score = asyncio.ensure_future(manager.score(prompt, text))
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait(
            (score, gone), timeout=limits.max_answer_s, return_when=asyncio.FIRST_COMPLETED
        )
        if score.done():
            return score.result()
        if gone.done():
            raise _Refusal(503, "the client has gone")
        raise _Refusal(503, "no worker came free in time")
    finally:
        score.cancel()
        gone.cancel()
        await asyncio.gather(score, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Wait until the client hangs up; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
