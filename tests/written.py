"""Answers that were made up, and a strategy that says what it is told in the place of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from winnow.learning.batch import NO_SHARDING, MicroBatch
from winnow.learning.runner import Outputs
from winnow.learning.strategy import LossFn
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


def written(ids: Sequence[int], logprob: float | Sequence[float] = 0.0) -> Segment:
    """Tokens of the policy's first weights, with a log-prob each or one for all."""
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[:] = logprob
    return Segment(np.array(ids, np.int64), logprobs, (VersionSpan(0, len(ids)),))


def environment(ids: Sequence[int], restarts: bool = False) -> Segment:
    """Tokens that an environment wrote, or a conversation that was rendered anew."""
    tokens, zeros = np.array(ids, np.int64), np.zeros(len(ids), np.float32)
    return Segment(tokens, zeros, (), "environment", restarts=restarts)


def answer(
    *segments: Segment, reward: float = 0.0, truncated: bool = False, **parts: float
) -> Answer:
    trajectory = Trajectory(segments, "length" if truncated else "stop")
    return Answer(trajectory, Score(reward, 0.0, parts))


def group(
    *answers: Answer, prompt: Sequence[int] = (9, 9), baseline: Answer | None = None
) -> Group:
    return Group(0, Prompt("p", np.array(prompt, np.int64), "", "", None), answers, baseline)


def group_of(answers: Iterable[Sequence[int]], logprob: float = 0.0) -> Group:
    """Answers of one segment each."""
    return group(*(answer(written(ids, logprob), reward=1.0) for ids in answers))


class ScriptedStrategy:
    """Its outputs are a function of the micro-batch; notes what it was asked and stepped by."""

    sharder = NO_SHARDING

    def __init__(
        self,
        outputs: Callable[[MicroBatch], Outputs],
        grad_norm: float = 0.5,
        skipped: float = 0.0,
    ) -> None:
        self.outputs = outputs
        self.step = {"grad_norm": grad_norm, "skipped": skipped}
        self.lrs: list[float] = []
        self.asked: Any = None

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        self.asked = outputs
        return [{name: self.outputs(m)[name] for name in outputs} for m in microbatches]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: Any, loss_fn: LossFn
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for micro in microbatches:
            result = loss_fn(micro, self.outputs(micro))
            for name, value in {"loss": result.loss, **result.sums}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
            for name, value in result.maxima.items():
                totals[name] = max(totals.get(name, 0.0), float(value))
        return totals

    def optimizer_step(self, lr: float) -> dict[str, float]:
        self.lrs.append(lr)
        return self.step
