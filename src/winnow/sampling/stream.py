"""The scheduler: keeps the engine busy with groups until the ledger can cut a step.

    next_prompt -> admit -> engine -> events -> score -> ledger -> cut -> abort, commit

One turn of the loop is one batch of engine events. Within a turn nothing depends on the
clock: the same events and scores lead to the same decisions. What runs when a step is cut
comes back as prefixes (new weights are about to come) and is the first to go on in the
next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from winnow.config.sampling import SamplingConfig
from winnow.errors import NoSignalError
from winnow.rollout.engine import CompletionEvent, Engine, SamplingParams
from winnow.rollout.single_turn import group_request, trajectory_of
from winnow.sampling.ledger import Ledger
from winnow.sampling.report import (
    Progress,
    StepGroups,
    no_signal_message,
    stop_message,
    what_the_filter_saw,
)
from winnow.sampling.watchdog import Watchdog
from winnow.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)


class Sampler:
    """Gives the trainer one step's groups at a time."""

    def __init__(
        self,
        config: SamplingConfig,
        *,
        engine: Engine,
        next_prompt: Callable[[], Prompt],
        give_back: Callable[[Sequence[Prompt]], None],
        score: Callable[[Prompt, Trajectory], Score | Awaitable[Score]],
        n: int,
        sampling: SamplingParams,
        run_seed: int,
        drop_failed_scores: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Bind the collaborators.

        Args:
            config: the rules.
            engine: what writes tokens.
            next_prompt: the loader's next prompt; it never runs dry.
            give_back: takes prompts of dropped groups; they come next, in this order.
            score: scores one finished answer, at once or as an awaitable; many of these run
                side by side.
            n: answers a prompt.
            sampling: how tokens are drawn.
            run_seed: seeds every answer, with its group and index.
            drop_failed_scores: a failed scoring fails its group.
            on_progress: called once a turn.
        """
        self.ledger = Ledger(config, n, drop_failed_scores=drop_failed_scores)
        self._config = config
        self._engine = engine
        self._next_prompt = next_prompt
        self._give_back = give_back
        self._score = score
        self._sampling = sampling
        self._run_seed = run_seed
        self._on_progress = on_progress
        self._watchdog = Watchdog(engine, self.ledger, config)

    async def step(self, version: int) -> StepGroups:
        """Sample with weights `version` until a step can be cut.

        Nothing runs in the engine before or after, so weights may be loaded in between. An
        error leaves everything accepted in the ledger, and so in `state_dict`.

        Raises:
            NoSignalError: the bound came too often without a qualified group, or once
                without N of them where `on_bound` is stop.
            TrainingError: the engine makes no progress.
        """
        stale = self.ledger.begin_step(version)
        if stale:
            self._give_back(stale)
        written = self._engine.status().generated_tokens - self.ledger.account.generated
        async with self._watchdog.guard():
            await self._make_visible(self.ledger.lives.unscored())
            while not await self._full():
                await self._submit()
                await self._take(await self._events(), stalled=True)
                self._report()
            await self._halt()
        lost = self._engine.status().generated_tokens - self.ledger.account.generated - written
        if lost:
            log.warning("step %d: the engine wrote %d tokens that never came back", version, lost)
        step = self.ledger.commit()
        if step.short:
            log.warning(
                "step %d is short: %d of %d groups qualified within the bound of %d",
                version,
                len(step.trained),
                step.wanted,
                self.ledger.bound,
            )
        if step.returned:
            self._give_back(step.returned)
        return step

    def state_dict(self) -> dict[str, Any]:
        """Groups, counters, p̂ and histories, as plain Python and numpy."""
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described, with an engine that has nothing running."""
        self.ledger.load_state_dict(state["ledger"])
        self.ledger.forget_engine()

    async def _full(self) -> bool:
        """Whether to cut; deals with a bound that was met too early."""
        ledger = self.ledger
        if not ledger.cut_is_due():
            return False
        if ledger.committable == ledger.wanted:
            return True
        tally, fates = ledger.tally, ledger.books.fates()
        if self._config.on_bound == "stop":
            await self._halt()
            raise NoSignalError(stop_message(tally, fates, self._config, ledger.bound))
        if ledger.committable:
            return True
        ledger.pass_bound()
        if tally.empty_bounds >= self._config.max_empty_steps:
            await self._halt()
            raise NoSignalError(no_signal_message(tally, fates))
        log.warning("nothing qualified within the bound: %s", what_the_filter_saw(tally, fates))
        return False

    async def _submit(self) -> None:
        """Open groups while the rule allows, and hand the engine all that waits."""
        ledger = self.ledger
        while ledger.may_admit():
            ledger.admit(self._next_prompt())
        requests = [
            group_request(ask.group_id, ask.prompt, ask.prefixes, self._sampling, self._run_seed)
            for ask in ledger.dispatch()
        ]
        if requests:
            await self._engine.submit(requests)

    async def _events(self) -> Sequence[CompletionEvent]:
        with self._watchdog.waiting_for_engine():
            events = await self._engine.events()
        if not events and self.ledger.lives.running:
            status = self._engine.status()
            if not status.running + status.queued:
                self.ledger.lose_running("the engine lost the answer")
            await asyncio.sleep(0)
        return events

    async def _take(self, events: Sequence[CompletionEvent], *, stalled: bool) -> None:
        """Enter a turn's events and scores; `stalled` tells what an abort means now."""
        ledger = self.ledger
        finished = []
        for event in events:
            if event.kind == "finished":
                ledger.finished(event.group_id, event.answer, trajectory_of(event))
                finished.append((event.group_id, event.answer))
            elif event.kind == "aborted":
                ledger.aborted(event.group_id, event.answer, event.segment, stalled=stalled)
            else:
                ledger.failed(event.group_id, event.answer, event.segment, event.error)
        await self._make_visible(finished)
        failing = [life.id for life in ledger.lives.doomed.values() if life.running]
        if failing:
            await self._engine.abort(failing)

    async def _make_visible(self, finished: Sequence[tuple[int, int]]) -> None:
        """Score these answers at once and enter the scores in this order.

        The one place that decides when a score is seen: at the end of the turn in which its
        answer finished, however long the scorer takes.
        """
        lives = self.ledger.lives
        wanted = [key for key in finished if key[0] in lives.open]
        if not wanted:
            return
        scores = await _all_of([self._score(*lives.finished_answer(*key)) for key in wanted])
        for (group_id, index), score in zip(wanted, scores, strict=True):
            self.ledger.scored(group_id, index, score)

    async def _halt(self) -> None:
        """Turn everything that runs into prefixes."""
        lives = self.ledger.lives
        running = list(dict.fromkeys(group_id for group_id, _ in lives.with_engine()))
        if running:
            await self._engine.abort(running)
        while lives.running:
            await self._take(await self._events(), stalled=False)

    def _report(self) -> None:
        if self._on_progress is None:
            return
        ledger = self.ledger
        self._on_progress(
            Progress(
                qualified=ledger.qualified,
                wanted=ledger.wanted,
                in_flight=ledger.in_flight,
                looked_at=ledger.looked_at,
                generated_tokens=ledger.account.generated,
            )
        )


async def _all_of(given: Sequence[Score | Awaitable[Score]]) -> list[Score]:
    """The scores in order; a task each only for those that are not there yet."""
    tasks = [asyncio.ensure_future(score) for score in given if not isinstance(score, Score)]
    try:
        late = iter(await asyncio.gather(*tasks) if tasks else [])
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [score if isinstance(score, Score) else next(late) for score in given]
