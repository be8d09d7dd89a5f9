"""Calls of a scorer: each ends in a usable score, or in a failure of one line.

The same in the run's own process and in a worker of the pool; the messages between the two stand
here, too. What comes back from a worker is numbers, texts and plain containers (`make_portable`),
so that the run never needs the classes of a user's file.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from winnow.errors import RewardError
from winnow.rewards.scorers import Scorer
from winnow.types import Score

ScoreFuture = asyncio.Future["float | Failure"]
"""A model's or a judge's score of an answer, once it comes."""
Arguments = tuple[str, str, Any, Mapping[str, Any]]
"""Data source, answer's text, ground truth, the row's other columns."""
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_SCORERS_ARGUMENTS = ("data_source", "response", "ground_truth", "extra")
"""Parameters of built-in scorers, which a user's function may have, too."""
_LONGEST_LINE = 1000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_FOLDERS = str(Path(__file__).parent), str(Path(__file__).parents[1] / "environments")
"""Modules of these folders pass errors on; the fault is never theirs. Scorers lie below."""
_ATOMS = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class Failure:
    """A failed scoring."""

    line: str
    trace: str = ""
    """Traceback for the log; empty: the line says it all."""
    outside: bool = False
    """True if a sandbox failed, not the scorer."""


Outcome = Score | Failure


@dataclass(frozen=True)
class PoolLimits:
    """The limits of a pool's processes, and the names for its messages."""

    workers: int
    timeout_s: float
    """Seconds for a call."""
    memory_mb: int
    """Resident, of a process."""
    section: str = "reward"
    """Section of the recipe with these keys."""
    noun: str = "scorer"
    result: str = "score"

    @property
    def late(self) -> Failure:
        """The failure of a call whose time is up."""
        return timeout_failure(self.timeout_s, self.section, self.result)


@dataclass(frozen=True)
class PoolJob:
    """The first message to a process of a pool; a `Ready` answers it."""

    runtime: str
    """Import path of the class that makes the calls, a `PoolRuntime`."""
    arguments: tuple[Any, ...]
    """Arguments of that class."""
    batched: bool
    """True if a call takes many items."""
    limits: PoolLimits
    python_path: tuple[str, ...]
    """The run's: the user's file finds the same modules."""
    cell: str
    """File of one byte, where the process notes which answer of its message is in work."""


class ScoreItem(NamedTuple):
    """One answer to be scored; a message to a process is a list of them."""

    scorer: str
    """A built-in one; ignored where the user's function scores."""
    seed: int
    """For the random numbers that the scorer may draw."""
    arguments: Arguments


class Ready(NamedTuple):
    """The process has loaded what makes the calls, or cannot and ends."""

    is_async: bool
    """True if many calls of the function may wait side by side."""
    refusal: str = ""
    """The reason why the user's file cannot be used, for the user."""


class PoolReply(NamedTuple):
    """The outcomes of a message's first items; no call was made for the others."""

    outcomes: Sequence[Any]
    """None: the fault may be another item's, and the pool retries this one alone."""
    is_last: bool = False
    """True if the process takes no more."""


