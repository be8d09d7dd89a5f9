"""A manager of the user's own: a class by import path, with what is left out filled in.

    class MyManager:
        def __init__(self, config, **kwargs): ...  # section `reward`; reward.manager.kwargs
        async def score(self, prompt, text): ...   # returns a number, a dict with `score`, a Score
        def prepare(self, data_sources): ...       # these three may be missing
        def takes_time(self, data_sources): ...
        def close(self): ...

It runs in the run's own process. `score` may be a plain function; an asynchronous one has
`reward.timeout_s` seconds for each answer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from winnow.config.reward import CustomManager, RewardConfig
from winnow.errors import RewardError, WinnowError
from winnow.rewards.managers import Manager
from winnow.rewards.parts import TASK
from winnow.rewards.task import Failure, checked, failure_of, raise_if_cancelled, read_result
from winnow.types import Prompt, Score
from winnow.user_code import load_user_object

log = logging.getLogger(__name__)

_FIELD = "reward.manager.path"
_PLAIN = ("prepare", "takes_time", "close")
"""Methods that are called where nothing can wait for them."""


class CustomCalls(Manager):
    """Stands between the run and the user's object, so that its fault costs one answer.

    Raises:
        RewardError: the class cannot be imported, made, or used.
    """

    def __init__(self, config: RewardConfig) -> None:
        assert isinstance(config.manager, CustomManager)
        self._where = f"{_FIELD} {config.manager.path}"
        self._timeout_s = config.timeout_s
        made = load_user_object(config.manager.path, _FIELD, RewardError)
        try:
            self._own: Any = made(config, **config.manager.kwargs)
        except WinnowError:
            raise
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{self._where}: making it fails with {_said(error)}; mend the class, or "
                "reward.manager.kwargs"
            ) from error
        if not callable(getattr(self._own, "score", None)):
            raise RewardError(
                f"{self._where} has no method score; give it `async def score(self, prompt, text)`"
            )
        for method in _PLAIN:
            if inspect.iscoroutinefunction(getattr(self._own, method, None)):
                raise RewardError(
                    f"{self._where}: its {method} is asynchronous, and only score may be; "
                    f"write `def {method}`"
                )

    def prepare(self, data_sources: Iterable[str]) -> None:
        self._ask("prepare", list(data_sources))

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        said = self._ask("takes_time", list(data_sources))
        return inspect.iscoroutinefunction(self._own.score) if said is None else bool(said)

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        limit = asyncio.timeout(self._timeout_s)
        try:
            said = self._own.score(prompt, text)
            if inspect.isawaitable(said):
                # In this very task: a SystemExit in another one would end the event loop.
                async with limit:
                    said = await said
            if isinstance(said, Failure):
                return said
            score = said if isinstance(said, Score) else read_result(said)
            # The reward that learning sees is made of parts.
            return checked(score if score.parts else replace(score, parts={TASK: score.reward}))
        except RewardError:  # its way to say that nothing can be scored any more
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            raise_if_cancelled(error)
            if limit.expired() and isinstance(error, TimeoutError):
                line = f"no score within reward.timeout_s={self._timeout_s:g}"
                return Failure(line, line)
            return failure_of(error, inspect.getsourcefile(type(self._own)))
        finally:
            self._done += 1

    def close(self) -> None:
        own, self._own = self._own, None
        try:
            if hasattr(own, "close"):
                own.close()
        except (Exception, SystemExit) as error:  # what was scored stands, and others close, too
            log.warning("%s: its close fails with %s", self._where, _said(error))

    def _ask(self, method: str, data_sources: list[str]) -> Any:
        if not hasattr(self._own, method):
            return None
        try:
            return getattr(self._own, method)(data_sources)
        except WinnowError:
            raise
        except Exception as error:
            raise RewardError(
                f"{self._where}: its {method} fails with {_said(error)}; mend the class"
            ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
