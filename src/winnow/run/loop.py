"""The training loop: sample, learn, publish, evaluate, save, log.

    sampler.step ─► learner.learn ─► engine.load_weights ─► evaluate │ checkpoint │ log, when due

This module only sequences objects that `build_run` chose. `trainer.mode` names one of three scripts
over them, which differ in what runs concurrently; step k is sampled with weights k - 1:

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
from dataclasses import dataclass, field
from functools import cached_property
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
from winnow.rollout.engine import Engine, MemoryPart, SleepingEngine, engines_by_name
from winnow.rollout.weights import WeightUpdate
from winnow.run.shutdown import ShutdownSignal, Stopped
from winnow.run.step_metrics import (
    StepTokens,
    Throughput,
    count_step_tokens,
    record_step,
    rollout_groups,
)
from winnow.sampling.accounting import RETURNED, StepGroups
from winnow.sampling.stream import Sampler
from winnow.workers.threads import in_thread

if TYPE_CHECKING:
    from winnow.learning.canary import Canary, CanaryScores

Mode = Literal["sync", "one_step_off", "async"]
OnStep = Callable[[int, Mapping[str, Number]], None]
Publish = Callable[[int], Awaitable[Mapping[str, Number]]]
"""Publishes the weights of a version to the engine; returns metrics of that."""


class MemoryTurns:
    """Gives the memory of shared GPUs to the trainer and to the engine in turn.

    Args:
        engine: a `SleepingEngine` where `release` is set.
        release: frees memory that the trainer needs for its next step only; None: engine and
            trainer hold theirs all the time.
    """

    def __init__(self, engine: Engine, release: Callable[[], None] | None) -> None:
        self._engine, self._release = engine, release
        self._is_asleep = False

    async def sleep_engines(self, sampler: Sampler) -> None:
        """Put engines to sleep, which frees their memory for learning; answers become prefixes."""
        if self._release is not None:
            await sampler.abort_running()
            await cast(SleepingEngine, self._engine).sleep()
            self._is_asleep = True

    async def _wake(self, part: MemoryPart) -> None:
        """Have sleeping engines take memory again, after the trainer has freed its own."""
        if self._is_asleep:
            assert self._release is not None
            await in_thread(self._release)
            await cast(SleepingEngine, self._engine).wake(part)
            if part == "cache":  # the last part
                self._is_asleep = False


class SharedWeightsPublisher(MemoryTurns):
    """Publishes the version number only: engine and trainer share one model."""

    async def __call__(self, version: int) -> Mapping[str, Number]:
        await self._wake("cache")
        await self._engine.load_weights(WeightUpdate(version))
        return {}


class WeightPublisher(MemoryTurns):
    """Publishes weights, and checks by a canary that the engine uses them.

    Args:
        weights: exports the update of a version.
        expected: computes the trainer's log-probs of the canary's sequences.
        release: of `MemoryTurns`; the engine sleeps from `sleep_engines` to the next publication.
        on_checked: called when the canary has passed; returns metrics.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Callable[[int], WeightUpdate],
        canary: Canary,
        expected: Callable[[Canary], CanaryScores],
        release: Callable[[], None] | None = None,
        on_checked: Callable[[], Mapping[str, Number]] = dict,
    ) -> None:
        super().__init__(engine, release)
        self._on_checked = on_checked
        self._weights, self._canary, self._expected = weights, canary, expected

    async def __call__(self, version: int) -> Mapping[str, Number]:
        """Publish and return `publish/max_delta` in nats, and the metrics of `on_checked`.

        Raises:
            PublicationError: an engine holds other weights, or does not answer with them.
        """
        expected = await in_thread(self._expected, self._canary)
        engine = self._engine
        await self._wake("weights")
        await engine.load_weights(await in_thread(self._weights, version))
        await self._wake("cache")
        most = await self._canary.check(expected, version, engines_by_name(engine))
        return {"publish/max_delta": most, **self._on_checked()}


async def _keep_awake(sampler: Sampler) -> None:
    """Keep engines awake while a step is learned."""


