"""Routes of the dashboard: the front end's files, the data of its pages as JSON, and events.

    GET /                       the front end
    GET /api/runs               and series, names, difference, comparison: about several runs
    GET /api/run/PAGE?run=NAME  steps, groups, search, group, prompt, spread, timeline,
                                system, alarms
    GET /api/events             server-sent events: names of the runs that changed
    POST /api/run/plan?run=NAME `winnow plan` of the run's recipe, in a process: lines of JSON

No run is changed. Without a token it answers to this machine's own names alone (no DNS rebinding);
with one, to a cookie that `/?token=…` sets, or to an `Authorization` header. Pages load nothing
from elsewhere and run no script but their own (Content-Security-Policy).
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow.dashboard.pages import Pages, RunPages, first_shown
from winnow.dashboard.planning import MOST_BYTES, PlanForm, Planner
from winnow.dashboard.runs import GoneError, RunSet
from winnow.errors import WinnowError
from winnow.http.service import connection_limit, has_token, is_local_host
from winnow.observe.gpus import GPU_NAMES

STATIC = Path(__file__).with_name("static")
_COOKIE = "winnow-token"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_POLL_S = {True: 1.0, False: 10.0}
"""Seconds between looks at runs on this machine, and at others."""
_HEARTBEAT_S = 15.0
_RESERVE = 256
"""Files that threads may have open while connections are at their limit."""


class Dashboard:
    """The ASGI application (`app`) about some runs; for one event loop.

    Args:
        places: run folders, folders of runs, or URLs of either.
        token: asked of each client; None answers to this machine alone.

    Raises:
        WinnowError: a place is not there.
    """

    def __init__(self, places: list[str], token: str | None = None) -> None:
        self._pages = Pages(RunSet(places))
        self._closing, self._planner = asyncio.Event(), Planner()
        self.connections = connection_limit(_RESERVE)
        self._streams = 0
        pages = self._pages

        def run(ask: _Query) -> RunPages:
            return pages.of([ask.text("run")])[0]

        routes: dict[str, Callable[[_Query], Any]] = {
            "runs": lambda ask: {"runs": (rows := pages.rows()), "first": first_shown(rows)},
            "series": lambda ask: pages.curves(ask.names("runs"), ask.names("names")),
            "names": lambda ask: sorted(
                {name for run in pages.of(ask.names("runs")) for name in run.columns().names}
            ),
            "gpus": lambda ask: GPU_NAMES,
            "difference": lambda ask: pages.difference(ask.text("a"), ask.text("b")),
            "comparison": lambda ask: pages.comparison(
                ask.text("a"), ask.text("b"), ask.number("step")
            ),
            "run/steps": lambda ask: run(ask).steps(),
            "run/groups": lambda ask: run(ask).groups(ask.text("kind"), ask.must("step")),
            "run/search": lambda ask: run(ask).search(
                ask.text("kind"), ask.must("step"), ask.text("q")
            ),
            "run/group": lambda ask: run(ask).group(
                ask.text("kind"), ask.must("step"), ask.must("group")
            ),
            "run/prompt": lambda ask: run(ask).prompt(ask.text("kind"), ask.text("uid")),
            "run/spread": lambda ask: run(ask).spread(),
            "run/timeline": lambda ask: run(ask).timeline(ask.number("step")),
            "run/system": lambda ask: run(ask).system(),
            "run/alarms": lambda ask: run(ask).alarms(),
        }
        self.app: ASGIApp = _Guard(
            Starlette(
                routes=[
                    *(Route(f"/api/{name}", _answering(make)) for name, make in routes.items()),
                    Route("/api/run/plan", self._plan, methods=["POST"]),
                    Route("/api/events", self._events),
                    Mount("/", StaticFiles(directory=STATIC, html=True)),
                ]
            ),
            token,
        )

    def close(self) -> None:
        """End events and the plan that is being made, so that their connections close."""
        self._closing.set()
        self._planner.close()

    async def _plan(self, request: Request) -> Response:
        """Stream a plan. A page of another site may neither send this kind nor leave the mark."""
        site = request.headers.get("sec-fetch-site", "same-origin")
        kind = request.headers.get("content-type", "")
        if site != "same-origin" or kind != "application/json":
            return _json({"error": "a plan is asked for by the dashboard's page, as JSON"}, 403)
        try:
            form = PlanForm.parse(await _body(request))
            runs = await anyio.to_thread.run_sync(self._pages.of, [_Query(request).text("run")])
        except WinnowError as error:
            return _refusal(error)
        lines = self._planner.stream(runs[0].files, form)
        return self._streaming(lines, "application/x-ndjson")

    async def _events(self, request: Request) -> Response:
        return self._streaming(self._changes(), "text/event-stream")

    def _streaming(self, lines: AsyncGenerator[str], kind: str) -> Response:
        """Stream lines, unless half of the connections do: the others are for short requests."""

        async def counted() -> AsyncIterator[str]:
            self._streams += 1
            try:
                async with aclosing(lines):
                    async for line in lines:
                        yield line
            finally:
                self._streams -= 1

        if self._streams < self.connections // 2:
            return StreamingResponse(counted(), media_type=kind)
        line = f"{self._streams} pages are open already, which is the limit; close one"
        return _json({"error": line}, 503)

    async def _changes(self) -> AsyncGenerator[str]:
        """Tell what changed since the last look, until the client goes or the server closes."""
        seen: dict[str, str] | None = None
        pause_s, quiet_s = _POLL_S[self._pages.runs.is_local], 0.0
        while not self._closing.is_set():
            try:
                now = await anyio.to_thread.run_sync(self._pages.changes)
            except WinnowError as error:
                yield f"event: problem\ndata: {json.dumps(str(error))}\n\n"
            else:
                previous = now if seen is None else seen
                changed = [name for name in now if previous.get(name) != now[name]]
                gone = [name for name in previous if name not in now]
                quiet_s += pause_s
                if seen is None or changed or gone or quiet_s > _HEARTBEAT_S:
                    yield f"data: {json.dumps({'changed': changed, 'gone': gone})}\n\n"
                    quiet_s = 0.0
                seen = now
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise WinnowError(f"the body must be at most {MOST_BYTES:,} bytes")
    return body


class _Query:
    """The words after `?` of a request."""

    def __init__(self, request: Request) -> None:
        self._params = request.query_params

    def text(self, name: str) -> str:
        if name not in self._params:
            raise WinnowError(f"{name} is missing in the address")
        return str(self._params[name])

    def names(self, name: str) -> list[str]:
        return [each for each in dict.fromkeys(self._params.getlist(name)) if each]

    def number(self, name: str) -> int | None:
        value = self._params.get(name, "")
        if not value:
            return None
        try:
            return int(value)
        except ValueError:
            raise WinnowError(f"{name} must be a whole number, got {value[:40]}") from None

    def must(self, name: str) -> int:
        number = self.number(name)
        if number is None:
            raise WinnowError(f"{name} is missing in the address")
        return number


def _answering(make: Callable[[_Query], Any]) -> Callable[[Request], Any]:
    """Make an endpoint, which runs in a thread, of a function that returns plain data."""

    def endpoint(request: Request) -> Response:
        try:
            return _json(make(_Query(request)))
        except WinnowError as error:
            return _refusal(error)

    return endpoint


def _json(body: Any, status: int = 200) -> Response:
    # A file that others made may hold values of any type.
    content = json.dumps(body, separators=(",", ":"), allow_nan=False, default=str)
    return Response(content, status, media_type="application/json")


def _refusal(error: WinnowError) -> Response:
    return _json({"error": str(error)}, 404 if isinstance(error, GoneError) else 422)


class _Guard:
    """Turns away strangers, and puts the headers on that keep a page to itself."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to do without websockets and lifespan"
        request = Request(scope)
        answer = self._refusal(request)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                is_data = request.url.path.startswith("/api/")
                headers["Cache-Control"] = "no-store" if is_data else "no-cache"
            await send(message)

        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        if self._token is None:
            if is_local_host(request.headers.get("host", "")):
                return None
            return _json({"error": "without a token the dashboard is asked as localhost alone; "
                          "start it with --token-env"}, 421)  # fmt: skip
        token = request.query_params.get("token")
        if token is not None and request.url.path == "/" and self._is_token(token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if has_token(request.headers.get("authorization", ""), self._token) or self._is_token(
            request.cookies.get(_COOKIE, "")
        ):
            return None
        if request.url.path.startswith("/api/"):
            return _json({"error": "the token is missing or wrong"}, 401)
        wrong = "" if token is None else "<p>That is not the token.</p>"
        return HTMLResponse(_ASK.format(wrong=wrong), 401)

    def _is_token(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(
            token.strip().encode(), self._token.encode()
        )


_ASK = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Winnow</title>
<h1>Winnow</h1>{wrong}<p>This dashboard asks for the token that it was started with.</p>
<form action="/"><input type="password" name="token" autofocus aria-label="Token">
<button>Open</button></form></html>"""
