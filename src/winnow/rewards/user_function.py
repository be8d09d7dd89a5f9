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

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.reward import UserFunction
from winnow.errors import RewardError

_FIELD = "reward.function.path"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_ARGUMENTS = tuple(f"{name}s" for name in _ARGUMENTS)


class UserScorer:
    """The function of a user's file.

    Args:
        batched: the function takes many answers in a call.

    Raises:
        RewardError: the file cannot be imported, or has no such function.
    """

    def __init__(self, config: UserFunction, batched: bool = False) -> None:
        from winnow.user_code import load_user_object

        assert config.path is not None
        self.file = str(Path(config.path).expanduser().absolute())
        self._kwargs = config.kwargs
        self._function = function = load_user_object(config.path, _FIELD, RewardError, config.name)
        names = _BATCH_ARGUMENTS if batched else _ARGUMENTS
        try:
            inspect.signature(function).bind(**dict.fromkeys(names), **config.kwargs)
        except TypeError as error:
            raise RewardError(
                f"{_FIELD} {config.path}: {config.name}{inspect.signature(function)} cannot be "
                f"called with {', '.join([*names, *config.kwargs])} ({error}); change its "
                "arguments, or reward.function.kwargs"
            ) from error
        called = getattr(self._function, "__call__", None)  # noqa: B004  an object's own
        self.is_async = any(map(inspect.iscoroutinefunction, (self._function, called)))
        """True if many calls may wait side by side."""

    def call(self, data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Any:
        """Call the function; its result may be something to await, and it may raise anything."""
        return self._function(
            data_source=data_source,
            solution_str=text,
            ground_truth=ground_truth,
            extra_info=dict(extra.get("extra_info") or {}),
            **self._kwargs,
        )

    def call_batch(self, batch: Sequence[tuple[str, str, Any, Mapping[str, Any]]]) -> Any:
        """Call the function with the arguments of many answers, each as `call` takes them."""
        sources, texts, truths, extras = zip(*batch, strict=True)
        return self._function(
            data_sources=list(sources),
            solution_strs=list(texts),
            ground_truths=list(truths),
            extra_infos=[dict(extra.get("extra_info") or {}) for extra in extras],
            **self._kwargs,
        )
