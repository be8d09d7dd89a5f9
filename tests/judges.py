"""A judge behind a real socket: compares answer and reference in the message, or does as told."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.faulty_http import Request, Step, ok


def completion(
    text: str | None, tokens: int | None = 100, finish_reason: str = "stop"
) -> dict[str, Any]:
    """A reply in OpenAI's shape."""
    usage = {} if tokens is None else {"usage": {"total_tokens": tokens}}
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], **usage}


def says(text: str | None, tokens: int | None = 100) -> Step:
    """Always the same reply."""
    return ok(completion(text, tokens))


def between(mark: str, request: Request) -> str:
    """What stands between the marks of the built-in templates."""
    message = request.body["messages"][-1]["content"]
    found = re.search(rf"<{mark}>\n(.*?)\n</{mark}>", message, re.DOTALL)
    assert found is not None, message
    return found.group(1)


def verdict(request: Request) -> str:
    """Of an answer that ends with `#RESULT`."""
    right = between("answer", request).rpartition("#")[2] == between("reference", request)
    return f"It is not CORRECT in form.\n\nJudgement: {'CORRECT' if right else 'INCORRECT'}"


def coin(_: Request) -> str:
    """Another one for each request."""
    return f"Judgement: {random.SystemRandom().choice(['CORRECT', 'INCORRECT'])}"


def judging(say: Callable[[Request], str] = verdict, longest_s: float = 0.0) -> Step:
    """A judge that needs another time for each request."""
    dice = random.SystemRandom()

    def step(connection: socket.socket, request: Request) -> None:
        time.sleep(longest_s * dice.random() ** 4)
        ok(completion(say(request)))(connection, request)

    return step
