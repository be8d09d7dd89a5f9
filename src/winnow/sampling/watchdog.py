"""Liveness: notice an engine that writes nothing, and say who waits for whom.

No answer has a wall-clock limit (that would select against length); only an engine that
writes no token at all for a while is told to give its answers back, and they are sent again
behind what they had. Each time counts as an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from winnow.config.rollout import SamplingConfig
from winnow.errors import TrainingError
from winnow.rollout.engine import Engine
from winnow.sampling.ledger import Ledger

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds without a closed group after which a line says what is waited for."""


class Watchdog:
    """A watch beside a step, which looks at the engine now and then; costs nothing a turn."""

    def __init__(self, engine: Engine, ledger: Ledger, config: SamplingConfig) -> None:
        """Watch `engine` on behalf of `ledger`."""
        self._engine = engine
        self._ledger = ledger
        self._timeout_s = config.stall_timeout_s
        self._stalls_allowed = config.max_attempts
        self._waiting_for_engine = False
        self._dead = False

    @contextlib.contextmanager
    def waiting_for_engine(self) -> Iterator[None]:
        """Note that the step waits for the engine's events, and for nothing else."""
        self._waiting_for_engine = True
        try:
            yield
        finally:
            self._waiting_for_engine = False

    @contextlib.asynccontextmanager
    async def guard(self) -> AsyncIterator[None]:
        """Watch while the body runs.

        Raises:
            TrainingError: the engine wrote nothing however often it was asked.
        """
        self._dead = False
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if not self._dead:
                raise
            task.uncancel()
            raise TrainingError(
                f"the rollout engine wrote no token for {self._timeout_s:g} s, "
                f"{self._stalls_allowed + 1} times in a row ({self.who_waits()}); look at the "
                "engine, or raise sampling.stall_timeout_s if it is only slow"
            ) from None
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    def who_waits(self) -> str:
        """Say in one line what the step waits for, and which group holds it up."""
        ledger, status = self._ledger, self._engine.status()
        whom = "the engine" if self._waiting_for_engine else "scores"
        line = (
            f"sampling waits for {whom}: {ledger.committable} of {ledger.wanted} groups can be "
            f"trained, {ledger.in_flight} are open, {status.running} answers run and "
            f"{status.queued} are queued"
        )
        oldest = next(iter(ledger.groups.open.values()), None)
        if oldest is not None:
            line += (
                f"; the oldest open group is {oldest.id}, {oldest.finished} of "
                f"{len(oldest.answers)} answers finished"
            )
        return line

    async def _watch(self, step: asyncio.Task[object]) -> None:
        now = asyncio.get_running_loop().time
        tokens, closed = self._tokens(), self._ledger.tally.closed
        moved = reported = now()
        stalls = 0
        while True:
            await asyncio.sleep(min(REPORT_S, self._timeout_s) / 4)
            if self._ledger.tally.closed != closed:
                closed, reported = self._ledger.tally.closed, now()
            elif now() - reported >= REPORT_S:
                log.info("%s", self.who_waits())
                reported = now()
            if self._tokens() != tokens:
                tokens, moved, stalls = self._tokens(), now(), 0
            elif not self._waiting_for_engine:
                moved = now()
            elif now() - moved >= self._timeout_s:
                stalls += 1
                moved = now()
                if stalls > self._stalls_allowed:
                    self._dead = True
                    step.cancel()
                    return
                log.warning(
                    "no token for %g s; sending answers again. %s",
                    self._timeout_s,
                    self.who_waits(),
                )
                running = {group_id for group_id, _ in self._ledger.groups.with_engine()}
                await self._engine.abort(sorted(running))

    def _tokens(self) -> int:
        return self._engine.status().generated_tokens