@dataclass
class PendingSteps:
    """Sampled steps that are not learned yet; part of a run's state."""

    steps: deque[StepGroups] = field(default_factory=deque)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, in order."""
        return {"steps": tuple(self.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = deque(state["steps"])


@dataclass
class PromptBudget:
    """The number of prompts that a run may use, and has used; part of its state."""

    prompts: float = math.inf
    """Prompts of all passes over the data."""
    groups_per_step: int = 1
    used: int = 0
    """Prompts whose groups were trained or discarded; returned ones are not counted."""

    @property
    def is_exhausted(self) -> bool:
        """True if the remaining prompts fill no step."""
        return self.prompts - self.used < self.groups_per_step

    @property
    def notes(self) -> tuple[str, ...]:
        """Return lines for the end of a run, on unused prompts."""
        unused = self.prompts - self.used
        note = f"{unused:,.0f} prompts of the passes over the data are unused: they fill no step"
        return (note,) if self.is_exhausted and unused else ()

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.used = state["used"]


@dataclass(kw_only=True)
class BaseRun:
    """The objects and intervals that RL and SFT runs share."""

    learner: AnyLearner
    publish: Publish
    engine: Engine
    evaluator: Evaluator
    sinks: Sinks
    state: RunState
    stop: ShutdownSignal
    evaluate_every: int | None
    save_every: int | None
    steps: int
    first_step: int = 1
    evaluate_before: bool = False
    unfinished: Mapping[str, Number] | None = None
    """Figures of the step before the first, if the run was stopped before its evaluation."""
    data_figures: Callable[[], Mapping[str, Number]] = dict
    """Return the passes over the data so far."""
    timeline: Timeline = no_timeline
    """Records an actor, what it did, and from when to when."""
    learned_steps: int = 0
    """Number of steps that the learner had begun at the last boundary."""
    notes: tuple[str, ...] = ()
    """Lines for the user before the first step."""
    profiler: StepProfiler | None = None
    on_step: OnStep = lambda step, record: None
    """Called with the record of a step when all of it is done."""

    @cached_property
    def watch(self) -> Stopwatch:
        """Return the stopwatch of the training loop, which starts at the first access."""
        return Stopwatch(tell=self.timeline)

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether something done `every` steps, and at the last, is due after a step."""
        return step == self.steps or (every is not None and step % every == 0)

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps to train, to the last, which `count_used_prompts` may bring forward."""
        step = self.first_step
        while step <= self.steps:
            if self.profiler is not None:
                self.profiler.move_to(step)
            yield step
            step += 1

    def record_boundary(
        self,
        step: int,
        unfinished: Mapping[str, Number] | None,
        figures: Mapping[str, Number] | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Record a boundary between steps, to which a later save goes back (`RunState.note`)."""
        self.state.record_step(step, unfinished, figures, overrides)
        self.learned_steps = self.learner.begun

    def save_after_failure(self) -> None:
        """Save the last boundary, unless an update has changed its weights since."""
        if self.learner.begun == self.learned_steps:
            self.state.save()


@dataclass(kw_only=True)
class Run(BaseRun):
    """The objects of an RL run."""

    sampler: Sampler
    throughput: Throughput
    save_rollouts: Callable[[int, Sequence[RolloutGroup]], None]
    save_ledger: Callable[[int, StepGroups], None]
    """Writes the outcome of each group of a step."""
    check_scoring: Callable[[], None]
    """Raises if too many scorings of a step failed."""
    scoring_figures: Callable[[], Mapping[str, Number]]
    """Returns metrics of scoring since the last call, evaluations included."""
    mode: Mode = "sync"
    """The script that `train` follows."""
    pending: PendingSteps = field(default_factory=PendingSteps)
    sleep_engines: Callable[[Sampler], Awaitable[None]] = _keep_awake
    """Frees the memory of engines for learning, until `publish`."""
    prompt_budget: PromptBudget = field(default_factory=PromptBudget)

    def count_used_prompts(self, step: int, sampled: StepGroups) -> None:
        """Count the prompts of a step before it is learned; the last that fill one end the run."""
        self.prompt_budget.used += len(sampled.trained)
        self.prompt_budget.used += sum(each.fate not in RETURNED for each in sampled.discarded)
        if self.prompt_budget.is_exhausted:
            self.steps = min(self.steps, step)


async def train(run: Run) -> None:
    """Train the steps of a run. The weights after step k have version k.

    Raises:
        Stopped: on request; `run.state` holds the last boundary, which may not be saved.
        WinnowError: the run cannot continue.
    """
    watch, before = run.watch, run.first_step - 1
    if run.prompt_budget.is_exhausted:
        run.steps = min(run.steps, before)
    await run.publish(before)
    figures: Mapping[str, Number] = {}
    if run.evaluate_before:
        with watch.phase("evaluate"):
            figures = await run.stop.interruptible(run.evaluator.evaluate(before))
        run.sinks.log(before, {**figures, **watch.lap(), **run.scoring_figures()})
    run.record_boundary(before, run.unfinished, figures)
    if run.unfinished is not None:
        await _evaluate_log_save(ForegroundSampling(run), before, run.unfinished, StepTokens())
    await _SCRIPTS[run.mode](run)


# The scripts


