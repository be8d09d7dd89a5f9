"""The run, step by step: sample, learn, publish, evaluate, save, log.

    sampler.step ─► learner.learn ─► engine.load_weights ─► evaluate │ checkpoint │ log, when due

This module only sequences objects that `build` chose; another course of training is another
short script over the same objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from winnow.observe.metrics import Metrics, Stopwatch
from winnow.observe.names import Number
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import Engine, WeightUpdate
from winnow.sampling.report import StepGroups
from winnow.sampling.stream import Sampler
from winnow.trainer.evaluate import Evaluator
from winnow.trainer.learner import Learned, Learner
from winnow.trainer.record import record_step
from winnow.trainer.throughput import Throughput

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """Which steps something is due at; the last one always."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Whether it is due after `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)


@dataclass(frozen=True)
class Parts:
    """The objects a run is made of."""

    sampler: Sampler
    learner: Learner
    engine: Engine
    evaluator: Evaluator
    sinks: Sinks
    throughput: Throughput
    save: Callable[[int, Mapping[str, Any]], None]
    """Writes a checkpoint of a step with the loop's own state."""
    keep_rollouts: Callable[[int, StepGroups, Learned], None]
    check_scoring: Callable[[], None]
    """Raises when too many of a step's scorings failed."""


@dataclass(frozen=True)
class Course:
    """How far a run goes, and what is due when."""

    first_step: int
    steps: int
    evaluate_before: bool
    evaluations: Schedule
    checkpoints: Schedule


async def train(parts: Parts, course: Course) -> None:
    """Run the steps of `course`. The weights after step k have version k."""
    watch = Stopwatch()
    if course.evaluate_before:
        with watch.phase("evaluate"):
            record = await parts.evaluator.evaluate(0)
        parts.sinks.log(0, {**record, **watch.lap()})
    for step in range(course.first_step, course.steps + 1):
        metrics = Metrics()
        with watch.phase("rollout"):
            sampled = await parts.sampler.step(step - 1)
        parts.check_scoring()
        learned = parts.learner.learn(sampled.groups, step, metrics, watch)
        with watch.phase("publish"):
            await parts.engine.load_weights(WeightUpdate(version=step))
        with watch.phase("write"):
            parts.keep_rollouts(step, sampled, learned)
        record_step(metrics, sampled, learned, parts.sampler.ledger.account.in_progress)
        evaluation: Mapping[str, Number] = {}
        if course.evaluations.due(step):
            with watch.phase("evaluate"):
                evaluation = await parts.evaluator.evaluate(step)
        if course.checkpoints.due(step):
            with watch.phase("checkpoint"):
                parts.save(step, {"sampler": parts.sampler.state_dict()})
        times = watch.lap()
        generated, packed = sampled.counts.tokens.generated, len(learned.batch.token_ids)
        work = parts.throughput.figures(generated, packed, times)
        parts.sinks.log(step, {**metrics.record(), **evaluation, **times, **work})
