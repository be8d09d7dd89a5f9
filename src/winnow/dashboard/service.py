"""Routes of the dashboard: the front end's files, the data of its pages as JSON, and events.

    GET /                       the front end
    GET /api/runs               and series, names, difference, comparison: about several runs
    GET /api/words?names=NAME   what metrics mean, as `winnow metrics` prints it
    GET /api/run/PAGE?run=NAME  steps, groups, search, group, prompt, spread, timeline,
                                system, alarms, settings
    GET /api/run/image?run=NAME an image of its answers (`name`), as the run stored it
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
from threading import Thread
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from winnow.dashboard.pages import Pages, RunPages
from winnow.dashboard.planning import MOST_BYTES, PlanForm, Planner
from winnow.dashboard.runs import RunNotFoundError, RunSet
from winnow.errors import WinnowError
from winnow.http.service import connection_limit, has_token, is_local_host_header
from winnow.observe.gpus import GPU_NAMES
from winnow.observe.metric_names import find_metric

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
_MOST_AHEAD = 50
"""Runs that are read before they are asked for."""
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
        self.max_connections = connection_limit(_RESERVE)
        self._streams = 0
        pages = self._pages

        def run(ask: _Query) -> RunPages:
            return pages.select([ask.text("run")])[0]

        def pair(ask: _Query) -> tuple[str, str]:
            return ask.text("a"), ask.text("b")

        def step(ask: _Query) -> tuple[str, int]:
            return ask.text("kind"), ask.number("step")

        routes: dict[str, Callable[[_Query], Any]] = {
            "runs": lambda ask: pages.overview(),
            "names": lambda ask: sorted(
                {name for run in pages.select(ask.names("runs")) for name in run.columns().names}
            ),
            "words": lambda ask: [
                row._asdict()
                for row in dict.fromkeys(map(find_metric, ask.names("names")))
                if row is not None
            ],
            "gpus": lambda ask: GPU_NAMES,
            "difference": lambda ask: pages.compare_settings(*pair(ask)),
            "comparison": lambda ask: pages.compare_answers(*pair(ask), ask.optional("step")),
            "run/steps": lambda ask: run(ask).steps(),
            "run/groups": lambda ask: run(ask).groups(*step(ask)),
            "run/search": lambda ask: run(ask).search_texts(*step(ask), ask.text("q")),
            "run/group": lambda ask: run(ask).group(*step(ask), ask.number("group")),
            "run/prompt": lambda ask: run(ask).prompt_history(ask.text("kind"), ask.text("uid")),
            "run/spread": lambda ask: run(ask).histograms(),
            "run/timeline": lambda ask: run(ask).timeline(ask.optional("step")),
            "run/system": lambda ask: run(ask).system(),
            "run/alarms": lambda ask: run(ask).alarms(),
            "run/settings": lambda ask: run(ask).settings(),
        }
        self.app: ASGIApp = _AccessGuard(
            Starlette(
                routes=[
                    *(Route(f"/api/{name}", _json_endpoint(make)) for name, make in routes.items()),
                    Route("/api/series", lambda request: _series(pages, _Query(request))),
                    Route("/api/run/image", lambda request: _image(run, _Query(request))),
                    Route("/api/run/plan", self._plan, methods=["POST"]),
                    Route("/api/events", self._events),
                    Mount("/", StaticFiles(directory=STATIC, html=True)),
                ],
                exception_handlers={WinnowError: _error_response},
            ),
            token,
        )
        if pages.runs.is_local:
            Thread(target=_read_ahead, args=(pages,), daemon=True).start()

    def close(self) -> None:
        """End events and the plan that is being made, so that their connections close."""
        self._closing.set()
        self._planner.close()

    async def _plan(self, request: Request) -> Response:
        """Stream a plan. A page of another site may neither send this kind nor leave the mark."""
        site = request.headers.get("sec-fetch-site", "same-origin")
        kind = request.headers.get("content-type", "")
        if site != "same-origin" or kind != "application/json":
            return _respond(
                {"error": "plans are accepted from the dashboard's own page only, as JSON"}, 403
            )
        form = PlanForm.parse(await _read_body(request))
        runs = await anyio.to_thread.run_sync(self._pages.select, [_Query(request).text("run")])
        lines = self._planner.stream(runs[0].files, form)
        return self._stream(lines, "application/x-ndjson")

    async def _events(self, request: Request) -> Response:
        return self._stream(self._change_events(), "text/event-stream")

    def _stream(self, lines: AsyncGenerator[str], kind: str) -> Response:
        """Stream lines, unless half of the connections do: the others are for short requests."""

        async def counted() -> AsyncIterator[str]:
            self._streams += 1
            try:
                async with aclosing(lines):
                    async for line in lines:
                        yield line
            finally:
                self._streams -= 1

        if self._streams < self.max_connections // 2:
            return StreamingResponse(counted(), media_type=kind)
        line = f"{self._streams} pages are open, which is the limit; close one"
        return _respond({"error": line}, 503)

    async def _change_events(self) -> AsyncGenerator[str]:
        """Yield events with the runs that changed, until the client leaves or the server closes."""
        seen: dict[str, str] | None = None
        pause_s, quiet_s = _POLL_S[self._pages.runs.is_local], 0.0
        while not self._closing.is_set():
            try:
                now = await anyio.to_thread.run_sync(self._pages.folder_stamps)
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


def _read_ahead(pages: Pages) -> None:
    """Read the list and the figures of the newest runs, so that the first page is a quick one."""
    with suppress(WinnowError):
        rows = [row for row in pages.overview()["runs"] if not row["problem"]]
        # The newest last: what was read longest ago is the first to leave the memory.
        for row in sorted(rows, key=lambda row: row["changed_s"] or 0.0)[-_MOST_AHEAD:]:
            pages.curves([row["name"]], (), None)


async def _read_body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise WinnowError(f"the body must be at most {MOST_BYTES:,} bytes")
    return body


class _Query:
    """The query parameters of a request."""

    def __init__(self, request: Request) -> None:
        self._params = request.query_params

    def text(self, name: str) -> str:
        if name not in self._params:
            raise WinnowError(f"query parameter {name} is missing")
        return str(self._params[name])

    def names(self, name: str) -> list[str]:
        return [each for each in dict.fromkeys(self._params.getlist(name)) if each]

    def optional(self, name: str) -> int | None:
        return self.number(name) if self._params.get(name) else None

    def number(self, name: str) -> int:
        value = self.text(name)
        try:
            return int(value)
        except ValueError:
            raise WinnowError(f"{name} must be an integer, got {value[:40]}") from None


def _json_endpoint(make: Callable[[_Query], Any]) -> Callable[[Request], Response]:
    """Make an endpoint, which runs in a thread, of a function that returns plain data."""
    return lambda request: _respond(make(_Query(request)))


def _respond(body: Any, status: int = 200) -> Response:
    # A file that others made may hold values of any type.
    content = json.dumps(body, separators=(",", ":"), allow_nan=False, default=str)
    return Response(content, status, media_type="application/json")


def _series(pages: Pages, ask: _Query) -> Response:
    content = pages.curves(ask.names("runs"), ask.names("names"), ask.optional("points"))
    return Response(content, media_type="application/json")


def _image(run: Callable[[_Query], RunPages], ask: _Query) -> Response:
    """Respond with an image, whose name is the digest of its content: a browser may keep it."""
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return Response(run(ask).image(ask.text("name")), media_type="image/png", headers=headers)


def _error_response(request: Request, error: Exception) -> Response:
    return _respond({"error": str(error)}, 404 if isinstance(error, RunNotFoundError) else 422)


class _AccessGuard:
    """ASGI middleware that checks access and sets security headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to do without websockets and lifespan"
        request = Request(scope)
        answer = self._reject(request)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                is_data = request.url.path.startswith("/api/")
                headers.setdefault("Cache-Control", "no-store" if is_data else "no-cache")
            await send(message)

        await (answer or self._app)(scope, receive, send_guarded)

    def _reject(self, request: Request) -> Response | None:
        if self._token is None:
            if is_local_host_header(request.headers.get("host", "")):
                return None
            return _respond({"error": "without a token the dashboard answers on localhost only; "
                          "start it with --token-env"}, 421)  # fmt: skip
        token = request.query_params.get("token")
        if token is not None and request.url.path == "/" and self._token_matches(token):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if has_token(request.headers.get("authorization", ""), self._token) or self._token_matches(
            request.cookies.get(_COOKIE, "")
        ):
            return None
        if request.url.path.startswith("/api/"):
            return _respond({"error": "the token is missing or wrong"}, 401)
        wrong = "" if token is None else "<p>Wrong token.</p>"
        return HTMLResponse(_ASK.format(wrong=wrong), 401)

    def _token_matches(self, token: str) -> bool:
        return self._token is not None and hmac.compare_digest(
            token.strip().encode(), self._token.encode()
        )


_ASK = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Winnow</title>
<h1>Winnow</h1>{wrong}<p>Enter the token that the dashboard was started with.</p>
<form action="/"><input type="password" name="token" autofocus aria-label="Token">
<button>Open</button></form></html>"""