async def _sync(run: Run) -> None:
    """Sample a step, learn it and publish its weights, in turn."""
    for step in run.remaining_steps():
        run.stop.check()
        with run.watch.phase("rollout"):
            sampled = await run.stop.interruptible(run.sampler.step(step - 1))
        run.check_scoring()
        run.count_used_prompts(step, sampled)
        await run.sleep_engines(run.sampler)
        metrics = Metrics()
        learned = await in_thread(run.learner.learn, sampled.groups, step, metrics, run.watch)
        await _publish_and_record(ForegroundSampling(run), step, sampled, learned, metrics)


async def _one_step_off(run: Run) -> None:
    """Sample step k + 1 with weights k - 1 while step k is learned; both end at a barrier.

    The state at a boundary has step k + 1, sampled and not learned, and the sampler as of then. A
    request to stop takes effect at the barrier, as weights k - 1 no longer exist after it.
    """
    pending = run.pending.steps
    run.sampler.set_engine_version(run.first_step - 1)
    if not pending and run.first_step <= run.steps:
        run.stop.check()
        with run.watch.phase("rollout"):
            version = run.first_step - 1
            pending.append(await run.stop.interruptible(run.sampler.step(version)))
        run.check_scoring()
    for step in run.remaining_steps():
        run.stop.check()
        sampled, metrics = pending.popleft(), Metrics()
        run.count_used_prompts(step, sampled)
        sampling = BackgroundSampling(run, step + 1, min(step + 1, run.steps))
        async with contextlib.aclosing(sampling):
            learned = await _learn_in_thread(run, step, sampled, metrics)
            with run.watch.phase("wait"):
                await sampling.wait_until_done()
            await _publish_and_record(sampling, step, sampled, learned, metrics)
            sampling.raise_failure()


async def _async(run: Run) -> None:
    """Learn steps in the order in which sampling, which never pauses, completes them.

    Raises:
        ConfigError: the engine cannot load weights while it writes answers.
    """
    if not run.engine.status().live_updates:
        raise ConfigError(
            "trainer/mode=async loads weights while answers are written, and this engine does not "
            "support that; choose trainer/mode=one_step_off, or another rollout/engine"
        )
    pending = run.pending.steps
    run.sampler.set_engine_version(run.first_step - 1)
    run.stop.check()
    sampling = BackgroundSampling(run, run.first_step + len(pending), run.steps)
    async with contextlib.aclosing(sampling):
        try:
            for step in run.remaining_steps():
                with run.watch.phase("wait"):
                    await run.stop.interruptible(sampling.wait_for_step())
                sampled, metrics = pending.popleft(), Metrics()
                run.count_used_prompts(step, sampled)
                learned = await _learn_in_thread(run, step, sampled, metrics)
                await _publish_and_record(sampling, step, sampled, learned, metrics)
        except Stopped:
            with contextlib.suppress(WorkerError):  # then the last boundary counts
                await sampling.free_engine()
                if sampling.failure is None:
                    run.state.record_sampling()
            raise


async def _learn_in_thread(run: Run, step: int, sampled: StepGroups, metrics: Metrics) -> Learned:
    """Learn a step in a thread while sampling goes on; phases are timed as in `_sync`."""
    phases = Stopwatch(actor="learner", tell=run.timeline)
    with run.watch.phase("learn"):
        learned = await in_thread(run.learner.learn, sampled.groups, step, metrics, phases)
    run.watch.rebook("learn", phases.seconds())
    return learned


_SCRIPTS: dict[Mode, Callable[[Run], Awaitable[None]]] = {
    "sync": _sync,
    "one_step_off": _one_step_off,
    "async": _async,
}


# The end of a step


async def _publish_and_record(
    sampling: ForegroundSampling, step: int, sampled: StepGroups, learned: Learned, metrics: Metrics
) -> None:
    """Publish the weights of a learned step, and write its records."""
    run = sampling.run
    with run.watch.phase("publish"):
        metrics.update(await run.publish(step))
    run.sampler.set_engine_version(step)
    with run.watch.phase("write"):
        run.save_rollouts(step, rollout_groups(sampled, learned))
        run.save_ledger(step, sampled)
    record_step(metrics, sampled, learned)
    tokens = count_step_tokens(sampled, learned)
    await _evaluate_log_save(sampling, step, metrics.record(), tokens)


