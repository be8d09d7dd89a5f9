"""The managers: each scores answers by rules or by the user's code, in some process.

| name | calls | where |
|---|---|---|
| auto, dapo | a user's function, or the built-in rules | function in workers, rules here |
| naive | the same, one by one | in the run's own process |
| parallel | the same | in workers |
| batch | a user's function, with what waits together | in workers |
| remote | a service, with a user's arguments | over HTTP |
| custom | a class of the user's | in the run's own process |
| environment | nothing: the environment's rewards are all | |

Code in answers runs in the sandbox in any case.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from winnow.config.reward import CustomManager, NaiveManager, ParallelManager, RewardConfig
from winnow.errors import RewardError, WinnowError
from winnow.rewards.manager import Manager
from winnow.rewards.routing import Router
from winnow.rewards.scorers import SCORERS, Scorer
from winnow.rewards.task import (
    Failure,
    UserScorer,
    check_score,
    make_failure,
    parse_result,
    raise_if_cancelled,
    score_by_call,
    score_by_rule,
    timeout_failure,
)
from winnow.types import Prompt, Score
from winnow.user_code import PROGRAM, load_user_object

if TYPE_CHECKING:
    from winnow.rewards.pool import ScorerPool

log = logging.getLogger(__name__)

TURN_REWARDS = "user_turn_rewards"
"""verl's name of the rewards of a conversation's turns, in `rollout_reward_scores`."""


def make_manager(config: RewardConfig) -> Manager:
    """Make the manager of a recipe, and start the workers that a user's function needs.

    Raises:
        RewardError: a scorer's name, the user's file or class, or the service is wrong.
    """
    if config.manager.name == "remote":
        from winnow.rewards.remote import HttpManager

        return HttpManager(config)
    if isinstance(config.manager, CustomManager):
        return UserManager(config.manager, config)
    if config.manager.name == "environment":
        return TurnRewardManager()
    return RuleManager(config) if config.function.path is None else FunctionManager(config)


def rules_location(config: RewardConfig) -> Literal["by_scorer", "in_process", "workers"]:
    """Return where built-in rules run; they may score parts besides a user's function."""
    if isinstance(config.manager, NaiveManager) or config.workers == 0:
        return "in_process"
    is_parallel = isinstance(config.manager, ParallelManager)
    return "workers" if is_parallel or config.workers is not None else "by_scorer"


class RuleManager(Manager):
    """Runs built-in scorers; routes answers to them by data source.

    Rules are quick and end by themselves. Those that are `Scorer.offloaded` run in worker
    processes, unless all rules run in this process or all in workers. Scorers of code wait in
    threads for the sandbox, whose slots bound how many programs run at once over the whole run.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.router = Router(config.scorers)
        place = rules_location(config)
        self._offloaded = {
            scorer.name
            for scorer in SCORERS.values()
            if place == "workers" or (place == "by_scorer" and scorer.offloaded)
        }
        self._threads: ThreadPoolExecutor | None = None

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
            if scorer.sandboxed:
                self._get_threads()
            elif scorer.name in self._offloaded:
                self._get_pool()

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return any(self.is_offloaded(self.router.scorer(source)) for source in data_sources)

    def is_offloaded(self, scorer: Scorer) -> bool:
        """Return whether a scorer's scores come from workers or the sandbox."""
        return scorer.sandboxed or scorer.name in self._offloaded

    async def score(
        self, prompt: Prompt, text: str, scorer: Scorer | None = None
    ) -> Score | Failure:
        """Score one answer by a scorer, or else by that of its source."""
        scorer = scorer or self.router.scorer(prompt.data_source)
        arguments = prompt.data_source, text, prompt.ground_truth, prompt.extra
        if scorer.sandboxed:
            call = asyncio.get_running_loop().run_in_executor(
                self._get_threads(), score_by_rule, scorer, arguments
            )
            try:
                return await call
            finally:
                self._done += 1
        if scorer.name in self._offloaded:
            plain = (*arguments[:3], dict(prompt.extra))
            return await self._get_pool().score(scorer.name, 0, plain)
        return score_by_rule(scorer, arguments)

    def close(self) -> None:
        super().close()
        if self._threads is not None:
            import winnow.sandbox

            winnow.sandbox.close()
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def _get_pool(self) -> ScorerPool:
        if self._pool is None:
            from winnow.rewards.pool import ScorerPool

            self._pool = ScorerPool(self._config)
        return self._pool

    def _get_threads(self) -> ThreadPoolExecutor:
        """Threads that wait for the sandbox, one for each of its slots."""
        if self._threads is None:
            import winnow.sandbox

            slots = winnow.sandbox.start(self._config.sandbox).slots
            self._threads = ThreadPoolExecutor(slots, "programs")
        return self._threads


