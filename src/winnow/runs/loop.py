"""The run, step by step: sample, learn, publish, evaluate, save, log.

    sampler.step ─► learner.learn ─► engine.load_weights ─► evaluate │ checkpoint │ log, when due

This module only sequences objects that `build` chose; another course of training is another
short script over the same objects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from winnow.evaluation.evaluator import Evaluator
from winnow.learning.learner import AnyLearner
from winnow.observe.metrics import Metrics, Number, Stopwatch
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import Engine, PublishedEngine, WeightUpdate
from winnow.runs.metrics import Throughput, record_step, rollout_groups
from winnow.runs.process import ShutdownSignal
from winnow.runs.state import RunState
from winnow.sampling.accounting import StepGroups
from winnow.sampling.stream import Sampler

if TYPE_CHECKING:
    from winnow.learning.canary import Canary
    from winnow.types import FloatArray

Publish = Callable[[int], Awaitable[Mapping[str, Number]]]
"""Give the engine the weights of a version; return figures of that."""


class Sharing:
    """Publishes the version alone: engine and trainer share one model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, version: int) -> Mapping[str, Number]:
        await self._engine.load_weights(WeightUpdate(version))
        return {}


class Sending:
    """Publishes weights, and has a canary check that the engine uses them.

    Args:
        weights: makes the update of a version, for an engine of this kind.
        expected: computes the trainer's log-probs of the canary's sequences.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Callable[[int], WeightUpdate],
        canary: Canary,
        expected: Callable[[Canary], Sequence[FloatArray]],
    ) -> None:
        self._engine, self._weights = engine, weights
        self._canary, self._expected = canary, expected

    async def __call__(self, version: int) -> Mapping[str, Number]:
        """Publish and return `publish/max_delta` in nats.

        Raises:
            PublicationError: an engine holds other weights, or does not answer with them.
        """
        expected = self._expected(self._canary)
        engine = self._engine
        await engine.load_weights(self._weights(version))
        members = getattr(engine, "engines", {"the engine": engine})  # of several: each
        asked = cast("Mapping[str, PublishedEngine]", members)
        return {"publish/max_delta": await self._canary.check(expected, version, asked)}


@dataclass(frozen=True)
class Schedule:
    """The steps at which something is due; the last one always."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Return whether it is due after `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)


@dataclass
class Run:
    """The objects that a run is made of, how far it goes, and what is due when."""

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
    keep_ledger: Callable[[int, StepGroups], None]
    """Writes what became of the groups of a step that is learnt."""
    check_scoring: Callable[[], None]
    """Raises when too many of a step's scorings failed."""
    scoring_figures: Callable[[], Mapping[str, Number]]
    """Costs of scoring since the last call, held-out answers included."""
    evaluations: Schedule
    checkpoints: Schedule
    steps: int
    first_step: int = 1
    evaluate_before: bool = False
    unfinished: Mapping[str, Number] | None = None
    """Figures of the step before the first, when a stop came before its evaluation."""
    notes: tuple[str, ...] = ()
    """Lines that the user should read before it starts."""


async def train(run: Run) -> None:
    """Train the steps of a run. The weights after step k have version k.

    Raises:
        Stopped: that was asked for; `run.state` has the last boundary, saved or not.
        WinnowError: the run cannot go on.
    """
    watch = Stopwatch()
    before = run.first_step - 1
    await run.publish(before)
    figures: Mapping[str, Number] = {}
    if run.evaluate_before:
        with watch.phase("evaluate"):
            figures = await run.stop.interruptible(run.evaluator.evaluate(before))
        run.sinks.log(before, {**figures, **watch.lap(), **run.scoring_figures()})
    run.state.note(before, run.unfinished, figures)
    if run.unfinished is not None:
        await _finish(run, before, run.unfinished, (0, 0), watch)
    for step in range(run.first_step, run.steps + 1):
        run.stop.check()
        record, tokens = await _learn(run, step, watch)
        await _finish(run, step, record, tokens, watch)


async def _learn(
    run: Run, step: int, watch: Stopwatch
) -> tuple[dict[str, Number], tuple[int, int]]:
    """Take a step up to its new weights; return its figures, and tokens generated and packed."""
    metrics = Metrics()
    with watch.phase("rollout"):
        sampled = await run.stop.interruptible(run.sampler.step(step - 1))
    run.check_scoring()
    learned = run.learner.learn(sampled.groups, step, metrics, watch)
    with watch.phase("publish"):
        metrics.update(await run.publish(step))
    with watch.phase("write"):
        run.keep_rollouts(step, rollout_groups(sampled, learned))
        run.keep_ledger(step, sampled)
    record_step(metrics, sampled, learned, run.sampler.ledger.account.in_progress)
    tokens = sampled.counts.tokens.generated, learned.packed_tokens
    return metrics.record(), tokens


async def _finish(
    run: Run,
    step: int,
    record: Mapping[str, Number],
    tokens: tuple[int, int],
    watch: Stopwatch,
) -> None:
    """Evaluate, log and save a step, each if it is due."""
    figures: Mapping[str, Number] = {}
    if run.evaluations.due(step):
        # Evaluation may take longer than whoever stops this run will wait.
        with watch.phase("checkpoint"):
            run.state.note(step, record)
        with watch.phase("evaluate"):
            await run.sampler.halt()
            figures = await run.stop.interruptible(run.evaluator.evaluate(step))
    times = watch.lap()
    work = {**run.throughput.figures(*tokens, times), **run.scoring_figures()}
    run.sinks.log(step, {**record, **figures, **times, **work})
    with watch.phase("checkpoint"):
        run.state.note(step, None, figures)
        if run.checkpoints.due(step):
            run.state.save()
