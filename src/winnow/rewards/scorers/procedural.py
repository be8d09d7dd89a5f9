"""Tasks of reasoning-gym: the package that set a problem also judges the answer.

The row says which task it is (`data_source`: `reasoning_gym/NAME`) and brings the problem's entry
and the task's settings in `extra_info`, as `winnow.data.tasks.procedural` writes them. The answer
is what stands in the last `<answer>…</answer>`. Tasks judge by rules of their own, many of them
with shares of the whole for an answer that is nearly right.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from winnow.rewards.scorers.procedural_screen import may_pass
from winnow.rewards.scorers.reading import last_tagged
from winnow.types import Score

log = logging.getLogger(__name__)

PACKAGE = "reasoning_gym"


def score(data_source: str, text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """The task's own score, 0 to 1; accuracy is 1 for the full one only.

    An answer gets 0 that the task raises at, or that it may not be given because it would run
    it (`procedural_screen`); `unreadable` is 1 then.

    Raises:
        KeyError: the row has no entry.
        ValueError: there is no such task.
    """
    info = extra.get("extra_info") or {}
    task = data_source.partition("/")[2] or str(info.get("task"))
    entry = json.loads(info["entry"], object_hook=_restored)
    judge = _judge(task, info.get("config") or "{}")
    pred = last_tagged(text)
    share, unreadable = 0.0, 1.0
    if pred is None or may_pass(task, pred):
        try:
            share, unreadable = float(judge.score_answer(pred, entry)), 0.0
        except Exception as error:  # the task's code on whatever a policy wrote
            log.debug("%s raised at an answer: %r", task, error)
    share = min(1.0, max(0.0, share))
    noted = {"pred": pred or "", "unreadable": unreadable}
    return Score(share, float(share == 1.0), {"task": share}, noted)


@lru_cache(maxsize=8)
def _judge(task: str, config: str) -> Any:
    """A data set of the task; its size and seed have no part in judging."""
    from reasoning_gym import create_dataset

    return create_dataset(task, seed=0, **json.loads(config, object_hook=_restored))


def _restored(value: dict[str, Any]) -> Any:
    """Tuples, and keys that are no texts, which JSON lacks."""
    if value.keys() == {"__tuple__"}:
        return tuple(value["__tuple__"])
    if value.keys() == {"__items__"}:
        return dict(value["__items__"])
    return value
