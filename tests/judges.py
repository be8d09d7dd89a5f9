"""Judges: behind a real socket, where one compares answer and reference in the message, or does as
told; and a model's folder, for engines of the run's own."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faulty_http import Request, Step, ok
from tests.small_models import digits_model, save

from winnow.data.sort_digits import build_tokenizer

DIGITS = (
    *("reward.judge.max_tokens=24", "reward.judge.temperature=1"),
    *("reward.judge.template='{{ question }}{{ answer }}'", "reward/judge/parse=number"),
    *(r"reward.judge.parse.pattern='(\d)'", "reward.judge.parse.lowest=0"),
    *("reward.judge.parse.highest=9", "reward.judge.cache=none"),
)
"""Settings of a judge whose number is the last digit that `judge_folder`'s model writes."""


def judge_folder(
    folder: Path,
    template: str = "{% for m in messages %}{{ m.content }}{% endfor %}:",
    **changes: Any,
) -> Path:
    """A model of 2,000 random weights that writes digits and letters, with a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or None
    return save(digits_model(**{"initializer_range": 0.3, **changes}), tokenizer, folder)


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
