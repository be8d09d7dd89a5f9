"""One engine of a group: what it was given and has not given back, and the talk with it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from winnow.rollout.engine import CompletionEvent, Engine, EngineStatus, GroupRequest
from winnow.rollout.router import Key, PendingRequest, requests_of
from winnow.rollout.slots import EMPTY


def came_back(
    ask: PendingRequest, kind: Literal["aborted", "failed"], tick: int, error: str = ""
) -> CompletionEvent:
    """The end of an answer that no engine reports: with what is known of it."""
    segment = ask.request.prefix or EMPTY
    return CompletionEvent(*ask.key, kind, segment, "aborted", tick, error)


@runtime_checkable
class Gathering(Protocol):
    """An engine that is far, and tells much at once where nobody is to act before."""

    async def events_to(
        self, tick: int, groups: Sequence[GroupRequest]
    ) -> Sequence[CompletionEvent]:
        """Submit groups; all that happens up to a tick, or some of it where that takes long."""
        ...


@dataclass(eq=False)
class EngineClient:
    """An engine and its books."""

    engine: Engine
    name: str
    asks: dict[Key, PendingRequest] = field(default_factory=dict)
    """Given to it and not back yet, those in `outbox` included."""
    outbox: list[PendingRequest] = field(default_factory=list)
    inbox: list[CompletionEvent] = field(default_factory=list)
    offset: int = 0
    """The group's tick less its own: an engine without work does not tick."""
    status: EngineStatus = field(init=False)
    """When it was last heard of."""
    is_dead: bool = False
    sending: asyncio.Task[None] | None = None
    talking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> EngineStatus:
        """Its status now, of a dead one the last."""
        if not self.is_dead:
            self.status = self.engine.status()
        return self.status

    @property
    def takes_along(self) -> bool:
        """Whether what it is to write goes with the next call for events."""
        return isinstance(self.engine, Gathering)

    @property
    def is_idle(self) -> bool:
        """Whether it says that it has nothing to do, and nothing is on its way to it."""
        sends = self.outbox or (self.sending is not None and not self.sending.done())
        return not sends and not self.status.running + self.status.queued

    def give(self, asks: Sequence[PendingRequest]) -> None:
        """It is to write these."""
        self.asks.update((ask.key, ask) for ask in asks)
        self.outbox += asks

    async def send(self) -> None:
        """Submit the outbox; one task at a time does so.

        Raises:
            WorkerError: it died.
        """
        while self.outbox:
            asks, self.outbox = self.outbox, []
            await self.engine.submit(requests_of(asks))
            self.look()

    async def sent(self) -> None:
        """Wait until what is being sent has arrived; whoever sends deals with errors."""
        if self.sending is not None and not self.sending.done():
            await asyncio.wait([self.sending])

    def withdraw(self, group_ids: Collection[int]) -> list[PendingRequest]:
        """Take back what was not sent yet."""
        taken = [ask for ask in self.outbox if ask.key[0] in group_ids]
        self.outbox = [ask for ask in self.outbox if ask.key[0] not in group_ids]
        for ask in taken:
            del self.asks[ask.key]
        return taken

    def held(self, group_ids: Collection[int]) -> list[PendingRequest]:
        """What it has of these groups."""
        return [ask for ask in self.asks.values() if ask.key[0] in group_ids]

    def hear(self, events: Iterable[CompletionEvent]) -> list[CompletionEvent]:
        """Enter events; ends go to the inbox, `running` ones are returned."""
        if self.is_dead:  # heard too late: its answers are others' by now
            return []
        self.look()
        running = []
        for event in events:
            here = replace(event, tick=event.tick + self.offset) if self.offset else event
            key = event.group_id, event.answer
            if event.kind == "running":
                self.asks[key].learn(event.segment)
                running.append(here)
            else:
                del self.asks[key]
                self.inbox.append(here)
        return running

    def give_up(self, error: str) -> None:
        """It has lost what it had: that fails, with what is known of it."""
        tick = self.status.tick + self.offset
        self.inbox += [came_back(ask, "failed", tick, error) for ask in self.asks.values()]
        self.asks.clear()
        self.outbox.clear()

    def take_inbox(self) -> list[CompletionEvent]:
        """What it said and nobody has taken yet."""
        events, self.inbox = self.inbox, []
        return events

    async def run_to(self, tick: int) -> None:
        """Let it write until the group's `tick`, or until it has nothing left.

        Raises:
            WorkerError: it died.
        """
        own = tick - self.offset
        while self.asks:
            if isinstance(self.engine, Gathering):
                asks, self.outbox = self.outbox, []
                events = await self.engine.events_to(own, requests_of(asks))
            else:
                events = await self.engine.events(own)
            self.hear(events)
            if self.status.tick >= own:
                return
            if not events and self.asks and self.is_idle:
                self.give_up("the engine lost the answer")
            elif not events:
                await asyncio.sleep(0)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those under way."""
        return [task for task in (self.sending, self.talking) if task and not task.done()]
