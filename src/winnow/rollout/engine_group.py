"""Several engines as one: groups of answers are dealt out by free slots, and outlive an engine.

    submit ──► line of what waits ──place──► engine 0, engine 1, … ──events──► one stream of events
                     ▲                            │ dies
                     └──── behind the last known prefix ◄┘

Deterministic: engines advance together, in quanta of ticks. What waits is dealt out between quanta,
and events come in the order of tick, group and answer, so that nothing depends on how fast an
engine is. Free: a task of its own talks with each engine, and whoever has news is heard at once;
what an engine that died had not finished goes to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from winnow.errors import PublicationError, WorkerError
from winnow.rollout.engine import (
    CompletionEvent,
    Engine,
    EngineStatus,
    GroupRequest,
    WeightUpdate,
)
from winnow.rollout.engine_client import EngineClient, came_back
from winnow.rollout.router import QUANTUM_TICKS, PendingRequest, RequestQueue
from winnow.rollout.weights import Receiver, send

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineGroup:
    """Implements `Engine` over engines that hold the same weights.

    Args:
        engines: at least one.
        deterministic: what happens depends on submissions and ticks alone. An engine's death is
            then raised; else it is logged, and raised when none is left.
        quantum_ticks: that deterministic engines advance between two looks at all of them.

    Raises:
        ValueError: there are no engines.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        deterministic: bool,
        quantum_ticks: int = QUANTUM_TICKS,
    ) -> None:
        if not engines:
            raise ValueError("a group of engines needs at least one")
        self._members = [EngineClient(engine, f"engine {i}") for i, engine in enumerate(engines)]
        self._deterministic = deterministic
        self.quantum_ticks = quantum_ticks
        self._line = RequestQueue()
        self._inbox: list[CompletionEvent] = []  # what no engine reported
        self._tick = 0
        self._quantum: asyncio.Task[None] | None = None  # outlives a wait that is cancelled
        self._news: asyncio.Future[None] | None = None  # while the free mode waits
        self._fault: Exception | None = None  # what ended a talk, to be raised
        self._last_death: WorkerError | None = None
        self._old_version: int | None = None  # while new weights come
        self._counted: int | None = None  # tokens at the last `progress`

    @property
    def engines(self) -> dict[str, Engine]:
        """Those that live, by name."""
        return {member.name: member.engine for member in self._alive()}

    @property
    def dead(self) -> list[str]:
        """Names of those that died."""
        return [member.name for member in self._members if member.is_dead]

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """See `Engine.submit`. What an engine refuses is raised by `events`."""
        self._line.add(
            PendingRequest(group, request) for group in groups for request in group.answers
        )
        if not self._deterministic:
            self._deal()
            self._wake()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """See `Engine.events`; in free mode `until` means nothing.

        When the wait is cancelled the engines go on: to the end of their quantum, or in free mode
        with all they were given.

        Raises:
            WorkerError: an engine died; in free mode, the last one.
        """
        self._counted = None
        await (self._advance(until) if self._deterministic else self._listen())
        return self._take_inboxes()

    async def progress(self) -> Sequence[CompletionEvent]:
        """See `Engine.progress`; in deterministic mode a quantum under way ends first.

        Until the next `events`, `status` tells the tokens that had been written at this moment, so
        that the token account agrees with it though engines write on.
        """
        await self._end_quantum()
        told, running = self._take_inboxes(), list[CompletionEvent]()
        counts = {member.name: member.status.generated_tokens for member in self._members}

        async def look(member: EngineClient) -> None:
            running.extend(member.hear(await member.engine.progress()))
            # Here, not later: an answer may end while another engine is asked.
            told.extend(member.take_inbox())
            counts[member.name] = member.status.generated_tokens

        await self._each([m for m in self._alive() if m.asks], look)
        self._counted = sum(counts.values())
        return [*self._ordered(told), *sorted(running, key=lambda e: (e.group_id, e.answer))]

    async def abort(self, group_ids: Collection[int]) -> None:
        """See `Engine.abort`."""
        ids = set(group_ids)
        unsent = self._line.take(ids)
        for member in self._alive():
            unsent += member.withdraw(ids)
        self._come_back(unsent)
        self._wake()

        holders = [member for member in self._alive() if member.held(ids)]
        for member in holders:
            for ask in member.held(ids):
                ask.aborting = True

        async def take_back(member: EngineClient) -> None:
            await member.sent()
            await member.engine.abort(sorted({ask.key[0] for ask in member.held(ids)}))
            if self._deterministic and self._quantum is None:
                member.hear(await member.engine.events(member.look().tick))

        await self._each(holders, take_back)

    async def load_weights(self, update: WeightUpdate) -> None:
        """See `Engine.load_weights`. Tensors go out in buckets, to all engines at once.

        Raises:
            ValueError: answers are under way, and not all engines take weights live.
            PublicationError: an engine does not hold what was sent.
            WorkerError: as for `events`.
        """
        alive = self._alive()
        wanted = len(self._line) or any(member.asks for member in alive)
        if wanted and not all(member.look().live_updates for member in alive):
            raise ValueError("abort what runs before new weights: its cache is of the old ones")
        await self._end_quantum()
        self._old_version = alive[0].look().weight_version
        try:
            if update.tensors is None and update.buckets is None:
                await self._each(self._alive(), lambda m: m.engine.load_weights(update))
            else:
                await send(update, self._ask)
        finally:
            self._old_version = None
        wrong = [m.name for m in self._alive() if m.look().weight_version != update.version]
        if wrong:
            raise PublicationError(
                f"{', '.join(wrong)} did not take weights of version {update.version}; "
                "look at its lines in the log"
            )

    def status(self) -> EngineStatus:
        """See `Engine.status`: sums, those of dead engines' tokens included.

        Raises:
            PublicationError: the engines hold different versions.
        """
        every = [member.look() for member in self._members]
        alive = [m.status for m in self._members if not m.is_dead] or every
        versions = sorted({status.weight_version for status in alive})
        if len(versions) > 1 and self._old_version is None:
            raise PublicationError(f"engines hold weights of versions {versions}; publish again")
        version = versions[0] if self._old_version is None else self._old_version
        unsent = len(self._line) + sum(len(m.outbox) for m in self._members)
        written = sum(status.generated_tokens for status in every)
        return EngineStatus(
            slots=sum(status.slots for status in alive),
            running=sum(status.running for status in alive),
            queued=sum(status.queued for status in alive) + unsent,
            weight_version=version,
            generated_tokens=written if self._counted is None else self._counted,
            masked_probability=sum(status.masked_probability for status in every),
            tick=self._tick if self._deterministic else max(status.tick for status in every),
            live_updates=all(status.live_updates for status in alive),
            healthy=not self.dead and all(status.healthy for status in alive),
        )

    async def close(self) -> None:
        """Stop talking, and close all engines that live."""
        tasks: list[asyncio.Task[Any]] = [t for m in self._members for t in m.tasks()]
        tasks += [self._quantum] if self._quantum is not None else []
        await _cancelled(tasks)
        engines = [member.engine.close() for member in self._members if not member.is_dead]
        for found in await asyncio.gather(*engines, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, WorkerError):
                raise found

    # -- deterministic: all together ----------------------------------------------------------

    async def _advance(self, until: int | None) -> None:
        """Quantum after quantum until something happened, `until`, or the end of all work."""
        while True:
            await self._end_quantum()
            wanted = len(self._line) or any(member.asks for member in self._members)
            late = until is not None and self._tick >= until
            if self._has_news() or late or not wanted:
                return
            target = (self._tick // self.quantum_ticks + 1) * self.quantum_ticks
            if until is not None:
                target = min(target, until)
            self._quantum = asyncio.create_task(self._run_quantum(target))

    async def _end_quantum(self) -> None:
        if self._quantum is None:
            return
        task = self._quantum
        try:
            if not task.cancelled():  # as by the end of another loop
                await asyncio.shield(task)
        finally:
            if task.done():
                self._quantum = None

    async def _run_quantum(self, target: int) -> None:
        self._deal()
        await asyncio.gather(*(m.sending for m in self._members if m.sending is not None))
        busy = [member for member in self._members if member.asks]
        self._raise_fault()
        if not busy:  # all was taken back meanwhile
            return
        tasks = [asyncio.create_task(member.run_to(target)) for member in busy]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await _cancelled(tasks)
        # Also when they ran dry before: what follows then begins at a quantum, as after a resume.
        self._tick = target

    # -- free: each by itself -----------------------------------------------------------------

    async def _listen(self) -> None:
        """Wait until an engine says something, or nothing is wanted of any."""
        while not self._has_news():
            self._raise_fault()
            members = self._alive()
            self._deal()
            if not any(member.asks for member in members):
                return
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _talk(self, member: EngineClient) -> None:
        """All there is to hear from one engine while it has something to write."""
        while member.asks:
            await member.sent()
            events = await member.engine.events()
            member.hear(events)
            if not events and member.asks and member.is_idle:
                member.give_up("the engine lost the answer")
            elif not events:
                await asyncio.sleep(0)
            self._deal()
            self._wake()

    async def _guarded(
        self, member: EngineClient, work: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """A task's work; what goes wrong is heard by whoever waits for events."""
        try:
            await work(member)
        except WorkerError as error:
            if self._deterministic:
                self._fault = error
            else:
                self._bury(member, error)
        except Exception as error:
            self._fault = error
        self._wake()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    # -- both ---------------------------------------------------------------------------------

    def _alive(self) -> list[EngineClient]:
        alive = [member for member in self._members if not member.is_dead]
        if not alive:
            assert self._last_death is not None
            raise self._last_death
        return alive

    def _deal(self) -> None:
        """Give the engines what they have room for, and see that it is sent."""
        alive = [member for member in self._members if not member.is_dead]
        if not alive:
            return
        slots, loads = [m.status.slots for m in alive], [len(m.asks) for m in alive]
        for member, asks in zip(alive, self._line.place(slots, loads), strict=True):
            if self._deterministic and not member.asks:
                member.offset = self._tick - member.look().tick
            member.give(asks)
            waits = self._deterministic and member.takes_along
            is_free = member.sending is None or member.sending.done()
            if member.outbox and is_free and not waits:
                member.sending = asyncio.create_task(self._guarded(member, EngineClient.send))
            talks = member.talking is not None and not member.talking.done()
            if not self._deterministic and member.asks and not talks:
                member.talking = asyncio.create_task(self._guarded(member, self._talk))

    async def _each(
        self, members: Sequence[EngineClient], do: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Do the same with all at once; whoever dies of it is buried."""
        found = await asyncio.gather(*map(do, members), return_exceptions=True)
        for member, error in zip(members, found, strict=True):
            if isinstance(error, WorkerError):
                self._bury(member, error)
            elif error is not None:
                raise error

    async def _ask(self, do: Callable[[Receiver], Awaitable[T]]) -> Mapping[str, T]:
        """`weights.PendingRequest` of all that live."""
        answers: dict[str, T] = {}

        async def one(member: EngineClient) -> None:
            assert isinstance(member.engine, Receiver), f"{member.name} takes no buckets"
            answers[member.name] = await do(member.engine)

        await self._each(self._alive(), one)
        return answers

    def _bury(self, member: EngineClient, error: WorkerError) -> None:
        """An engine died: what it had goes to the others, what was asked back comes back."""
        if self._deterministic:
            raise error
        if member.is_dead:
            return
        member.is_dead, self._last_death = True, error
        for task in member.tasks():
            if task is not asyncio.current_task():
                task.cancel()
        asks, member.asks, member.outbox = list(member.asks.values()), {}, []
        self._come_back([ask for ask in asks if ask.aborting])
        others = [ask for ask in asks if not ask.aborting]
        self._line.add(others)
        left = len(self._members) - len(self.dead)
        log.warning(
            "%s died, %d of %d are left: %s; %d answers go on elsewhere",
            *(member.name, left, len(self._members), error, len(others)),
        )
        self._deal()
        self._wake()

    def _come_back(self, asks: Sequence[PendingRequest]) -> None:
        tick = self._tick
        self._inbox += [came_back(ask, "aborted", tick) for ask in asks]

    def _has_news(self) -> bool:
        return bool(self._inbox) or any(member.inbox for member in self._members)

    def _take_inboxes(self) -> list[CompletionEvent]:
        events, self._inbox = self._inbox, []
        for member in self._members:
            events += member.take_inbox()
        return self._ordered(events)

    def _ordered(self, events: list[CompletionEvent]) -> list[CompletionEvent]:
        ticks = self._deterministic  # which engines share then
        return sorted(events, key=lambda e: (e.tick if ticks else 0, e.group_id, e.answer))


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they are gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
