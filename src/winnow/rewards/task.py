"""Calls of a scorer: each ends in a usable score, or in a failure told in one line.

The same in the run's own process and in a worker of the pool.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from winnow.rewards.scorers import SCORERS
from winnow.types import Score

if TYPE_CHECKING:
    from winnow.rewards.user_function import UserScorer

Verdict = asyncio.Future["float | Failure"]
"""A model's or a judge's score of an answer, once it comes."""
Arguments = tuple[str, str, Any, Mapping[str, Any]]
"""Data source, answer's text, ground truth, the row's other columns."""
_LONGEST_LINE = 1000
_HERE = str(Path(__file__).parent)
"""Modules of this folder pass errors on; the fault is never theirs. Scorers lie below it."""


@dataclass(frozen=True)
class Failure:
    """A scoring that gave no score."""

    line: str
    trace: str
    """For the log."""
    outside: bool = False
    """True if a sandbox failed, not the scorer."""


Outcome = Score | Failure | tuple[Score | Failure, ...]
"""The end of one answer's scoring, or of each in a batch; a `Failure` may be a whole batch's."""


async def outcome(user: UserScorer | None, scorer: str, arguments: Arguments) -> Score | Failure:
    """Score one answer with the user's function, or else with a built-in scorer."""
    try:
        if user is None:
            return checked(SCORERS[scorer].score(*arguments))
        result = user.call(*arguments)
        return checked(read_result(await result if inspect.isawaitable(result) else result))
    # SystemExit: a scorer that calls exit() must not end the process either.
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise_if_cancelled(error)
        return failure_of(error, user.file if user else None)


def outcome_without_loop(
    user: UserScorer | None, scorer: str, arguments: Arguments
) -> Score | Failure:
    """Score as `outcome` does where no event loop runs, so that the function may run its own."""
    try:
        if user is None:
            return checked(SCORERS[scorer].score(*arguments))
        return checked(read_result(_awaited(user.call(*arguments))))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return failure_of(error, user.file if user else None)


async def outcomes(
    user: UserScorer, batch: Sequence[Arguments]
) -> tuple[Score | Failure, ...] | Failure:
    """Score answers in one call of the user's function; a failure is that of the call."""
    try:
        result = user.call_batch(batch)
        return _each(user, await result if inspect.isawaitable(result) else result, len(batch))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise_if_cancelled(error)
        return failure_of(error, user.file)


def outcomes_without_loop(
    user: UserScorer, batch: Sequence[Arguments]
) -> tuple[Score | Failure, ...] | Failure:
    """Score as `outcomes` does where no event loop runs, so that the function may run its own."""
    try:
        return _each(user, _awaited(user.call_batch(batch)), len(batch))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return failure_of(error, user.file)


def _each(user: UserScorer, result: Any, count: int) -> tuple[Score | Failure, ...]:
    """The score in each part of what a call returned; what is no score fails alone."""
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__"):
        raise TypeError(f"the function must return a list of scores, got {type(result).__name__}")
    parts = list(result)
    if len(parts) != count:
        raise ValueError(f"the function returned {len(parts)} scores for {count} answers")
    return tuple(_read(user, part) for part in parts)


def _read(user: UserScorer, part: Any) -> Score | Failure:
    try:
        return checked(read_result(part))
    except Exception as error:  # of an object that the user's function made
        return failure_of(error, user.file)


def _awaited(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def raise_if_cancelled(error: BaseException) -> None:
    """Raise a cancellation of this task again; a scorer may raise one of its own."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error


def checked(score: Score) -> Score:
    """Return the score, if it can be learned from.

    Raises:
        ValueError: a number is not finite, or the accuracy no share.
    """
    numbers: dict[str, Any] = {"reward": score.reward, "accuracy": score.accuracy}
    for name, number in [*numbers.items(), *score.parts.items()]:
        if not math.isfinite(number):
            raise ValueError(f"the scorer returned {number} as {name}")
    if not 0 <= score.accuracy <= 1:
        raise ValueError(f"the accuracy must lie in [0, 1], got {score.accuracy:g}")
    return score


def read_result(result: Any) -> Score:
    """Return the score in what a function returned.

    Raises:
        TypeError, ValueError: there is none.
    """
    rest: dict[str, Any] = {}
    accuracy = None
    if isinstance(result, Mapping):
        rest = {str(key): value for key, value in result.items()}
        if "score" not in rest:
            raise ValueError(
                f"the dict returned has no key score, only {', '.join(rest) or 'none'}"
            )
        result = rest.pop("score")
        if "acc" in rest:
            accuracy = _number(rest.pop("acc"), "acc")
            if not 0 <= accuracy <= 1:
                raise ValueError(f"acc must lie in [0, 1], got {accuracy:g}")
    reward = _number(result, "score")
    if accuracy is None:
        accuracy = float(reward > 0)
    return Score(reward, accuracy, {"task": reward}, rest)


def _number(value: Any, name: str) -> float:
    """A number of any library. NaN passes here, and not in `checked`."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(
            f"{name} must be a number, got {type(value).__name__}; "
            "return a float, or a dict with the key score"
        )
    return float(value)


def failure_of(error: BaseException, user_file: str | None) -> Failure:
    """Return the failure that an error means, with its place: the user's own where there is one."""
    try:
        text = " ".join(str(error).split())
    except Exception as in_text:  # the user's exception may be as broken as the function
        text = f"(no text: {type(in_text).__name__} in its __str__)"
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}…"
    below = error.__traceback__
    while below and below.tb_next and _passes_on(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    frames = traceback.extract_tb(below)
    foreign = [frame for frame in frames if not _passes_on(frame.filename)]
    own = [frame for frame in foreign if frame.filename == user_file] or foreign
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    line = f"{type(error).__name__}{': ' if text else ''}{text}{place}"
    trace = "".join(traceback.format_exception(type(error), error, below))
    from winnow.sandbox.program import SandboxError

    return Failure(line, trace, outside=isinstance(error, SandboxError))


def _passes_on(filename: str) -> bool:
    return os.path.dirname(filename) == _HERE