async def _evaluate_log_save(
    sampling: ForegroundSampling, step: int, record: Mapping[str, Number], tokens: StepTokens
) -> None:
    """Evaluate, log and save a step, each if due."""
    run, figures = sampling.run, dict[str, Number]()
    if run.is_due(run.evaluate_every, step):
        with run.watch.phase("evaluate"):
            await sampling.free_engine()
        # Evaluation may take longer than a batch system waits after SIGTERM.
        with run.watch.phase("checkpoint"):
            run.record_boundary(step, record, overrides=sampling.overrides)
        with run.watch.phase("evaluate"):
            figures = await run.stop.interruptible(run.evaluator.evaluate(step))
            sampling.resume()
    times = run.watch.lap()
    work = {**run.throughput.figures(tokens, times), **run.scoring_figures(), **run.data_figures()}
    record = {**record, **figures, **times, **sampling.overlap_figures(times), **work}
    run.sinks.log(step, record)
    with run.watch.phase("checkpoint"):
        await sampling.update_ledger()
        run.record_boundary(step, None, figures, sampling.overrides)
        if run.is_due(run.save_every, step):
            await sampling.save()
    with run.watch.paused():
        run.on_step(step, record)


# What the end of a step does with sampling


class ForegroundSampling:
    """Sampling that ends before its step is learned: none runs at the end of the step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.overrides: Mapping[str, Any] = {}
        """States, by part, that a boundary records instead of the current ones."""

    async def update_ledger(self) -> None:
        """Enter the tokens written so far in the ledger, before a boundary is recorded."""

    async def free_engine(self) -> None:
        """Turn open answers into prefixes, so that the engine is free for evaluation."""
        await self.run.sampler.abort_running()

    def resume(self) -> None:
        """Continue sampling."""

    def overlap_figures(self, times: Mapping[str, Number]) -> dict[str, Number]:
        """Return the metrics `overlap/…` since the last call, from `time/…` of that time."""
        return {}

    async def save(self) -> None:
        """Save the last boundary."""
        self.run.state.save()


class BackgroundSampling(ForegroundSampling):
    """A task that samples steps `first` to `last` into `run.pending` while others are learned.

    An error of scoring, or a step without signal, ends it and is raised by `raise_failure`, after
    completed steps were learned. A boundary then records the sampler as it was before that step.
    """

    def __init__(self, run: Run, first: int, last: int) -> None:
        super().__init__(run)
        self._next, self._last = first, last
        self.failure: NoSignalError | RewardError | None = None
        self._changed = asyncio.Event()
        self._began: float | None = None  # of the step that is sampled
        self._sampling_s = 0.0
        self._reported_s = -run.sampler.idle_s
        self.resume()

    def resume(self) -> None:
        self._task = asyncio.create_task(self._sample())
        self._task.add_done_callback(lambda _: self._changed.set())

    async def _sample(self) -> None:
        run = self.run
        while self.failure is None and self._next <= self._last:
            before = run.state.part_states("sampler", "loader")
            began = self._began = time.perf_counter()
            try:
                version = run.sampler.ledger.version
                sampled = await run.sampler.step(version, learns=self._next - 1)
                run.check_scoring()
            except (NoSignalError, RewardError) as error:
                self.failure, self.overrides = error, before
            else:
                # Without an await since it was taken from the ledger, so that no state misses it.
                run.pending.steps.append(sampled)
                self._next += 1
                self._changed.set()
            finally:
                now, self._began = time.perf_counter(), None
                self._sampling_s += now - began
                run.timeline("sampler", "rollout", began, now)

    def raise_failure(self) -> None:
        """Raise the error of scoring, or the lack of signal, that ended the sampling."""
        if self.failure is not None:
            raise self.failure

    async def wait_for_step(self) -> None:
        """Wait until a step is pending.

        Raises:
            WinnowError: sampling has ended without one.
        """
        while not self.run.pending.steps:
            self.raise_failure()
            if self._task.done():
                self._task.result()
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_done(self) -> None:
        """Wait until all steps are sampled, or `failure` is set."""
        await asyncio.wait([self._task])
        self._task.result()

    async def update_ledger(self) -> None:
        if not self._task.done():
            await self.run.sampler.record_progress()

    async def free_engine(self) -> None:
        if self._task.done() and not self._task.cancelled():
            self._task.result()  # an error is not lost with its task
        await self.aclose()
        await super().free_engine()

    async def aclose(self) -> None:
        """Cancel the sampling; its open groups stay in the ledger."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def overlap_figures(self, times: Mapping[str, Number]) -> dict[str, Number]:
        busy_s = self._sampling_s - self.run.sampler.idle_s
        if self._began is not None:
            busy_s += time.perf_counter() - self._began
        busy_s, self._reported_s = busy_s - self._reported_s, busy_s
        elsewhere = sum(times.get(f"time/{phase}_s", 0.0) for phase in ("evaluate", "rollout"))
        waited_s = max(times["time/step_s"] - elsewhere - busy_s, 0.0)
        return {"overlap/sampling_s": busy_s, "overlap/engines_wait_s": waited_s}

    async def save(self) -> None:
        await in_thread(self.run.state.save)
