"""What a manager is: it has answers scored, and says where that happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from winnow.rewards.task import Failure
from winnow.types import Prompt, Score


class Manager(Protocol):
    """Calls what scores; used from one event loop at a time. `close` ends what it started.

    Scores come back in whatever order; an answer's score depends on that answer alone. What a
    scorer does costs its own answer only: it becomes a `Failure` in one line.
    """

    @property
    def scored(self) -> int:
        """Answers that were dealt with beside the event loop: grows while scoring gets on."""
        ...

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See that these can be scored, and start what that needs.

        Raises:
            RewardError: one cannot.
        """
        ...

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether scores of these come later, while the run's own process does other things."""
        ...

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What an answer is worth, or why nobody can say.

        Raises:
            RewardError: no answer can be scored any more.
        """
        ...

    def close(self) -> None:
        """End what was started; may be called twice."""
        ...
