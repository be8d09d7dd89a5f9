"""`Manager`: has answers scored by rules or by the user's code, somewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

if TYPE_CHECKING:
    from winnow.rewards.pool import ScorerPool


class Manager:
    """Has answers scored; used from one event loop at a time, and closed by its owner.

    Scores come back in whatever order; an answer's score depends on that answer alone. A fault of a
    scorer costs its own answer only: it becomes a `Failure` in one line. Contract tests:
    `tests/contract/test_managers.py`.
    """

    _pool: ScorerPool | None = None
    _done = 0
    """Answers that were dealt with here."""

    @property
    def scored(self) -> int:
        """Answers that were dealt with beside the event loop: grows while scoring gets on."""
        return self._done + (0 if self._pool is None else self._pool.finished)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Start what these sources need.

        Raises:
            RewardError: one cannot be scored.
        """

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Return whether scores come later, while the run's own process does other things."""
        return True

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """Score one answer, or say why that failed.

        Raises:
            RewardError: no answer can be scored any more.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what was started; may be called twice."""
        if self._pool is not None:
            self._pool.close()