class UserScorer:
    """A user's reward: a Python function, sync or async, in a signature told by its parameters.

    | parameters | of | gets |
    |---|---|---|
    | data_source, solution_str, ground_truth, extra_info | verl | one answer |
    | data_source, response, ground_truth, extra | built-in scorers | the same, extra: columns |
    | completions, prompts, columns by name | TRL | lists; prompts of messages: completions, too |

    It may leave out all but the answer, gets `kwargs` besides, and returns a number, a `Score`, or
    a dict with `score`; TRL's returns a list, in which None gives no reward. The dict's `acc` is
    the accuracy (without it: 1 where the score is above 0), every other key is kept with the
    sample. A sync function runs in its process's main thread where that is a worker's, because
    signals (math-verify's alarm) work nowhere else.

    Args:
        path: the file.
        name: the function's.
        kwargs: passed to each call.
        batched: verl's is called with lists, as `compute_score(data_sources=…, solution_strs=…,
            ground_truths=…, extra_infos=…, **kwargs)`, and returns a list of such results.
        field: key of its section.

    Raises:
        RewardError: the file cannot be imported, or has no such function.
    """

    def __init__(
        self,
        path: str,
        name: str,
        kwargs: dict[str, Any],
        batched: bool = False,
        field: str = "reward.function",
    ) -> None:
        from winnow.user_code import load_user_object

        self.file = str(Path(path).expanduser().absolute())
        self._kwargs = kwargs
        self._function = function = load_user_object(path, f"{field}.path", RewardError, name)
        signature = inspect.signature(function)
        self._is_trl = "completions" in signature.parameters
        self.batched = batched or self._is_trl
        single = _SCORERS_ARGUMENTS if "response" in signature.parameters else _ARGUMENTS
        names: tuple[str, ...] = tuple(f"{name}s" for name in single) if batched else single
        self._names = ("completions", "prompts") if self._is_trl else names
        takes_any = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        self._accepts: Callable[[str], bool] = lambda n: takes_any or n in signature.parameters
        passed = dict.fromkeys(filter(self._accepts, self._names))
        try:  # which columns there are is known with the rows alone
            (signature.bind_partial if self._is_trl else signature.bind)(**passed, **kwargs)
            if not {"completions", names[1]} & passed.keys():
                raise TypeError(f"it takes no {names[1]}")
        except TypeError as error:
            raise RewardError(
                f"{field}.path {path}: {name}{signature} cannot be called with "
                f"{', '.join([*self._names, *kwargs])} ({error}); change its arguments, or "
                f"{field}.kwargs"
            ) from error
        called = getattr(function, "__call__", None)  # noqa: B004  an object's own
        self.is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        """True if many calls may wait side by side."""

    def call(self, batch: Sequence[Arguments]) -> Any:
        """Call the function with one answer, or with all where it takes many.

        Its result may be something to await, and it may raise anything.
        """
        if self._is_trl:
            arguments = _trl_arguments(batch)
        else:
            whole = self._names == _SCORERS_ARGUMENTS
            rows = [
                (*each[:3], dict(each[3] if whole else each[3].get("extra_info") or {}))
                for each in batch
            ]
            lists = [[*column] for column in zip(*rows, strict=True)]
            values: Sequence[Any] = lists if self.batched else rows[0]
            arguments = dict(zip(self._names, values, strict=True))
        passed = {name: value for name, value in arguments.items() if self._accepts(name)}
        return self._function(**passed, **self._kwargs)

    def read(self, raw: Any, count: int) -> list[Outcome]:
        """Return the scores in what a call returned; what is no score in a list fails alone.

        Raises:
            TypeError, ValueError: there are none, or not so many.
        """
        if not self.batched:
            return [check_score(parse_result(raw))]
        if isinstance(raw, str | bytes | Mapping) or not hasattr(raw, "__iter__"):
            raise TypeError(f"the function must return a list of scores, got {type(raw).__name__}")
        parts = list(raw)
        if len(parts) != count:
            raise ValueError(f"the function returned {len(parts)} scores for {count} answers")
        return [self._parse_one(part) for part in parts]

    def _parse_one(self, part: Any) -> Outcome:
        if part is None and self._is_trl:
            return Score(0.0, 0.0, has_accuracy=False)
        try:
            return check_score(parse_result(part))
        except Exception as error:  # of an object that the user's function made
            return make_failure(error, self.file)


def _trl_arguments(batch: Sequence[Arguments]) -> dict[str, list[Any]]:
    """Return answers as TRL passes them: completions, prompts, and each column of their rows."""
    rows = [{"data_source": of, "ground_truth": truth, **row} for of, _, truth, row in batch]
    prompts = [row.pop("prompt") for row in rows]
    completions: list[Any] = [text for _, text, _, _ in batch]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            completions[index] = [{"role": "assistant", "content": completions[index]}]
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    return {**columns, "completions": completions, "prompts": prompts}


def score_by_rule(scorer: Scorer, arguments: Arguments) -> Outcome:
    """Score one answer with a built-in scorer."""
    try:
        return check_score(scorer.score(*arguments))
    # SystemExit: a scorer that calls exit() must not end the process either.
    except (Exception, SystemExit) as error:
        return make_failure(error, None)


async def score_by_call(user: UserScorer, batch: Sequence[Arguments]) -> list[Outcome] | Failure:
    """Score answers in one call of the user's function; a failure is that of the call."""
    try:
        result = user.call(batch)
        return user.read(await result if inspect.isawaitable(result) else result, len(batch))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise_if_cancelled(error)
        return make_failure(error, user.file)


