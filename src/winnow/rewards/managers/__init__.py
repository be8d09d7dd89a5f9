"""The managers: each has answers scored by rules or by the user's code, somewhere.

| name | calls | where |
|---|---|---|
| auto, dapo | a user's function, or the built-in rules | function in workers, rules here |
| naive | the same, one by one | in the run's own process |
| parallel | the same | in workers |
| batch | a user's function, with what waits together | in workers |
| remote | a service, with a user's arguments | over HTTP |
| custom | a class of the user's | in the run's own process |

Code in answers runs in the sandbox in any case.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

from winnow.config.reward import NaiveManager, ParallelManager, RewardConfig
from winnow.rewards.routing import NO_SCORER, Router
from winnow.rewards.scorers import SCORERS, Scorer
from winnow.rewards.task import Arguments, Failure, outcome, outcome_without_loop
from winnow.types import Prompt, Score

if TYPE_CHECKING:
    from winnow.rewards.pool import ScorerPool
    from winnow.rewards.user_function import UserScorer

Place = Literal["by_scorer", "here", "apart"]


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


def make_manager(config: RewardConfig) -> Manager:
    """Load what scores, and start the workers that a user's function needs.

    Raises:
        RewardError: a scorer's name, the user's file or class, or the service is wrong.
    """
    match config.manager.name:
        case "batch":
            from winnow.rewards.managers.batch import BatchCalls

            return BatchCalls(config)
        case "remote":
            from winnow.rewards.managers.remote import RemoteCalls

            return RemoteCalls(config)
        case "custom":
            from winnow.rewards.managers.custom import CustomCalls

            return CustomCalls(config)
    place = rules_place(config)
    if config.function.path is None:
        return Rules(config, place)
    return FunctionCalls(config, is_here=place == "here")


def rules_place(config: RewardConfig) -> Place:
    """Return where built-in rules run, which may score parts beside a user's function, too."""
    if isinstance(config.manager, NaiveManager) or config.workers == 0:
        return "here"
    is_parallel = isinstance(config.manager, ParallelManager)
    return "apart" if is_parallel or config.workers is not None else "by_scorer"


class Rules(Manager):
    """Runs built-in scorers; routes answers to them by data source.

    Rules are quick and end by themselves. Those that ask for a process apart (`Scorer.apart`) get
    one unless all are wanted here or all apart. Scorers of code wait in threads for the sandbox,
    whose slots bound how many programs run at once over the whole run.

    Args:
        place: where scorers run that need no sandbox; `by_scorer`: as each asks for.
    """

    def __init__(self, config: RewardConfig, place: Place = "by_scorer") -> None:
        self.router = Router(config.scorers)
        self._config = config
        self._apart = {
            scorer.name
            for scorer in SCORERS.values()
            if not scorer.sandboxed and place != "here" and (scorer.apart or place == "apart")
        }
        self._threads: ThreadPoolExecutor | None = None
        self._has_sandbox = False

    def prepare(self, data_sources: Iterable[str]) -> None:
        sources = list(data_sources)
        self.router.check(sources)
        self.start([self.router.scorer(source) for source in sources])

    def start(self, scorers: Iterable[Scorer]) -> None:
        """Start the workers and the sandbox that these scorers need.

        Raises:
            RewardError: there is no sandbox.
        """
        for scorer in scorers:
            if scorer.name in self._apart:
                self._workers()
            if scorer.sandboxed:
                self._programs()

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return any(self.is_late(self.router.scorer(source)) for source in data_sources)

    def is_late(self, scorer: Scorer) -> bool:
        """Return whether a scorer's scores come from workers or the sandbox."""
        return scorer.sandboxed or scorer.name in self._apart

    async def score(
        self, prompt: Prompt, text: str, scorer: Scorer | None = None
    ) -> Score | Failure:
        """Score one answer by a scorer, or else by that of its source."""
        scorer = scorer or self.router.scorer(prompt.data_source)
        arguments = (prompt.data_source, text, prompt.ground_truth, prompt.extra)
        if scorer is NO_SCORER:
            return scorer.score(*arguments)
        if scorer.sandboxed:
            call = asyncio.get_running_loop().run_in_executor(
                self._programs(), outcome_without_loop, None, scorer.name, arguments
            )
            try:
                return await call
            finally:
                self._done += 1
        if scorer.name in self._apart:
            plain = (*arguments[:3], dict(prompt.extra))
            return await self._workers().score(scorer.name, 0, plain)
        return await outcome(None, scorer.name, arguments)

    def close(self) -> None:
        super().close()
        if self._has_sandbox:
            import winnow.sandbox

            winnow.sandbox.close()
            self._has_sandbox = False
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def _workers(self) -> ScorerPool:
        if self._pool is None:
            from winnow.rewards.pool import ScorerPool, default_workers

            self._pool = ScorerPool(self._config, self._config.workers or default_workers())
            self._pool.start()
        return self._pool

    def _programs(self) -> ThreadPoolExecutor:
        """Threads that wait for the sandbox, one for each of its slots."""
        if self._threads is None:
            import winnow.sandbox

            sandbox = winnow.sandbox.start(self._config.sandbox)
            self._has_sandbox = True
            self._threads = ThreadPoolExecutor(sandbox.slots, "programs")
        return self._threads


class FunctionCalls(Manager):
    """Calls a user's function answer by answer.

    Args:
        is_here: call it in the run's own process, in its main thread and without limits; else
            workers do, with limits of time and memory.

    Raises:
        RewardError: the user's file cannot be used.
    """

    def __init__(self, config: RewardConfig, is_here: bool) -> None:
        self._user: UserScorer | None = None
        if is_here:
            from winnow.rewards.user_function import UserScorer

            self._user = UserScorer(config.function)
        else:
            from winnow.rewards.pool import ScorerPool, default_workers

            self._pool = ScorerPool(config, config.workers or default_workers(), config.function)
            self._pool.start()

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return self._user is None or self._user.is_async

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        arguments, seed = arguments_of(prompt, text), seed_of(prompt, text)
        if self._pool is not None:
            return await self._pool.score("", seed, arguments)
        try:
            return await outcome(self._user, "", arguments)
        finally:
            self._done += 1


def arguments_of(prompt: Prompt, text: str) -> Arguments:
    """Return what a user's function is called with for an answer."""
    info = {"extra_info": prompt.extra.get("extra_info")}
    return prompt.data_source, text, prompt.ground_truth, info


def seed_of(prompt: Prompt, text: str) -> int:
    """Return a seed for what a scorer may draw: the answer's own, in whichever worker."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), zlib.crc32(prompt.uid.encode()))
