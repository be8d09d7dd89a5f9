"""A user's reward: a Python file with verl's `compute_score`, sync or async.

It is called as `compute_score(data_source=…, solution_str=…, ground_truth=…, extra_info=…,
**kwargs)` and returns a number, or a dict with `score`. The dict's `acc` is the accuracy
(without it: 1 where the score is above 0), every other key is kept with the sample. A sync
function runs in the main thread, because signals (math-verify's alarm) work nowhere else: that
of a worker of the pool, or with `reward.workers=0` the run's.

With `reward/manager=batch` it is called with lists, as `compute_score(data_sources=…,
solution_strs=…, ground_truths=…, extra_infos=…, **kwargs)`, and returns a list of such results.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat, cast

from winnow.config.reward import UserFunction
from winnow.errors import RewardError
from winnow.types import Score

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_ARGUMENTS = tuple(f"{name}s" for name in _ARGUMENTS)
WRONG_REWARD = -1.0
"""Reward of an answer whose scoring failed. A user's scale is unknown; the lower end of the
usual ones keeps a policy from living on answers that break the scorer."""


class UserScorer:
    """The function of a file, called and its result read.

    Args:
        batched: the function takes many answers in a call.
    """

    def __init__(self, config: UserFunction, batched: bool = False) -> None:
        assert config.path is not None
        self.file = str(Path(config.path).expanduser().absolute())
        self._kwargs = config.kwargs
        names = _BATCH_ARGUMENTS if batched else _ARGUMENTS
        self._function = _function(_load(config.path, self.file), config, names)
        called = getattr(self._function, "__call__", None)  # noqa: B004  an object's own
        self.is_async = any(map(inspect.iscoroutinefunction, (self._function, called)))
        """Whether many calls may wait side by side."""

    def call(self, data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Any:
        """What the function returns, perhaps something to await; it may raise anything."""
        return self._function(
            data_source=data_source,
            solution_str=text,
            ground_truth=ground_truth,
            extra_info=dict(extra.get("extra_info") or {}),
            **self._kwargs,
        )

    def call_batch(self, batch: Sequence[tuple[str, str, Any, Mapping[str, Any]]]) -> Any:
        """What the function returns for these; each is what `call` takes."""
        sources, texts, truths, extras = zip(*batch, strict=True)
        return self._function(
            data_sources=list(sources),
            solution_strs=list(texts),
            ground_truths=list(truths),
            extra_infos=[dict(extra.get("extra_info") or {}) for extra in extras],
            **self._kwargs,
        )


def read_result(result: Any) -> Score:
    """The score in what a function returned.

    Raises:
        TypeError, ValueError: there is none.
    """
    rest: dict[str, Any] = {}
    accuracy = None
    if isinstance(result, Mapping):
        rest = {str(key): value for key, value in result.items()}
        if "score" not in rest:
            raise ValueError(
                f"the dict returned has no key score, only {', '.join(rest) or 'none'}"
            )
        result = rest.pop("score")
        if "acc" in rest:
            accuracy = _number(rest.pop("acc"), "acc")
            if not 0 <= accuracy <= 1:
                raise ValueError(f"acc must lie in [0, 1], got {accuracy:g}")
    reward = _number(result, "score")
    if accuracy is None:
        accuracy = float(reward > 0)
    return Score(reward, accuracy, {"task": reward}, rest)


def _number(value: Any, name: str) -> float:
    """A number of any library. NaN passes here: the service refuses it whoever returns it."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(
            f"{name} must be a number, got {type(value).__name__}; "
            "return a float, or a dict with the key score"
        )
    return float(value)


def _load(path: str, file: str) -> ModuleType:
    """The module in `file`, which the user named as `path`."""
    where = f"reward.function.path {path}"
    if not Path(file).is_file():
        raise RewardError(f"{where}: no such file; give the Python file with your reward function")
    name = f"winnow_user_reward_{zlib.crc32(file.encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{where}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reason = " ".join(str(error).split())
        raise RewardError(
            f"{where}, line {_line(error, file)}: importing it fails with "
            f"{type(error).__name__}: {reason}; mend the file (`python {path}` shows the same)"
        ) from error
    return module


def _line(error: BaseException, file: str) -> int | str:
    """The last line of the file that had to do with the error."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or "?"
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or "?" for f in reversed(frames) if f.filename == file), "?")


def _function(module: ModuleType, config: UserFunction, names: Sequence[str]) -> Callable[..., Any]:
    where = f"reward.function.path {config.path}"
    function: Any = getattr(module, config.name, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"{where} has no function {config.name}; it has {', '.join(functions) or 'none'}. "
            "Name the one to call in reward.function.name"
        )
    try:
        inspect.signature(function).bind(**dict.fromkeys(names), **config.kwargs)
    except TypeError as error:
        arguments = ", ".join([*names, *config.kwargs])
        raise RewardError(
            f"{where}: {config.name}{inspect.signature(function)} cannot be called with "
            f"{arguments} ({error}); change its arguments, or reward.function.kwargs"
        ) from error
    return cast(Callable[..., Any], function)
