"""The run, step by step: sample, learn, publish, evaluate, save, log.

    sampler.step ─► learner.learn ─► engine.load_weights ─► evaluate │ checkpoint │ log, when due

This module only sequences objects that `build` chose; another course of training is another
short script over the same objects.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from winnow.evaluation.evaluator import Evaluator
from winnow.learning.learner import AnyLearner
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.observe.names import Number
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import Engine
from winnow.runs.record import record_step, rollout_groups
from winnow.runs.shutdown import ShutdownSignal
from winnow.runs.state import RunState
from winnow.runs.throughput import Throughput
from winnow.sampling.stream import Sampler

log = logging.getLogger(__name__)

Publish = Callable[[int], Awaitable[Mapping[str, Number]]]
"""Gives the engine the weights of a version; figures of that."""


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
    learner: AnyLearner
    publish: Publish
    engine: Engine
    evaluator: Evaluator
    sinks: Sinks
    throughput: Throughput
    state: RunState
    stop: ShutdownSignal
    keep_rollouts: Callable[[int, Sequence[RolloutGroup]], None]
    check_scoring: Callable[[], None]
    """Raises when too many of a step's scorings failed."""
    scoring_figures: Callable[[], Mapping[str, Number]]
    """What scoring has cost since the last call, held-out answers included."""


@dataclass(frozen=True)
class Course:
    """How far a run goes, and what is due when."""

    first_step: int
    steps: int
    evaluate_before: bool
    evaluations: Schedule
    checkpoints: Schedule
    unfinished: Mapping[str, Number] | None = None
    """Figures of the step before the first, when a stop came before its evaluation."""


async def train(parts: Parts, course: Course) -> None:
    """Run the steps of `course`. The weights after step k have version k.

    Raises:
        Stopped: that was asked for; `parts.state` has the last boundary, saved or not.
        WinnowError: the run cannot go on.
    """
    watch = Stopwatch()
    before = course.first_step - 1
    await parts.publish(before)
    figures: Mapping[str, Number] = {}
    if course.evaluate_before:
        with watch.phase("evaluate"):
            figures = await parts.stop.interruptible(parts.evaluator.evaluate(before))
        parts.sinks.log(before, {**figures, **watch.lap(), **parts.scoring_figures()})
    parts.state.note(before, course.unfinished, figures)
    if course.unfinished is not None:
        await _finish(parts, course, before, course.unfinished, (0, 0), watch)
    for step in range(course.first_step, course.steps + 1):
        parts.stop.check()
        record, tokens = await _learn(parts, step, watch)
        await _finish(parts, course, step, record, tokens, watch)


async def _learn(
    parts: Parts, step: int, watch: Stopwatch
) -> tuple[dict[str, Number], tuple[int, int]]:
    """A step up to its new weights; returns its figures, and tokens generated and packed."""
    metrics = Metrics()
    with watch.phase("rollout"):
        sampled = await parts.stop.interruptible(parts.sampler.step(step - 1))
    parts.check_scoring()
    learned = parts.learner.learn(sampled.groups, step, metrics, watch)
    with watch.phase("publish"):
        metrics.update(await parts.publish(step))
    with watch.phase("write"):
        parts.keep_rollouts(step, rollout_groups(sampled, learned))
    record_step(metrics, sampled, learned, parts.sampler.ledger.account.in_progress)
    tokens = sampled.counts.tokens.generated, learned.packed_tokens
    return metrics.record(), tokens


async def _finish(
    parts: Parts,
    course: Course,
    step: int,
    record: Mapping[str, Number],
    tokens: tuple[int, int],
    watch: Stopwatch,
) -> None:
    """Evaluate, log and save a step, each if it is due."""
    figures: Mapping[str, Number] = {}
    if course.evaluations.due(step):
        # Evaluation may take longer than whoever stops this run will wait.
        with watch.phase("checkpoint"):
            parts.state.note(step, record)
        with watch.phase("evaluate"):
            await parts.sampler.halt()
            figures = await parts.stop.interruptible(parts.evaluator.evaluate(step))
    times = watch.lap()
    work = {**parts.throughput.figures(*tokens, times), **parts.scoring_figures()}
    parts.sinks.log(step, {**record, **figures, **times, **work})
    with watch.phase("checkpoint"):
        parts.state.note(step, None, figures)
        if course.checkpoints.due(step):
            parts.state.save()
