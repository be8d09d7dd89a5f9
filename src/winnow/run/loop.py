"""The run, step by step: sample, learn, publish, evaluate, save, log.

    sampler.step ─► learner.learn ─► engine.load_weights ─► evaluate │ checkpoint │ log, when due

This module only sequences objects that `build` chose. `trainer.mode` names one of three scripts
over them, which differ in what goes on side by side; step k is learnt from weights k - 1:

    sync          sample 1 ─ learn 1 ─ publish ─ sample 2 ─ learn 2 ─ publish ─ …
    one_step_off  sample 1 ─┬ learn 1 ──┬ publish ─┬ learn 2 ──┬ publish ─ …
                            └ sample 2 ─┘          └ sample 3 ─┘
    async         sample 1, 2, 3, … without a pause
                            └ learn 1 ─ publish ─ learn 2 ─ publish ─ …
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from winnow.checkpoints.run_state import RunState
from winnow.errors import ConfigError, NoSignalError, RewardError, WorkerError
from winnow.evaluation.evaluator import Evaluator
from winnow.learning.learner import AnyLearner, Learned
from winnow.observe.metrics import Metrics, Number, Stopwatch, Timeline, no_timeline
from winnow.observe.profile import StepProfiler
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import Engine, engines_by_name
from winnow.rollout.weights import WeightUpdate
from winnow.run.shutdown import ShutdownSignal, Stopped
from winnow.run.step_metrics import (
    StepTokens,
    Throughput,
    record_step,
    rollout_groups,
    step_tokens,
)
from winnow.sampling.accounting import RETURNED, StepGroups
from winnow.sampling.stream import Sampler
from winnow.workers.threads import in_thread

if TYPE_CHECKING:
    from winnow.learning.canary import Canary, CanaryScores

Mode = Literal["sync", "one_step_off", "async"]
Publish = Callable[[int], Awaitable[Mapping[str, Number]]]
"""Give the engine the weights of a version; return figures of that."""


class SharedWeights:
    """Publishes the version alone: engine and trainer share one model."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, version: int) -> Mapping[str, Number]:
        await self._engine.load_weights(WeightUpdate(version))
        return {}

    async def rest(self, sampler: Sampler) -> None:
        """Leave the memory as it is: it is one."""


class PublishedWeights:
    """Publishes weights, and has a canary check that the engine uses them.

    Args:
        weights: makes the update of a version, for an engine of this kind.
        expected: computes the trainer's log-probs of the canary's sequences.
        sleeps: the engine has `sleep` and `wake`, and is to give its memory back between `rest` and
            the next publication.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Callable[[int], WeightUpdate],
        canary: Canary,
        expected: Callable[[Canary], CanaryScores],
        sleeps: bool = False,
    ) -> None:
        self._engine, self._weights = engine, weights
        self._canary, self._expected = canary, expected
        self._sleeps, self._is_asleep = sleeps, False

    async def __call__(self, version: int) -> Mapping[str, Number]:
        """Publish and return `publish/max_delta` in nats.

        Raises:
            PublicationError: an engine holds other weights, or does not answer with them.
        """
        expected = await in_thread(self._expected, self._canary)
        engine = self._engine
        if self._is_asleep:
            await cast(Any, engine).wake()
            self._is_asleep = False
        await engine.load_weights(await in_thread(self._weights, version))
        most = await self._canary.check(expected, version, engines_by_name(engine))
        return {"publish/max_delta": most}

    async def rest(self, sampler: Sampler) -> None:
        """Have an engine that sleeps give its memory to learning; answers become prefixes."""
        if self._sleeps:
            await sampler.halt()
            await cast(Any, self._engine).sleep()
            self._is_asleep = True


async def _keep_memory(sampler: Sampler) -> None:
    """Leave engines as they are while a step is learnt."""


@dataclass(frozen=True)
class Schedule:
    """The steps at which something is due; the last one always."""

    every: int | None
    last: int

    def due(self, step: int) -> bool:
        """Return whether it is due after `step`."""
        return step == self.last or (self.every is not None and step % self.every == 0)


@dataclass
class PendingSteps:
    """Steps that are cut and not learnt yet; part of a run's state."""

    steps: deque[StepGroups] = field(default_factory=deque)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, in order."""
        return {"steps": tuple(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.steps = deque(state["steps"])


@dataclass
class DataPasses:
    """The prompts that a run has used up, and may; part of its state."""

    prompts: float = math.inf
    """In all passes over the data."""
    groups_per_step: int = 1
    used: int = 0
    """Prompts whose groups were learnt from or left out; one that is given back is not used."""

    @property
    def are_over(self) -> bool:
        """True if what is left of the passes fills no step."""
        return self.prompts - self.used < self.groups_per_step

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the end of a run: the prompts that were left, if any."""
        unused = self.prompts - self.used
        note = f"{unused:,.0f} prompts of the passes over the data were left: they fill no step"
        return (note,) if self.are_over and unused else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.used = state["used"]