def raise_if_cancelled(error: BaseException) -> None:
    """Raise a cancellation of this task again; a scorer may raise another."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error


def check_score(score: Score) -> Score:
    """Return the score, if it can be learned from.

    Raises:
        ValueError: a number is not finite, or the accuracy no share.
    """
    for name, number in (("reward", score.reward), *score.parts.items()):
        if not math.isfinite(number):
            raise ValueError(f"the scorer returned {number} as {name}")
    if not 0 <= score.accuracy <= 1:
        raise ValueError(f"the accuracy must lie in [0, 1], got {score.accuracy:g}")
    return score


def parse_result(result: Any) -> Score:
    """Return the score in what a function returned.

    Raises:
        TypeError, ValueError: there is none.
    """
    if isinstance(result, Score):  # the reward that learning sees is made of parts
        return result if result.parts else replace(result, parts={"task": result.reward})
    rest: dict[str, Any] = {}
    if isinstance(result, Mapping):
        rest = {str(key): value for key, value in result.items()}
        if "score" not in rest:
            raise ValueError(
                f"the dict returned has no key score, only {', '.join(rest) or 'none'}"
            )
        result = rest.pop("score")
    reward = _to_float(result, "score")
    has_accuracy = "acc" in rest
    accuracy = _to_float(rest.pop("acc"), "acc") if has_accuracy else float(reward > 0)
    if not 0 <= accuracy <= 1:
        raise ValueError(f"acc must lie in [0, 1], got {accuracy:g}")
    return Score(reward, accuracy, {"task": reward}, rest, has_accuracy=has_accuracy)


def _to_float(value: Any, name: str) -> float:
    """A number of any library. NaN passes here, and not in `check_score`."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(
            f"{name} must be a number, got {type(value).__name__}; "
            "return a float, or a dict with the key score"
        )
    return float(value)


def timeout_failure(timeout_s: float, section: str = "reward", result: str = "score") -> Failure:
    """Return the failure of a call whose time is up."""
    return Failure(f"no {result} within {section}.timeout_s={timeout_s:g}")


def make_failure(error: BaseException, user_file: str | None) -> Failure:
    """Make the failure of an error, with the place in the user's file if there is one."""
    try:
        text = " ".join(str(error).split())
    except Exception as in_text:  # the user's exception may be as broken as the function
        text = f"(no text: {type(in_text).__name__} in its __str__)"
    if len(text) > _LONGEST_LINE:
        text = f"{text[:_LONGEST_LINE]}…"
    below = error.__traceback__
    while below and below.tb_next and _is_wrapper(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    frames = traceback.extract_tb(below)
    foreign = [frame for frame in frames if not _is_wrapper(frame.filename)]
    user_frames = [frame for frame in foreign if frame.filename == user_file] or foreign
    place = f" at {user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else ""
    line = f"{type(error).__name__}{': ' if text else ''}{text}{place}"
    # A fault in what was returned, such as None, has no place in the user's file.
    trace = "".join(traceback.format_exception(type(error), error, below)) if foreign else line
    from winnow.sandbox.program import SandboxError

    return Failure(line, trace, outside=isinstance(error, SandboxError))


def _is_wrapper(filename: str) -> bool:
    return os.path.dirname(filename) in _FOLDERS


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process that is in RAM; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def make_portable(score: Score) -> Score:
    """Replace objects that other processes may be unable to unpickle by their texts."""
    extra = {name: v if _is_plain(v) else _as_text(v) for name, v in score.extra.items()}
    return replace(score, extra=extra)


def _is_plain(value: Any, depth: int = 20) -> bool:
    """Return whether any process can read a value; one that is nested endlessly is not plain."""
    kind = type(value)
    if depth and kind in (list, tuple, set, frozenset):
        return all(_is_plain(each, depth - 1) for each in value)
    if depth and kind is dict:
        return all(_is_plain(each, depth - 1) for pair in value.items() for each in pair)
    if kind is np.ndarray or isinstance(value, np.generic):
        return not value.dtype.hasobject
    return kind in _ATOMS


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's class
        return f"({type(value).__name__}: {type(error).__name__} in its __str__)"
