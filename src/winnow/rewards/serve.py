"""The service that `reward/manager=remote` asks: JSON over HTTP before a manager of this machine.

    POST /        verl's arguments -> {"score": …, "acc": …, …} or {"error": "one line"}
    GET  /health  {"status": "ok", "scored": 12}

An `error` with status 200 is the answer's own. Refused are, by `winnow.http.service`, a wrong token
(401), another host's name (421), a body that is no JSON (415, 400), too long (413) or late (408),
and more answers than are taken in at once (503); here, a body that is no question (400) and an
answer that has waited too long (503). An answer whose client has gone is not scored.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from starlette.requests import Request

from winnow.errors import RewardError
from winnow.http.service import JsonService, Refusal
from winnow.rewards.manager import Manager
from winnow.rewards.remote import to_json_value
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

QUEUE_S = 8.0
"""Seconds that an answer waits for a worker: a client's patience is 10 s beyond its time."""
_NO_TOKENS = np.zeros(0, np.int64)


def make_service(
    manager: Manager,
    token: str | None = None,
    max_answer_s: float = 10.0 + QUEUE_S,
    max_waiting: int = 1024,
    max_body_bytes: int = 8 << 20,
) -> JsonService:
    """Return the service that scores by a manager, which the caller closes.

    Args:
        max_answer_s: for one answer: the time of the function, and the wait for a worker.
        max_waiting: answers at once, those in work included.
    """

    async def answer(body: Any, request: Request) -> dict[str, Any]:
        prompt, text = _parse_question(body)
        try:
            result = await _score_unless_gone(manager, prompt, text, request, max_answer_s)
        except RewardError as error:  # of the manager: nothing can be scored any more
            raise Refusal(500, str(error)) from error
        if isinstance(result, Failure):
            return {"error": result.line}
        # JSON has no NaN and no infinity: they become texts.
        text = json.dumps(to_json_value(result.extra))
        rest = json.loads(text, parse_constant=lambda name: str(float(name)))
        return {**rest, "score": result.reward, "acc": result.accuracy}

    def health() -> dict[str, Any]:
        return {"status": "ok", "scored": manager.scored}

    return JsonService("/", answer, health, max_waiting, max_body_bytes, token, "error")


async def _score_unless_gone(
    manager: Manager, prompt: Prompt, text: str, request: Request, max_answer_s: float
) -> Score | Failure:
    """The score, unless the client hangs up first: then no worker begins it."""
    score = asyncio.ensure_future(manager.score(prompt, text))
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((score, gone), timeout=max_answer_s, return_when=asyncio.FIRST_COMPLETED)
        if score.done():
            return score.result()
        raise Refusal(503, "client disconnected" if gone.done() else "no worker free in time")
    finally:
        score.cancel()
        gone.cancel()
        await asyncio.gather(score, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client hangs up; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parse_question(body: Any) -> tuple[Prompt, str]:
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be an object, got {type(body).__name__}")
    for name in ("data_source", "solution_str"):
        if not isinstance(body.get(name), str):
            raise Refusal(400, f"{name} must be a string")
    info = body.get("extra_info") or {}
    if not isinstance(info, dict):
        raise Refusal(400, "extra_info must be an object")
    source, truth = body["data_source"], body.get("ground_truth")
    return Prompt("", _NO_TOKENS, "", source, truth, {"extra_info": info}), body["solution_str"]
