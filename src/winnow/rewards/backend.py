"""Where answers are scored: in the run's own process, in its sandbox, or in a pool of workers.

A user's function goes to the pool, because nobody knows what it does; built-in rules are quick,
end by themselves, and stay here unless `reward.workers` says otherwise or the scorer itself asks
for a process apart. Scorers of code wait in threads for the sandbox, whose slots bound how many
programs run at once over the whole run.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from winnow.config.reward import RewardConfig
from winnow.rewards.pool import ScorerPool
from winnow.rewards.routing import NO_SCORER, Router
from winnow.rewards.sandbox import current
from winnow.rewards.scorers import Scorer
from winnow.rewards.task import Arguments, Failure, outcome, outcome_without_loop
from winnow.rewards.user_function import UserScorer
from winnow.types import Prompt, Score


class Backend:
    """Calls scorers; `close` ends what it started."""

    def __init__(self, config: RewardConfig) -> None:
        """Load what scores, and start the workers that a user's function needs.

        Raises:
            RewardError: a scorer's name or the user's file is wrong.
        """
        self.router = Router(config.scorers)
        self._config = config
        self._pool: ScorerPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._run_programs = 0
        self._user: UserScorer | None = None
        self.has_user_function = config.function.path is not None
        if self.has_user_function and config.workers == 0:
            self._user = UserScorer(config.function)
        elif self.has_user_function:
            self._started_pool()

    @property
    def scored(self) -> int:
        """Answers that pool and sandbox have dealt with: it grows while scoring gets on."""
        return self._run_programs + (0 if self._pool is None else self._pool.finished)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See that these can be scored, and start what that needs.

        Raises:
            RewardError: one cannot.
        """
        if self.has_user_function:
            return
        self.router.check(data_sources)
        scorers = [self.router.scorer(source) for source in data_sources]
        if any(self._is_apart(scorer) for scorer in scorers):
            self._started_pool()
        if any(scorer.sandboxed for scorer in scorers):
            current.start(self._config.sandbox)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether scores of these come later, while the run's own process does other things."""
        if self._user is not None:
            return self._user.is_async
        if self.has_user_function:
            return True
        scorers = [self.router.scorer(source) for source in data_sources]
        return any(scorer.sandboxed or self._is_apart(scorer) for scorer in scorers)

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What a scorer says of an answer.

        Raises:
            RewardError: a new worker cannot load the user's file any more.
        """
        arguments = (prompt.data_source, text, prompt.ground_truth, prompt.extra)
        if self._user is not None:
            return await outcome(self._user, "", arguments)
        if self.has_user_function:
            info = {"extra_info": prompt.extra.get("extra_info")}
            seed = zlib.crc32(
                text.encode("utf-8", "surrogatepass"), zlib.crc32(prompt.uid.encode())
            )
            pool = self._started_pool()
            return await pool.score("", seed, (prompt.data_source, text, prompt.ground_truth, info))
        scorer = self.router.scorer(prompt.data_source)
        if scorer is NO_SCORER:
            return scorer.score(*arguments)
        if scorer.sandboxed:
            return await self._sandboxed(scorer, arguments)
        if self._is_apart(scorer):
            plain = (*arguments[:3], dict(prompt.extra))
            return await self._started_pool().score(scorer.name, 0, plain)
        return await outcome(None, scorer.name, arguments)

    def close(self) -> None:
        """End the workers, and what runs in the sandbox."""
        if self._pool is not None:
            self._pool.close()
        if self._threads is not None:
            current.close()
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def _is_apart(self, scorer: Scorer) -> bool:
        workers = self._config.workers
        wanted = scorer.apart if workers is None else workers > 0
        return wanted and scorer is not NO_SCORER and not scorer.sandboxed

    async def _sandboxed(self, scorer: Scorer, arguments: Arguments) -> Score | Failure:
        sandbox = current.start(self._config.sandbox)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(sandbox.slots), "programs")
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, outcome_without_loop, None, scorer.name, arguments
        )
        try:
            return await call
        finally:
            self._run_programs += 1

    def _started_pool(self) -> ScorerPool:
        if self._pool is None:
            self._pool = ScorerPool(self._config, self._config.workers or max(1, cores() // 2))
            self._pool.start()
        return self._pool


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
