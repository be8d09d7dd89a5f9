"""Messages between the scorer pool and its processes, over `winnow.workers.local`.

Message 0 to a process is a `ScorerJob`; a `Ready` or a `Refused` answers it. All others are items,
each answered by a `ScorerReply`. What travels back is numbers, texts and plain containers
(`portable`), so that the run never needs the classes of a user's file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from winnow.config.reward import UserFunction
from winnow.rewards.task import Arguments, Outcome
from winnow.types import Score

_ATOMS = (str, bytes, int, float, complex, bool, type(None))


@dataclass(frozen=True)
class ScorerJob:
    """The function that a process scores with, and its limits."""

    function: UserFunction | None
    """None: the built-in scorers."""
    timeout_s: float
    memory_bytes: int
    python_path: tuple[str, ...]
    """The run's: the user's file finds the same modules."""
    batched: bool = False
    """True if the function takes many answers in a call."""


class ScoreItem(NamedTuple):
    """One answer to be scored."""

    scorer: str
    """A built-in one; ignored where the user's function scores."""
    seed: int
    """For the random numbers that the scorer may draw."""
    arguments: Arguments


class BatchItem(NamedTuple):
    """Answers to be scored in one call of the user's function."""

    seed: int
    """For the random numbers that the call may draw."""
    batch: tuple[Arguments, ...]


class Ready(NamedTuple):
    """The process has loaded what scores."""

    is_async: bool
    """True if many calls of the function may wait side by side."""


class Refused(NamedTuple):
    """The user's file cannot be used; the process ends."""

    line: str
    """The reason, for the user."""


class ScorerReply(NamedTuple):
    """The end of an item."""

    outcome: Outcome | None
    """None: its time was up, but others had blocked the process."""
    is_last: bool = False
    """True if the process takes no more: what it has not answered is to be sent elsewhere."""


def late_line(timeout_s: float) -> str:
    """The failure of an answer whose time is up."""
    return f"no score within reward.timeout_s={timeout_s:g}"


def portable(score: Score) -> Score:
    """The score with texts in place of objects that only its process knows."""
    extra = {name: v if _is_plain(v) else _as_text(v) for name, v in score.extra.items()}
    return replace(score, extra=extra)


def _is_plain(value: Any, depth: int = 20) -> bool:
    """Return whether any process can read a value; one that is nested endlessly is not plain."""
    kind = type(value)
    if depth and kind in (list, tuple, set, frozenset):
        return all(_is_plain(each, depth - 1) for each in value)
    if depth and kind is dict:
        return all(_is_plain(each, depth - 1) for pair in value.items() for each in pair)
    if kind is np.ndarray:
        return bool(value.dtype != object)
    return kind in _ATOMS or isinstance(value, np.generic)


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # a user's class
        return f"({type(value).__name__}: {type(error).__name__} in its __str__)"
