"""What calling a scorer comes to: a usable score, or a failure told in one line.

The same in the run's own process and in a worker of the pool.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.rewards.scorers import SCORERS
from winnow.rewards.user_function import UserScorer, read_result
from winnow.types import Score

Arguments = tuple[str, str, Any, Mapping[str, Any]]
"""Data source, answer's text, ground truth, the row's other columns."""
_LONGEST_LINE = 1000
# They pass errors on; the fault is never theirs.
_PASSING_ON = frozenset({"task", "user_function", "worker", "worker_async"})
_OUR_FILES = {str(Path(__file__).with_name(f"{name}.py")) for name in _PASSING_ON}


@dataclass(frozen=True)
class Failure:
    """A scoring that gave nothing."""

    line: str
    trace: str
    """For the log."""


async def outcome(user: UserScorer | None, scorer: str, arguments: Arguments) -> Score | Failure:
    """Score one answer with the user's function, or else with a built-in scorer."""
    try:
        if user is None:
            return checked(SCORERS[scorer].score(*arguments))
        result = user.call(*arguments)
        return checked(read_result(await result if inspect.isawaitable(result) else result))
    # SystemExit: a scorer that calls exit() must not end the process either.
    except (Exception, SystemExit) as error:
        return failure_of(error, user.file if user else None)


def outcome_without_loop(
    user: UserScorer | None, scorer: str, arguments: Arguments
) -> Score | Failure:
    """The same where no event loop runs, so that the function may run one of its own."""
    try:
        if user is None:
            return checked(SCORERS[scorer].score(*arguments))
        result = user.call(*arguments)
        return checked(read_result(_awaited(result) if inspect.isawaitable(result) else result))
    except (Exception, SystemExit) as error:
        return failure_of(error, user.file if user else None)


def _awaited(result: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def checked(score: Score) -> Score:
    """The score, if it can be learned from.

    Raises:
        ValueError: a number is not finite.
    """
    numbers: Mapping[str, Any] = {"reward": score.reward, "accuracy": score.accuracy}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"the scorer returned {number} as {name}")
    return score


def failure_of(error: BaseException, user_file: str | None) -> Failure:
    """One line with the place it was raised at: the user's own where there is one."""
    try:
        text = " ".join(str(error).split())
    except Exception as in_text:  # the user's exception may be as broken as the function
        text = f"(no text: {type(in_text).__name__} in its __str__)"
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}…"
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if frame.filename not in _OUR_FILES]
    own = [frame for frame in foreign if frame.filename == user_file] or foreign
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    line = f"{type(error).__name__}{': ' if text else ''}{text}{place}"
    return Failure(line, "".join(traceback.format_exception(error)))