class FunctionManager(Manager):
    """Calls a user's function: in workers with limits of time and memory, or here without any.

    With `reward/manager=batch` answers that wait while all workers are busy go together into the
    next call. The company of an answer thus depends on the rest of the run, and differs in a
    resumed one: the function must give each answer the score that it would have alone.

    An object of the running program (`user_code.PROGRAM`) is always called here.

    Args:
        field: key of the function in `RewardConfig.functions`.

    Raises:
        RewardError: the user's file cannot be used.
    """

    def __init__(self, config: RewardConfig, field: str = "reward.function") -> None:
        self._user: UserScorer | None = None
        user = config.functions()[field]
        if user.path == PROGRAM or rules_location(config) == "in_process":
            self._user = UserScorer(str(user.path), user.name, user.kwargs, field=field)
        else:
            from winnow.rewards.pool import ScorerPool

            self._pool = ScorerPool(config, field)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return self._user is None or self._user.is_async

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        contents = [message["content"] for message in prompt.messages]
        is_text = bool(contents) and all(isinstance(each, str) for each in contents)
        asked = "\n".join(contents) if is_text else prompt.text  # else parts, with images
        columns = {"prompt": asked, **prompt.extra}
        arguments = prompt.data_source, text, prompt.ground_truth, columns
        if self._pool is not None:
            # For what the function draws: the answer's own seed, in whichever worker.
            uid = zlib.crc32(prompt.uid.encode())
            seed = zlib.crc32(text.encode("utf-8", "surrogatepass"), uid)
            return await self._pool.score("", seed, arguments)
        assert self._user is not None
        try:
            outcome = await score_by_call(self._user, [arguments])
            return outcome if isinstance(outcome, Failure) else outcome[0]
        finally:
            self._done += 1


class TurnRewardManager(Manager):
    """Gives no reward besides the environment's; the accuracy is the environment's figure
    `accuracy` or `success`, or else 1 where its rewards add up to more than 0."""

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return False

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        scores = prompt.extra["extra_info"]["rollout_reward_scores"]
        figure = scores.get("accuracy", scores.get("success"))
        accuracy = float(sum(scores[TURN_REWARDS]) > 0) if figure is None else figure
        try:
            return check_score(Score(0.0, accuracy, has_accuracy=figure is not None))
        except ValueError as error:
            return make_failure(error, None)


class UserManager(Manager):
    """Wraps a user's manager, a class by import path; missing methods get defaults.

        class MyManager:
            def __init__(self, config, **kwargs): ...  # section `reward`; reward.manager.kwargs
            async def score(self, prompt, text): ...   # a number, a dict with `score`, a Score
            def prepare(self, data_sources): ...       # these three may be missing
            def takes_time(self, data_sources): ...
            def close(self): ...

    It runs in the run's own process. `score` may be a plain function; an asynchronous one has
    `reward.timeout_s` seconds for each answer, and its fault costs that answer.

    Raises:
        RewardError: the class cannot be imported, made, or used.
    """

    def __init__(self, section: CustomManager, config: RewardConfig) -> None:
        field = "reward.manager.path"
        self._where = f"{field} {section.path}"
        self._timeout_s = config.timeout_s
        factory = load_user_object(section.path, field, RewardError)
        self._custom = self._call_guarded("the constructor", factory, config, **section.kwargs)
        if not callable(getattr(self._custom, "score", None)):
            raise RewardError(
                f"{self._where} has no method score; add `async def score(self, prompt, text)`"
            )
        for method in ("prepare", "takes_time", "close"):  # where nothing can wait for them
            if inspect.iscoroutinefunction(getattr(self._custom, method, None)):
                raise RewardError(
                    f"{self._where}: its {method} is a coroutine function, which only score "
                    f"may be; write `def {method}`"
                )

    def prepare(self, data_sources: Iterable[str]) -> None:
        self._call_optional("prepare", list(data_sources))

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        reply = self._call_optional("takes_time", list(data_sources))
        return inspect.iscoroutinefunction(self._custom.score) if reply is None else bool(reply)

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        limit = asyncio.timeout(self._timeout_s)
        try:
            result = self._custom.score(prompt, text)
            if inspect.isawaitable(result):
                # In this very task: a SystemExit in another one would end the event loop.
                async with limit:
                    result = await result
            return result if isinstance(result, Failure) else check_score(parse_result(result))
        except RewardError:  # its way to say that nothing can be scored any more
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise_if_cancelled(error)
            if limit.expired() and isinstance(error, TimeoutError):
                return timeout_failure(self._timeout_s)
            return make_failure(error, inspect.getsourcefile(type(self._custom)))
        finally:
            self._done += 1

    def close(self) -> None:
        try:
            self._call_optional("close")
        except WinnowError as error:  # what was scored stands, and others close, too
            log.warning("%s", error)
        self._custom = None

    def _call_optional(self, method: str, *args: Any) -> Any:
        call = getattr(self._custom, method, None)
        return None if call is None else self._call_guarded(f"{method}()", call, *args)

    def _call_guarded(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except WinnowError:
            raise
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise RewardError(
                f"{self._where}: {what} fails with {text}; fix the class, or reward.manager.kwargs"
            ) from error
