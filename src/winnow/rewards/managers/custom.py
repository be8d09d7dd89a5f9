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
import importlib
import importlib.util
import inspect
import logging
import sys
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from winnow.config.reward import CustomManager, RewardConfig
from winnow.errors import RewardError, WinnowError
from winnow.rewards.blending import TASK
from winnow.rewards.task import Failure, checked, failure_of, raise_if_cancelled
from winnow.rewards.user_function import read_result
from winnow.rewards.worker_async import late_line
from winnow.types import Prompt, Score

log = logging.getLogger(__name__)

_FIELD = "reward.manager.path"
_PLAIN = ("prepare", "takes_time", "close")
"""Methods that are called where nothing can wait for them."""


class Custom:
    """Stands between the run and the user's object: what that one does costs its own answer."""

    def __init__(self, config: RewardConfig) -> None:
        """Import the class and make its object.

        Raises:
            RewardError: one of these fails.
        """
        assert isinstance(config.manager, CustomManager)
        self._path, self._timeout_s = config.manager.path, config.timeout_s
        made = _load(config.manager.path)
        try:
            self._own: Any = made(config, **config.manager.kwargs)
        except WinnowError:
            raise
        except (Exception, SystemExit) as error:
            raise RewardError(
                f"{_FIELD} {self._path}: making it fails with {_said(error)}; mend the class, or "
                "reward.manager.kwargs"
            ) from error
        if not callable(getattr(self._own, "score", None)):
            raise RewardError(
                f"{_FIELD} {self._path} has no method score; give it "
                "`async def score(self, prompt, text)`"
            )
        for method in _PLAIN:
            if inspect.iscoroutinefunction(getattr(self._own, method, None)):
                raise RewardError(
                    f"{_FIELD} {self._path}: its {method} is asynchronous, and only score may be; "
                    f"write `def {method}`"
                )
        self.scored = 0

    def prepare(self, data_sources: Iterable[str]) -> None:
        """What the user's object does before training.

        Raises:
            RewardError: it fails.
        """
        self._ask("prepare", list(data_sources))

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """As the object says; else whether its `score` is asynchronous."""
        said = self._ask("takes_time", list(data_sources))
        return inspect.iscoroutinefunction(self._own.score) if said is None else bool(said)

    async def score(self, prompt: Prompt, text: str) -> Score | Failure:
        """What the object says."""
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
                return Failure(late_line(self._timeout_s), late_line(self._timeout_s))
            return failure_of(error, inspect.getsourcefile(type(self._own)))
        finally:
            self.scored += 1

    def close(self) -> None:
        """Have the object end what it started."""
        own, self._own = self._own, None
        try:
            if hasattr(own, "close"):
                own.close()
        except (Exception, SystemExit) as error:  # what was scored stands, and others close, too
            log.warning("%s %s: its close fails with %s", _FIELD, self._path, _said(error))

    def _ask(self, method: str, data_sources: list[str]) -> Any:
        if not hasattr(self._own, method):
            return None
        try:
            return getattr(self._own, method)(data_sources)
        except WinnowError:
            raise
        except Exception as error:
            raise RewardError(
                f"{_FIELD} {self._path}: its {method} fails with {_said(error)}; mend the class"
            ) from error


def _load(path: str) -> Any:
    """The class that `package.module:Class` or `FILE.py:Class` names."""
    place, _, name = path.rpartition(":")
    try:
        module = _file(place) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"{_FIELD} {path}: importing {place} fails with {_said(error)}; mend it, or give "
            "package.module:Class or FILE.py:Class"
        ) from error
    if not callable(getattr(module, name, None)):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise RewardError(
            f"{_FIELD} {path}: {place} has no class {name}; it has {', '.join(classes) or 'none'}"
        )
    return getattr(module, name)


def _file(place: str) -> Any:
    file = Path(place).expanduser().absolute()
    name = f"winnow_user_manager_{zlib.crc32(str(file).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
