"""`Manager`: the interface of what scores answers, by rules or by the user's code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

if TYPE_CHECKING:
    from winnow.rewards.pool import ScorerPool


class Manager:
    """Scores answers; used from one event loop at a time, and closed by its owner.

    Scores come back in whatever order; an answer's score depends on that answer alone. A fault of a
    scorer costs its own answer only: it becomes a `Failure` in one line. Contract tests:
    `tests/contract/test_managers.py`.
    """

    _pool: ScorerPool | None = None
    _done = 0
    """Answers scored in this process."""

    @property
    def scored(self) -> int:
        """Answers scored outside the event loop so far; grows while scoring makes progress."""
        return self._done + (0 if self._pool is None else self._pool.finished)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Start the workers and services that these sources need.

        Raises:
            RewardError: one cannot be scored.
        """

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Return whether scores arrive later, while the run's process does other work."""
        return True

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """Score one answer, or return why that failed.

        Raises:
            RewardError: no answer can be scored any more.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop workers and services; may be called twice."""
        if self._pool is not None:
            self._pool.close()
