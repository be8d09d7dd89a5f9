"""Built-in scorers where they belong: in the run's own process, a worker, or the sandbox.

Rules are quick and end by themselves. Those that ask for a process apart (`Scorer.apart`) get
one unless all are wanted here or all apart. Scorers of code wait in threads for the sandbox,
whose slots bound how many programs run at once over the whole run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from winnow.config.reward import RewardConfig
from winnow.rewards.pool import ScorerPool, default_workers
from winnow.rewards.routing import NO_SCORER, Router
from winnow.rewards.scorers import Scorer
from winnow.rewards.task import Arguments, Failure, outcome, outcome_without_loop
from winnow.sandbox import current
from winnow.sandbox.program import Sandbox
from winnow.types import Prompt, Score

Place = Literal["by_scorer", "here", "apart"]


class Rules:
    """Runs built-in scorers; routes answers to them by data source.

    Args:
        place: where scorers run that need no sandbox; `by_scorer`: as each asks for.
    """

    def __init__(self, config: RewardConfig, place: Place = "by_scorer") -> None:
        self.router = Router(config.scorers)
        self._config, self._place = config, place
        self._pool: ScorerPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._has_sandbox = False
        self._run_programs = 0

    @property
    def scored(self) -> int:
        """Answers that pool and sandbox have dealt with."""
        return self._run_programs + (0 if self._pool is None else self._pool.finished)

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See that these have a scorer, and start what it needs.

        Raises:
            RewardError: one has none, or its scorer cannot run here.
        """
        sources = list(data_sources)
        self.router.check(sources)
        self.prepare_scorers([self.router.scorer(source) for source in sources])

    def prepare_scorers(self, scorers: Iterable[Scorer]) -> None:
        """Start the workers and the sandbox that these need.

        Raises:
            RewardError: there is no sandbox.
        """
        scorers = list(scorers)
        if any(self._is_apart(scorer) for scorer in scorers):
            self._started_pool()
        if any(scorer.sandboxed for scorer in scorers):
            self._sandbox()

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether scores of these come from workers or the sandbox."""
        return any(self.is_late(self.router.scorer(source)) for source in data_sources)

    def is_late(self, scorer: Scorer) -> bool:
        """Whether a scorer's scores come from workers or the sandbox."""
        return scorer.sandboxed or self._is_apart(scorer)

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the scorer of the prompt's source says."""
        return await self.score_by(self.router.scorer(prompt.data_source), prompt, text)

    async def score_by(self, scorer: Scorer, prompt: Prompt, text: str) -> Score | Failure:
        """What this scorer says, whatever the routes are."""
        arguments = (prompt.data_source, text, prompt.ground_truth, prompt.extra)
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
        if self._has_sandbox:
            current.close()
            self._has_sandbox = False
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def _is_apart(self, scorer: Scorer) -> bool:
        if scorer is NO_SCORER or scorer.sandboxed or self._place == "here":
            return False
        return scorer.apart or self._place == "apart"

    async def _sandboxed(self, scorer: Scorer, arguments: Arguments) -> Score | Failure:
        sandbox = self._sandbox()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(sandbox.slots), "programs")
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, outcome_without_loop, None, scorer.name, arguments
        )
        try:
            return await call
        finally:
            self._run_programs += 1

    def _sandbox(self) -> Sandbox:
        sandbox = current.start(self._config.sandbox)
        self._has_sandbox = True
        return sandbox

    def _started_pool(self) -> ScorerPool:
        if self._pool is None:
            workers = self._config.workers or default_workers()
            self._pool = ScorerPool(self._config, workers)
            self._pool.start()
        return self._pool
