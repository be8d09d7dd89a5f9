"""A reward model as a scorer: answers that wait at the same time are run together.

Which answers wait together depends on what else happens in the event loop, and the last bits of
a score on what it was packed with. So a deterministic run has each run alone: an answer then has
the same score in whatever company, in a resumed run too.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from winnow.config.judge import SequenceClassifier
from winnow.rewards.conversation import Conversation
from winnow.rewards.task import Failure
from winnow.types import IntArray, Prompt

Forward = Callable[[Sequence[IntArray]], Sequence[float]]
"""One number for the token ids of each sequence."""
Verdict = asyncio.Future["float | Failure"]


@dataclass(frozen=True, eq=False)
class _Waiting:
    ids: IntArray
    verdict: Verdict


class ModelScorer:
    """Scores answers by a model in this process, in the event loop's thread.

    Args:
        config: what the model's number is called, and what it counts for.
        forward: runs the model.
        one_by_one: a call for each answer.
    """

    def __init__(
        self,
        config: SequenceClassifier,
        conversation: Conversation,
        forward: Forward,
        one_by_one: bool = False,
    ) -> None:
        self.config = config
        self._conversation, self._forward = conversation, forward
        self._one_by_one = one_by_one
        self._waiting: list[_Waiting] = []
        self.scored = 0
        """Answers so far."""

    def check(self, prompt: Prompt) -> None:
        """See before training that a prompt can be encoded.

        Raises:
            ModelError: it cannot.
        """
        self._conversation.check(prompt)

    def begin(self, prompt: Prompt, text: str) -> Verdict:
        """What will hold the model's number, or why there is none."""
        loop = asyncio.get_running_loop()
        verdict: Verdict = loop.create_future()
        try:
            ids = self._conversation.encode(prompt, text)
        except ValueError as error:
            verdict.set_result(_failure(str(error), error))
            return verdict
        if not self._waiting:
            # Behind whoever is ready to run now, and may ask as well.
            loop.call_soon(self._run)
        self._waiting.append(_Waiting(ids, verdict))
        return verdict

    def _run(self) -> None:
        waiting = [each for each in self._waiting if not each.verdict.done()]  # not cancelled
        self._waiting = []
        calls = [[each] for each in waiting] if self._one_by_one else [waiting] if waiting else []
        try:
            for call in calls:
                values = self._forward([each.ids for each in call])
                for each, value in zip(call, values, strict=True):
                    each.verdict.set_result(_checked(value))
                self.scored += len(call)
        except Exception as error:  # belongs to those who wait, who would wait for ever
            for each in waiting:
                if not each.verdict.done():
                    each.verdict.set_exception(error)


def _checked(value: float) -> float | Failure:
    if math.isfinite(value):
        return value
    return _failure(f"its score is {value}")


def _failure(reason: str, error: BaseException | None = None) -> Failure:
    trace = "".join(traceback.format_exception(error)) if error else ""
    return Failure(f"the reward model: {reason}", trace)
