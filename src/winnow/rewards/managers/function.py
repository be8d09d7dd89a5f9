"""A user's function, answer by answer: in the run's own process, or in workers with limits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from winnow.config.reward import RewardConfig
from winnow.rewards.pool import ScorerPool, default_workers
from winnow.rewards.task import Failure, outcome
from winnow.rewards.user_function import UserScorer
from winnow.types import Prompt, Score


class FunctionHere:
    """Calls the function in the run's own process, in its main thread, without limits."""

    def __init__(self, config: RewardConfig) -> None:
        """Import the user's file.

        Raises:
            RewardError: it cannot be used.
        """
        self._user = UserScorer(config.function)
        self.scored = 0

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Nothing: it was imported at the start, and scores whatever comes."""

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether others may run while the function waits."""
        return self._user.is_async

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the function says."""
        arguments = (prompt.data_source, text, prompt.ground_truth, prompt.extra)
        try:
            return await outcome(self._user, "", arguments)
        finally:
            self.scored += 1

    def close(self) -> None:
        """Nothing to end."""


class FunctionApart:
    """Has worker processes call the function, with limits of time and memory."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the workers; each imports the user's file.

        Raises:
            RewardError: it cannot be used.
        """
        workers = config.workers or default_workers()
        self._pool = ScorerPool(config, workers, config.function)
        self._pool.start()

    @property
    def scored(self) -> int:
        """Answers that the workers have dealt with."""
        return self._pool.finished

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Nothing: the workers have the file, and score whatever comes."""

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Always: others work at it."""
        return True

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the function says.

        Raises:
            RewardError: a new worker cannot load the user's file any more.
        """
        info = {"extra_info": prompt.extra.get("extra_info")}
        arguments = (prompt.data_source, text, prompt.ground_truth, info)
        return await self._pool.score("", seed_of(prompt, text), arguments)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def seed_of(prompt: Prompt, text: str) -> int:
    """Of random numbers that a scorer may draw: the answer's own, in whichever worker."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), zlib.crc32(prompt.uid.encode()))
