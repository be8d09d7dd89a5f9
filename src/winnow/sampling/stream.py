"""The scheduler: keeps the engine busy with groups until the ledger can cut a step.

    next_prompt -> admit -> engine -> events -> score -> ledger -> cut -> abort, commit

One turn of the loop is one batch of engine events. In deterministic mode nothing depends on
the clock: the same events and scores lead to the same decisions, a score is seen at a fixed
tick, and what runs when a step is cut comes back as prefixes (new weights are about to come),
which are the first to go on in the next step. In free mode a turn also ends when a score
arrives, no score is waited for while the engine has work, and what runs at a cut goes on under
the new weights where rule and engine allow it.

No answer has a wall-clock limit (that would select against length); only an engine that writes no
token at all for a while has to return its answers, and they are sent again behind what they
had. Each time counts as an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.config.rollout import SamplingConfig
from winnow.errors import NoSignalError, TrainingError
from winnow.rollout.engine import (
    CompletionEvent,
    Engine,
    SamplingParams,
    group_request,
    trajectory_of,
)
from winnow.sampling.accounting import (
    RETURNED,
    StepGroups,
    bound_message,
    describe_filtering,
    no_signal_error,
)
from winnow.sampling.ledger import Ledger
from winnow.types import Group, Prompt, Score, Trajectory

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds without a closed group after which a status line is logged."""
Key = tuple[int, int]
"""Group and answer."""
Scorer = Callable[[Prompt, Trajectory], Score | Awaitable[Score]]


@dataclass(frozen=True, slots=True, eq=False)
class _PendingScore:
    future: asyncio.Future[Score]
    due: int
    """Decode tick at which it is seen in deterministic mode."""


class PendingScores:
    """Pending scores: from the end of an answer until its score is recorded.

    A scoring starts when its answer finishes and runs concurrently with the engine. The time at
    which a score is recorded decides what the ledger does next:

    - deterministic: a fixed number of decode ticks after the answer finished; the scheduler waits
      for late scores, so that the run does not depend on how long scorers take;
    - free: on arrival, without waiting.
    """

    def __init__(self, score: Scorer) -> None:
        self._score = score
        self.under_way: dict[Key, _PendingScore] = {}
        """In the order in which they began."""
        self._changed = asyncio.Event()
        self._is_woken = False

    def begin(self, key: Key, prompt: Prompt, trajectory: Trajectory, due: int) -> None:
        """Start to score an answer, whose score is to be recorded at tick `due`."""
        assert key not in self.under_way
        score = self._score(prompt, trajectory)
        if isinstance(score, Score):
            future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
            future.set_result(score)
        else:
            future = asyncio.ensure_future(score)
            future.add_done_callback(lambda _: self._changed.set())
        self.under_way[key] = _PendingScore(future, due)

    @property
    def next_due_tick(self) -> int | None:
        """The tick at which the next score is to be recorded; None without pending scores."""
        first = next(iter(self.under_way.values()), None)
        return None if first is None else first.due

    def due_keys(self, tick: int) -> list[Key]:
        """Return the answers whose scores are due at `tick`, in their order of starting."""
        return [key for key, scoring in self.under_way.items() if scoring.due <= tick]

    def ready_keys(self) -> list[Key]:
        """Return the answers whose scores have arrived, in their order of starting."""
        return [key for key, scoring in self.under_way.items() if scoring.future.done()]

    async def wait_for_change(self) -> None:
        """Wait until a score arrives, or `wake` was called since the last wait."""
        while not self.ready_keys() and not self._is_woken:
            self._changed.clear()
            await self._changed.wait()
        self._is_woken = False

    def wake(self) -> None:
        """End a wait for a change."""
        self._is_woken = True
        self._changed.set()

    async def take(self, keys: Iterable[Key]) -> list[Score]:
        """Wait for the scores of these answers and remove them from the pending ones.

        An error of one scoring ends the waiting at once.
        """
        keys = list(keys)
        futures = [self.under_way[key].future for key in keys]
        if not all(future.done() for future in futures):
            await asyncio.gather(*futures)
        return [self.under_way.pop(key).future.result() for key in keys]

    async def cancel(self) -> None:
        """Cancel all scorings; answers whose scores were not taken stay unscored."""
        futures = [scoring.future for scoring in self.under_way.values()]
        self.under_way.clear()
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