@dataclass(kw_only=True)
class BaseRun:
    """The objects that runs by rewards and by imitation share, and what is due when."""

    learner: AnyLearner
    publish: Publish
    engine: Engine
    evaluator: Evaluator
    sinks: Sinks
    state: RunState
    stop: ShutdownSignal
    evaluations: Schedule
    checkpoints: Schedule
    steps: int
    first_step: int = 1
    evaluate_before: bool = False
    unfinished: Mapping[str, Number] | None = None
    """Figures of the step before the first, when a stop came before its evaluation."""
    data_figures: Callable[[], Mapping[str, Number]] = dict
    """Return the passes over the data so far."""
    tell: Timeline = no_timeline
    """Is told who did what from when to when."""
    learnt: int = 0
    """The steps that the learner had begun at the last boundary."""
    notes: tuple[str, ...] = ()
    """Lines that the user should read before it starts."""
    profiler: StepProfiler | None = None

    def remaining(self) -> Iterator[int]:
        """Yield the steps to train; the last may become known while it is trained."""
        step = self.first_step
        while step <= self.steps:
            if self.profiler is not None:
                self.profiler.move_to(step)
            yield step
            step += 1

    def note(
        self,
        step: int,
        unfinished: Mapping[str, Number] | None,
        figures: Mapping[str, Number] | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Note a boundary, as `RunState.note` does."""
        self.state.note(step, unfinished, figures, overrides)
        self.learnt = self.learner.begun

    def save_after_failure(self) -> None:
        """Save the last boundary, if nothing was learnt since: else its weights are gone."""
        if self.learner.begun == self.learnt:
            self.state.save()


@dataclass(kw_only=True)
class Run(BaseRun):
    """The objects that a run by rewards is made of."""

    sampler: Sampler
    throughput: Throughput
    keep_rollouts: Callable[[int, Sequence[RolloutGroup]], None]
    keep_ledger: Callable[[int, StepGroups], None]
    """Writes what became of the groups of a step that is learnt."""
    check_scoring: Callable[[], None]
    """Raises when too many of a step's scorings failed."""
    scoring_figures: Callable[[], Mapping[str, Number]]
    """Costs of scoring since the last call, held-out answers included."""
    mode: Mode = "sync"
    """The script that `train` follows."""
    pending: PendingSteps = field(default_factory=PendingSteps)
    rest: Callable[[Sampler], Awaitable[None]] = _keep_memory
    """Has engines give memory to learning, until `publish`."""
    passes: DataPasses = field(default_factory=DataPasses)

    def use_prompts(self, step: int, sampled: StepGroups) -> None:
        """Count the prompts of a step about to be learnt, and make it the last if they ended."""
        self.passes.used += len(sampled.trained)
        self.passes.used += sum(each.fate not in RETURNED for each in sampled.discarded)
        if self.passes.are_over:
            self.end_at(step)

    def end_at(self, step: int) -> None:
        """Make a step the last."""
        self.steps = min(self.steps, step)
        self.evaluations = replace(self.evaluations, last=self.steps)
        self.checkpoints = replace(self.checkpoints, last=self.steps)


async def train(run: Run) -> None:
    """Train the steps of a run. The weights after step k have version k.

    Raises:
        Stopped: that was asked for; `run.state` has the last boundary, saved or not.
        WinnowError: the run cannot go on.
    """
    watch = Stopwatch(tell=run.tell)
    before = run.first_step - 1
    if run.passes.are_over:
        run.end_at(before)
    await run.publish(before)
    figures: Mapping[str, Number] = {}
    if run.evaluate_before:
        with watch.phase("evaluate"):
            figures = await run.stop.interruptible(run.evaluator.evaluate(before))
        run.sinks.log(before, {**figures, **watch.lap(), **run.scoring_figures()})
    run.note(before, run.unfinished, figures)
    if run.unfinished is not None:
        await _finish(run, before, run.unfinished, StepTokens(), watch, ForegroundSampling(run))
    await _SCRIPTS[run.mode](run, watch)


# The scripts


async def _sync(run: Run, watch: Stopwatch) -> None:
    """Sample a step, learn it, publish its weights; then the next."""
    for step in run.remaining():
        run.stop.check()
        with watch.phase("rollout"):
            sampled = await run.stop.interruptible(run.sampler.step(step - 1))
        run.check_scoring()
        run.use_prompts(step, sampled)
        await run.rest(run.sampler)
        metrics = Metrics()
        learned = await in_thread(run.learner.learn, sampled.groups, step, metrics, watch)
        await _conclude(run, step, sampled, learned, metrics, watch, ForegroundSampling(run))


async def _one_step_off(run: Run, watch: Stopwatch) -> None:
    """Sample step k + 1 with weights k - 1 while step k is learnt; both end at a barrier.

    A boundary leaves behind step k + 1, cut and not learnt, and the sampler as it was after that
    cut. A request to stop waits for the barrier: weights k - 1 are gone afterwards.
    """
    pending = run.pending.steps
    run.sampler.published(run.first_step - 1)
    if not pending and run.first_step <= run.steps:
        run.stop.check()
        with watch.phase("rollout"):
            version = run.first_step - 1
            pending.append(await run.stop.interruptible(run.sampler.step(version)))
        run.check_scoring()
    for step in run.remaining():
        run.stop.check()
        sampled, metrics = pending.popleft(), Metrics()
        run.use_prompts(step, sampled)
        sampling = BackgroundSampling(run, step + 1, min(step + 1, run.steps))
        try:
            learned = await _learn_in_thread(run, step, sampled, metrics, watch)
            with watch.phase("wait"):
                await sampling.wait_until_done()
            await _conclude(run, step, sampled, learned, metrics, watch, sampling)
            sampling.raise_failure()
        finally:
            await sampling.close()


async def _async(run: Run, watch: Stopwatch) -> None:
    """Learn step after step, as they are cut by sampling that runs on without a pause.

    Raises:
        ConfigError: the engine cannot take weights while answers run.
    """
    if not run.engine.status().live_updates:
        raise ConfigError(
            "trainer/mode=async swaps weights while answers are written, and this engine cannot "
            "take that; choose trainer/mode=one_step_off, or another rollout/engine"
        )
    pending = run.pending.steps
    run.sampler.published(run.first_step - 1)
    run.stop.check()
    sampling = BackgroundSampling(run, run.first_step + len(pending), run.steps)
    try:
        for step in run.remaining():
            with watch.phase("wait"):
                await run.stop.interruptible(sampling.wait_for_step())
            sampled, metrics = pending.popleft(), Metrics()
            run.use_prompts(step, sampled)
            learned = await _learn_in_thread(run, step, sampled, metrics, watch)
            await _conclude(run, step, sampled, learned, metrics, watch, sampling)
    except Stopped:
        with contextlib.suppress(WorkerError):  # then the last boundary counts
            await sampling.pause()
            if sampling.failure is None:
                run.state.note_sampling()
        raise
    finally:
        await sampling.close()


async def _learn_in_thread(
    run: Run, step: int, sampled: StepGroups, metrics: Metrics, watch: Stopwatch
) -> Learned:
    """Learn a step while the caller's loop samples; phases are booked as in the other scripts."""
    phases = Stopwatch(actor="learner", tell=run.tell)
    with watch.phase("learn"):
        learned = await in_thread(run.learner.learn, sampled.groups, step, metrics, phases)
    watch.rebook("learn", phases.seconds())
    return learned


_SCRIPTS: dict[Mode, Callable[[Run, Stopwatch], Awaitable[None]]] = {
    "sync": _sync,
    "one_step_off": _one_step_off,
    "async": _async,
}


# The end of a step


async def _conclude(
    run: Run,
    step: int,
    sampled: StepGroups,
    learned: Learned,
    metrics: Metrics,
    watch: Stopwatch,
    sampling: ForegroundSampling,
) -> None:
    """Publish the weights of a step that is learnt, and record it."""
    with watch.phase("publish"):
        metrics.update(await run.publish(step))
    run.sampler.published(step)
    with watch.phase("write"):
        run.keep_rollouts(step, rollout_groups(sampled, learned))
        run.keep_ledger(step, sampled)
    record_step(metrics, sampled, learned)
    tokens = step_tokens(sampled, learned)
    await _finish(run, step, metrics.record(), tokens, watch, sampling)


async def _finish(
    run: Run,
    step: int,
    record: Mapping[str, Number],
    tokens: StepTokens,
    watch: Stopwatch,
    sampling: ForegroundSampling,
) -> None:
    """Evaluate, log and save a step, each if it is due."""
    figures: Mapping[str, Number] = {}
    if run.evaluations.due(step):
        with watch.phase("evaluate"):
            await sampling.pause()
        # Evaluation may take longer than whoever stops this run will wait.
        with watch.phase("checkpoint"):
            run.note(step, record, overrides=sampling.overrides)
        with watch.phase("evaluate"):
            figures = await run.stop.interruptible(run.evaluator.evaluate(step))
            sampling.resume()
    times = watch.lap()
    work = {**run.throughput.figures(tokens, times), **run.scoring_figures(), **run.data_figures()}
    run.sinks.log(step, {**record, **figures, **times, **sampling.figures(times), **work})
    with watch.phase("checkpoint"):
        await sampling.enter_progress()
        run.note(step, None, figures, sampling.overrides)
        if run.checkpoints.due(step):
            await sampling.save()


# Sampling as the end of a step finds it


class ForegroundSampling:
    """Sampling that has ended before its step is learnt: none is under way at the step's end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.overrides: Mapping[str, Any] = {}
        """States by part that a boundary's note must have in the place of the present ones."""

    async def enter_progress(self) -> None:
        """Have the ledger know what is written by now, for a note."""

    async def pause(self) -> None:
        """Turn everything that runs into prefixes, so that the engine is free for other work."""
        await self._run.sampler.halt()

    def resume(self) -> None:
        """Go on after a pause."""

    def figures(self, times: Mapping[str, Number]) -> dict[str, Number]:
        """Return `overlap/…` of the time since the last call, given its `time/…`."""
        return {}

    async def save(self) -> None:
        """Save the last boundary."""
        self._run.state.save()


class BackgroundSampling(ForegroundSampling):
    """A task that samples steps `first` to `last` while others are learnt.

    It leaves them in `run.pending`. An error of scoring, or no signal, ends it and waits to be
    raised by `raise_failure`: what is cut can be learnt before, and a note then has the sampler as
    it was when that step's sampling began.
    """

    def __init__(self, run: Run, first: int, last: int) -> None:
        super().__init__(run)
        self._next, self._last = first, last
        self.failure: NoSignalError | RewardError | None = None
        self._news = asyncio.Event()
        self._began: float | None = None  # of the step that is sampled
        self._sampling_s = 0.0
        self._told_s = -run.sampler.idle_s
        self.resume()

    def resume(self) -> None:
        self._task = asyncio.create_task(self._sample())
        self._task.add_done_callback(lambda _: self._news.set())

    async def _sample(self) -> None:
        run = self._run
        while self.failure is None and self._next <= self._last:
            before = run.state.snapshot("sampler", "loader")
            began = self._began = time.perf_counter()
            try:
                version = run.sampler.ledger.version
                sampled = await run.sampler.step(version, learns=self._next - 1)
                run.check_scoring()
            except (NoSignalError, RewardError) as error:
                self.failure, self.overrides = error, before
            else:
                # Nothing was awaited since the cut: the step is in the ledger, or here.
                run.pending.steps.append(sampled)
                self._next += 1
                self._news.set()
            finally:
                now, self._began = time.perf_counter(), None
                self._sampling_s += now - began
                run.tell("sampler", "rollout", began, now)

    def raise_failure(self) -> None:
        """Raise what ended the sampling, if that was no signal or failed scoring."""
        if self.failure is not None:
            raise self.failure

    async def wait_for_step(self) -> None:
        """Wait until a step is pending.

        Raises:
            WinnowError: there is none, and sampling has ended.
        """
        while not self._run.pending.steps:
            self.raise_failure()
            if self._task.done():
                self._task.result()
            self._news.clear()
            await self._news.wait()

    async def wait_until_done(self) -> None:
        """Wait until all steps are sampled, or `failure` says why not."""
        await asyncio.wait([self._task])
        self._task.result()

    async def enter_progress(self) -> None:
        if not self._task.done():
            await self._run.sampler.enter_progress()

    async def pause(self) -> None:
        if self._task.done() and not self._task.cancelled():
            self._task.result()  # an error is not lost with its task
        await self.close()
        await super().pause()

    async def close(self) -> None:
        """End the sampling; what it has is in the ledger."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def figures(self, times: Mapping[str, Number]) -> dict[str, Number]:
        busy_s = self._sampling_s - self._run.sampler.idle_s
        if self._began is not None:
            busy_s += time.perf_counter() - self._began
        busy_s, self._told_s = busy_s - self._told_s, busy_s
        elsewhere = sum(times.get(f"time/{phase}_s", 0.0) for phase in ("evaluate", "rollout"))
        waited_s = max(times["time/step_s"] - elsewhere - busy_s, 0.0)
        return {"overlap/sampling_s": busy_s, "overlap/engines_wait_s": waited_s}

    async def save(self) -> None:
        await in_thread(self._run.state.save)