class Sampler:
    """The scheduler of groups: samples one step's groups at a time for the trainer."""

    def __init__(
        self,
        config: SamplingConfig,
        *,
        engine: Engine,
        next_prompt: Callable[[], Prompt],
        give_back: Callable[[Sequence[Prompt]], None],
        score: Scorer,
        n: int,
        sampling: SamplingParams,
        run_seed: int,
        with_baseline: bool = False,
        drop_failed_scores: bool = False,
        deterministic: bool = True,
        look_ticks: int = 1,
        on_progress: Callable[[Ledger], None] = lambda ledger: None,
        on_settled: Callable[[Sequence[Group]], None] = lambda groups: None,
    ) -> None:
        """Bind the collaborators.

        Args:
            config: the rules; a score lag of None is 0.
            engine: what writes tokens.
            next_prompt: the loader's next prompt; it never runs dry.
            give_back: takes prompts of dropped groups; they come next, in this order.
            score: scores one finished answer, at once or as an awaitable; many of these run
                side by side.
            n: answers a prompt.
            sampling: how tokens are drawn.
            run_seed: seeds every answer, with its index and its prompt's turn (in completion order
                its group's id).
            with_baseline: ask for one greedy answer a prompt beside the n.
            drop_failed_scores: a failed scoring fails its group.
            deterministic: what happens does not depend on how long anything takes.
            look_ticks: scores are then seen at multiples of this alone, where looking at an
                engine has its price.
            on_progress: called once a turn.
            on_settled: called at a cut with the groups whose prompts are used up.
        """
        self.ledger = Ledger(
            config, n, with_baseline=with_baseline, drop_failed_scores=drop_failed_scores
        )
        self._config = config
        self._engine = engine
        self._next_prompt = next_prompt
        self._give_back = give_back
        self._scores = PendingScores(score)
        self._deterministic, self.look_ticks = deterministic, look_ticks
        self._sampling = sampling
        self._run_seed = run_seed
        self._on_progress, self._on_settled = on_progress, on_settled
        self._is_waiting_for_engine = False
        self._pending_events: list[CompletionEvent] = []  # by a wait that was cancelled
        self._is_collecting_progress = False
        self._progress_turn = asyncio.Lock()
        self._unrecorded_tokens = 0
        self.idle_s = 0.0
        """Seconds in which engines were idle and waited for a publication."""
        self.score_lag_ticks = config.score_lag_ticks or 0
        """Decode ticks between the end of an answer and the recording of its score."""

    async def step(self, version: int, learns: int | None = None) -> StepGroups:
        """Sample with weights `version` until a step can be cut.

        Weights may be loaded between two calls. In deterministic mode the engine is idle then; in
        free mode it may run on if it loads weights live, and `set_engine_version` may be called
        during a step. After an error or a cancellation the ledger keeps everything accepted, and
        the next call continues from it.

        Args:
            learns: version of the weights that learn the step; None: the same.

        Raises:
            NoSignalError: the bound came too often without a qualified group, or once
                without N of them where `on_bound` is stop.
            TrainingError: the engine makes no progress.
        """
        stale = self.ledger.begin_step(version, learns)
        if stale:
            self._give_back(stale)
        before = self._count_unrecorded_tokens()
        sampling = asyncio.create_task(self._sample())
        watch = asyncio.create_task(self._watch_engine())
        try:
            done, _ = await asyncio.wait([sampling, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:
            await _cancel_and_wait(sampling)
            await self._scores.cancel()
            raise
        finally:
            await _cancel_and_wait(watch)
        lost = self._unrecorded_tokens - before
        if lost > 0:
            log.warning("step %d: the engine lost %d generated tokens", version, lost)
        step = self.ledger.commit()
        if step.is_short:
            log.warning(
                "step %d is short: %d of %d groups qualified within the bound of %d",
                version,
                len(step.trained),
                step.wanted,
                self.ledger.bound,
            )
        if step.returned:
            self._give_back(step.returned)
        settled = (*step.trained, *step.discarded)
        self._on_settled([each.group for each in settled if each.fate not in RETURNED])
        return step

    def set_engine_version(self, version: int) -> None:
        """Set the version of the engines' weights during a step; more groups may open now."""
        self.ledger.version = version
        self._scores.wake()

    async def record_progress(self) -> None:
        """Record the tokens so far of running answers; allowed during a step."""
        async with self._progress_turn:  # of two calls at once, one would enter the older state
            self._is_collecting_progress = True
            try:
                events = await self._engine.progress()
            finally:
                self._is_collecting_progress = False
            # Of several engines some report before others: what ended since has been entered.
            running = set(self.ledger.groups.running_keys())
            await self._record_events(
                [e for e in events if e.kind != "running" or e.key in running], stalled=False
            )
        self._scores.wake()

    async def abort_running(self) -> None:
        """Abort all running answers and keep them as prefixes, which leaves the engine idle."""
        groups = self.ledger.groups
        running = list(dict.fromkeys(group_id for group_id, _ in groups.running_keys()))
        if running:
            await self._engine.abort(running)
        while groups.running:
            await self._record_events(await self._next_events(), stalled=False)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of groups, counters, p̂ and histories."""
        return {"ledger": self.ledger.state_dict(), "score_lag_ticks": self.score_lag_ticks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`, with an idle engine.

        The lag is the state's: schedules depend on it, and what chose it may have changed.
        """
        self.score_lag_ticks = state["score_lag_ticks"]
        self.ledger.load_state_dict(state["ledger"])
        self.ledger.requeue_running()

    async def _sample(self) -> None:
        """Run the loop until a step can be cut."""
        tick = self._engine.status().tick
        unscored = self.ledger.groups.unscored()
        under_way = self._scores.under_way
        self._begin_scoring([key for key in unscored if key not in under_way], tick)
        if self._deterministic:
            await self._record_scores(unscored)
            await self._record_scores(None)  # of groups that have ended
        else:
            await self._record_scores(self._scores.ready_keys())
        while not await self._is_ready_to_commit():
            await self._submit()
            events = await (
                self._next_events() if self._deterministic else self._events_or_change()
            )
            await self._record_events(events, stalled=True)
            await self._record_due_scores()
            self._on_progress(self.ledger)
        live = self._engine.status().live_updates
        if self._deterministic or not live or not self.ledger.may_keep_running:
            await self.abort_running()
        else:
            await self.record_progress()
            while self.ledger.groups.failing:  # a cut would pass them over without a fate
                await self._abort_failing()
                await self._record_events(await self._next_events(), stalled=False)
                await self.record_progress()
        self._unrecorded_tokens = self._count_unrecorded_tokens()

    def _count_unrecorded_tokens(self) -> int:
        """Count the tokens that the engine generated and the ledger does not have."""
        return self._engine.status().generated_tokens - self.ledger.account.generated

    async def _is_ready_to_commit(self) -> bool:
        """Return whether to cut a step; extend or enforce a bound that was met too early."""
        ledger = self.ledger
        if not ledger.step_is_ready():
            return False
        if ledger.committable == ledger.target:
            return True
        tally, fates = ledger.tally, ledger.accounting.count_fates()
        if self._config.on_bound == "stop":
            await self.abort_running()
            raise NoSignalError(bound_message(tally, fates, self._config, ledger.bound))
        if ledger.committable:
            return True
        ledger.extend_bound()
        if tally.empty_bounds >= self._config.max_empty_steps:
            await self.abort_running()
            raise no_signal_error(tally, fates)
        log.warning("no group qualified within the bound: %s", describe_filtering(tally, fates))
        return False

    async def _submit(self) -> None:
        """Open groups while the rule allows, and submit all waiting answers to the engine."""
        ledger = self.ledger
        while ledger.may_admit():
            ledger.admit(self._next_prompt())
        sampling, seed = self._sampling, self._run_seed
        # In completion order a prompt comes again for being slow; its old seeds would be so again.
        in_order = self._config.commit == "admission_order"
        requests = [
            group_request(
                *(ask.group_id, ask.prompt, ask.begun, sampling, seed, ask.greedy),
                turn=ask.turn if in_order else None,
            )
            for ask in ledger.dispatch()
        ]
        if requests:
            await self._engine.submit(requests)

    async def _next_events(self) -> Sequence[CompletionEvent]:
        """Wait for the engine's events, up to the tick at which a score is due."""
        if not self._pending_events:
            await self._collect_events()
        events, self._pending_events = self._pending_events, []
        return events

    async def _collect_events(self) -> None:
        """Wait for the engine's events, and keep them until they are taken.

        They are kept by the task that collected them, so that no cancellation loses one.
        """
        until = self._scores.next_due_tick if self._deterministic else None
        self._is_waiting_for_engine = True
        try:
            events = await self._engine.events(until)
        finally:
            self._is_waiting_for_engine = False
        self._pending_events += events
        if not events and self._is_collecting_progress:
            await asyncio.sleep(0)  # events may be on their way there
        elif not events and self.ledger.groups.running:
            status = self._engine.status()
            if not status.running + status.queued:
                self.ledger.requeue_running("the engine lost the answer")
            await asyncio.sleep(0)

    async def _events_or_change(self) -> Sequence[CompletionEvent]:
        """Wait for the engine's events, or none once a score is ready or weights are published."""
        is_alone = not self._scores.under_way and not self.ledger.unlearnt_steps
        if self._pending_events or is_alone:  # then neither can come
            return await self._next_events()
        began = asyncio.get_running_loop().time()
        waiting = [asyncio.ensure_future(self._scores.wait_for_change())]
        if self.ledger.groups.running:
            waiting.append(asyncio.ensure_future(self._collect_events()))
        is_idle = len(waiting) == 1 and not self._scores.under_way
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            if is_idle:
                self.idle_s += asyncio.get_running_loop().time() - began
        for error in outcomes:
            if isinstance(error, Exception):
                raise error
        events, self._pending_events = self._pending_events, []
        return events

    async def _record_events(self, events: Sequence[CompletionEvent], *, stalled: bool) -> None:
        """Record a turn's events; `stalled`: aborts in it count as attempts."""
        ledger = self.ledger
        for event in events:
            if event.kind == "finished":
                ledger.record_finished(*event.key, trajectory_of(event))
                self._begin_scoring([event.key], event.tick)
            elif event.kind == "running":
                ledger.record_progress(*event.key, event.segment, event.earlier)
            elif event.kind == "aborted":
                ledger.record_aborted(*event.key, event.segment, event.earlier, stalled=stalled)
            else:
                ledger.record_failed(*event.key, event.segment, event.error, event.earlier)

    def _begin_scoring(self, keys: Iterable[Key], tick: int) -> None:
        """Score answers that finished at `tick`, unless their groups have ended."""
        groups = self.ledger.groups
        for key in keys:
            if key[0] in groups.open:
                due = -(-(tick + self.score_lag_ticks) // self.look_ticks) * self.look_ticks
                self._scores.begin(key, *groups.finished_answer(*key), due)

    async def _record_due_scores(self) -> None:
        """Record the scores that are due in this turn.

        The one place that decides when a score is seen. Deterministic: at its tick, or when the
        engine has nothing left to write. Free: what is there.
        """
        if not self._deterministic:
            await asyncio.sleep(0)  # a score that takes no time is ready then
            await self._record_scores(self._scores.ready_keys())
        else:
            due = self._scores.due_keys(self._engine.status().tick)
            await self._record_scores(due if self.ledger.groups.running else None)
        await self._abort_failing()

    async def _abort_failing(self) -> None:
        """Abort the answers of failed groups that still run."""
        failing = [group.id for group in self.ledger.groups.failing.values() if group.running]
        if failing:
            await self._engine.abort(failing)

    async def _record_scores(self, keys: Iterable[Key] | None) -> None:
        """Record the scores of these answers in this order; None: of all pending ones."""
        keys = list(self._scores.under_way) if keys is None else list(keys)
        for key, score in zip(keys, await self._scores.take(keys), strict=True):
            self.ledger.record_score(*key, score)

    async def _watch_engine(self) -> None:
        """Poll the engine, and resubmit its answers if it generates nothing.

        Raises:
            TrainingError: it wrote nothing however often it was asked.
        """
        now, timeout_s = asyncio.get_running_loop().time, self._config.stall_timeout_s
        tokens, closed = self._engine.status().generated_tokens, self.ledger.tally.closed
        moved = reported = now()
        stalls = 0
        while True:
            await asyncio.sleep(min(REPORT_S, timeout_s) / 4)
            if self.ledger.tally.closed != closed:
                closed, reported = self.ledger.tally.closed, now()
            elif now() - reported >= REPORT_S:
                log.info("%s", self._status_line())
                reported = now()
            status = self._engine.status()
            written = status.generated_tokens
            if written != tokens:
                tokens, moved, stalls = written, now(), 0
            elif not self._is_waiting_for_engine or status.is_waiting:
                moved = now()
            elif now() - moved >= timeout_s:
                stalls += 1
                moved = now()
                if stalls > self._config.max_attempts:
                    raise TrainingError(
                        f"the rollout engine generated no token for {timeout_s:g} s, {stalls} "
                        f"times in a row ({self._status_line()}); check the engine, or raise "
                        "sampling.stall_timeout_s if it is only slow"
                    )
                log.warning(
                    "no token for %g s; resubmitting answers; %s", timeout_s, self._status_line()
                )
                running = {group_id for group_id, _ in self.ledger.groups.running_keys()}
                await self._engine.abort(sorted(running))

    def _status_line(self) -> str:
        """Return one line about what the step waits for, and the oldest open group."""
        ledger, status = self.ledger, self._engine.status()
        line = (
            f"sampling waits for {'the engine' if self._is_waiting_for_engine else 'scores'}: "
            f"{ledger.committable} of {ledger.target} groups are ready, {ledger.in_flight} open; "
            f"{status.running} answers running, {status.queued} queued"
        )
        oldest = next(iter(ledger.groups.open.values()), None)
        if oldest is not None:
            line += (
                f"; the oldest open group is {oldest.id}, {oldest.finished_answers} of "
                f"{len(oldest.answers)} answers finished"
            )
        return line


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is gone."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
