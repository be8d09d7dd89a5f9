"""Several engines as one: answers are dealt out by free slots, and outlive an engine.

    submit ──► queue ──place──► engine 0, engine 1, … ──events──► one stream of events
                 ▲                      │ dies
                 └─ behind the last known prefix ◄┘

Deterministic: engines advance together, in quanta of ticks. Answers are dealt out between quanta,
and events come in the order of tick, group and answer, so that nothing depends on how fast an
engine is. Free: each engine writes on by itself, and news are told at once; what an engine that
died had not finished goes to the others.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, cast

from winnow.errors import PublicationError, TrainingError, WorkerError
from winnow.rollout.engine import (
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    MemoryPart,
    PublishedEngine,
    check_may_change,
)
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.tick_engine import PendingAnswer
from winnow.rollout.weights import Bucket, WeightUpdate, send
from winnow.types import Segment

log = logging.getLogger(__name__)

Key = tuple[int, int]
"""Group, answer."""
QUANTUM_TICKS = 8
"""Least ticks that engines advance between two looks at all of them.

A look costs a call to each engine (1 to 3 ms to another process) and waits for the slowest; eight
ticks of a model worth distributing take 50 ms and more. On the other hand a slot whose engine has
nothing queued stays empty for up to a quantum, and an event is seen up to a quantum late.
"""
_LOOKS = 32
_DEATHS = 5
"""Engines that may die in a row at an answer without a token of it, before it is given up."""


@dataclass(eq=False)
class PendingRequest(PendingAnswer):
    """An answer that is wanted; its request's prefix is the last that an engine told of."""

    aborting: bool = False
    """True if it was asked back; it is not sent to another engine then."""
    deaths: int = 0
    """Engines in a row that died while they had it, and wrote no token of it."""

    @property
    def is_fresh(self) -> bool:
        """True if nothing of it is written: it shares its prompt's prefill with others."""
        return not self.request.prefix

    def learn(self, segment: Segment) -> None:
        """Take note that so much of it is written; the next engine begins behind it."""
        if len(segment) > len(self.prefix):
            self.request, self.deaths = replace(self.request, prefix=segment), 0


def requests_of(asks: Iterable[PendingRequest]) -> list[GroupRequest]:
    """Make the requests for one engine, answers of a group in one request."""
    groups: dict[int, list[PendingRequest]] = {}
    for ask in asks:
        groups.setdefault(id(ask.group), []).append(ask)
    return [
        replace(members[0].group, answers=tuple(ask.request for ask in members))
        for members in groups.values()
    ]


def quantum_for(max_tokens: int) -> int:
    """Return the ticks between two looks for answers of so many tokens at most.

    About `_LOOKS` looks while a longest answer is written: far fewer slots end in between than may
    wait in an engine (`ahead`), unless nearly all answers are short.
    """
    return max(QUANTUM_TICKS, max_tokens // _LOOKS)


def ahead(slots: int) -> int:
    """Return how many answers may wait in an engine for its next free slot.

    A quarter of the slots: as many as end in eight ticks where answers have 32 tokens. Answers that
    wait in the queue instead can go to the engine that is free first.
    """
    return max(1, slots // 4)


class RequestQueue:
    """Answers without an engine: prefixes first, then by priority, as engines serve them.

    Fresh answers of a group stand in it as one, so that their prompt is prefilled once.
    """

    def __init__(self) -> None:
        self._bundles: list[list[PendingRequest]] = []

    def __len__(self) -> int:
        return sum(map(len, self._bundles))

    def __iter__(self) -> Iterator[PendingRequest]:
        return chain.from_iterable(self._bundles)

    def add(self, asks: Iterable[PendingRequest]) -> None:
        """Queue answers."""
        bundles: dict[int, list[PendingRequest]] = {}
        for ask in asks:
            bundles.setdefault(id(ask.group if ask.is_fresh else ask), []).append(ask)
        for bundle in bundles.values():
            insort(self._bundles, bundle, key=lambda each: each[0].order)

    def take(self, group_ids: Collection[int]) -> list[PendingRequest]:
        """Take out the answers of these groups."""
        taken = [bundle for bundle in self._bundles if bundle[0].group.group_id in group_ids]
        ids = set(map(id, taken))
        self._bundles = [bundle for bundle in self._bundles if id(bundle) not in ids]
        return [ask for bundle in taken for ask in bundle]

    def place(self, slots: Sequence[int], loads: Sequence[int]) -> list[list[PendingRequest]]:
        """Take out the answers that engines should be given now, one list an engine.

        The first in the queue goes where most slots are free. A group is split only over slots that
        are free at once elsewhere: that costs a prefill, and saves waiting. Beyond the slots a
        group stays whole and joins the shortest queue, while that is shorter than `ahead`.

        Args:
            slots: answers each engine writes at once.
            loads: answers it has already, in slots or waiting there.
        """
        free = [count - load for count, load in zip(slots, loads, strict=True)]
        placed: list[list[PendingRequest]] = [[] for _ in slots]
        engines = range(len(slots))
        while self._bundles:
            bundle = self._bundles[0]
            best = max(engines, key=lambda i: (free[i], -i))
            count = min(free[best], len(bundle))
            if count <= 0:
                open_ = [i for i in engines if -free[i] < ahead(slots[i])]
                if not open_:
                    break
                group = bundle[0].group
                with_siblings = [any(a.group is group for a in placed[i]) for i in engines]
                best = min(open_, key=lambda i: (not with_siblings[i], -free[i] / slots[i], i))
                count = len(bundle)
            placed[best] += bundle[:count]
            free[best] -= count
            del bundle[:count]
            if not bundle:
                del self._bundles[0]
        return placed


@dataclass(eq=False)
class EngineClient:
    """An engine of a group, and the answers it was given."""

    engine: PublishedEngine
    name: str
    asks: dict[Key, PendingRequest] = field(default_factory=dict)
    """Given to it, and not back yet."""
    inbox: list[CompletionEvent] = field(default_factory=list)
    offset: int = 0
    """The group's tick less its own: an engine without work does not tick."""
    is_dead: bool = False
    writing: asyncio.Task[None] | None = None

    @property
    def status(self) -> EngineStatus:
        """Its status; of a dead engine the last one."""
        return self.engine.status()

    def receive(self, events: Iterable[CompletionEvent]) -> list[CompletionEvent]:
        """Enter events; ends go to the inbox, `running` ones are returned."""
        if self.is_dead:  # too late: its answers are others' by now
            return []
        running = []
        for event in events:
            shifted = replace(event, tick=event.tick + self.offset) if self.offset else event
            if event.kind == "running":
                self.asks[event.key].learn(event.segment)
                running.append(shifted)
            else:
                del self.asks[event.key]
                self.inbox.append(shifted)
        return running

    async def look(self, until: int | None) -> None:
        """Enter what the engine tells next, up to its own tick `until`."""
        try:
            if until is not None and isinstance(self.engine, RemoteEngine):
                events = await self.engine.events(until, gather=True)
            else:
                events = await self.engine.events(until)
        except TrainingError as fault:
            raise TrainingError(f"{self.name}: {fault}") from fault
        self.receive(events)
        status = self.status
        if events or (until is not None and status.tick >= until):
            return
        if not status.running + status.queued:
            lost, tick = self.asks.values(), status.tick + self.offset
            error = "the engine lost the answer"
            self.inbox += [ask.end("failed", tick, error) for ask in lost]
            self.asks.clear()
        await asyncio.sleep(0)


async def _load(client: EngineClient, update: WeightUpdate) -> None:
    try:
        await client.engine.load_weights(update)
    except PublicationError as error:
        raise PublicationError(f"{client.name}: {error}") from error


class EngineGroup:
    """Implements `Engine` over engines that hold the same weights.

    Args:
        engines: at least one.
        deterministic: events depend on submissions and ticks alone. The death of an engine, or
            weights that reached it damaged, are then raised; else they are logged, and raised when
            no engine is left.
        quantum_ticks: ticks that deterministic engines advance between two looks at all of them.

    Raises:
        ValueError: there are no engines.
    """

    def __init__(
        self,
        engines: Sequence[PublishedEngine],
        deterministic: bool,
        quantum_ticks: int = QUANTUM_TICKS,
    ) -> None:
        if not engines:
            raise ValueError("a group of engines needs at least one")
        self._clients = [EngineClient(engine, f"engine {i}") for i, engine in enumerate(engines)]
        self._deterministic = deterministic
        self.quantum_ticks = quantum_ticks
        self._queue = RequestQueue()
        self._inbox: list[CompletionEvent] = []  # of answers that no engine has
        self._tick = 0
        self._target: int | None = None  # end of the quantum under way
        self._news = asyncio.Event()
        self._fault: BaseException | None = None  # what ended an engine's writing, to be raised
        self._last_death: WorkerError | PublicationError | None = None
        self._old_version: int | None = None  # while new weights come
        self._is_awaited = False  # `events` waits
        self._counted: int | None = None  # tokens at the last `progress`

    @property
    def engines(self) -> dict[str, PublishedEngine]:
        """The engines that live, by name."""
        return {client.name: client.engine for client in self._alive()}

    @property
    def dead(self) -> list[str]:
        """Names of engines that died."""
        return [client.name for client in self._clients if client.is_dead]

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; what an engine refuses is raised here or by `events`."""
        self._queue.add(
            PendingRequest(group, request) for group in groups for request in group.answers
        )
        if not self._deterministic:
            await self._deal()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for events; the free mode takes no notice of `until`.

        When the wait is cancelled the engines go on: to the end of their quantum, or in free mode
        with all they were given.

        Raises:
            WorkerError: an engine died; in free mode, the last one.
        """
        self._counted, self._is_awaited = None, True
        try:
            await (self._advance(until) if self._deterministic else self._listen())
        finally:
            self._is_awaited = False
        return self._take_inboxes()

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events and answers under way; in deterministic mode a quantum ends first.

        Where no `events` waits, `status` tells the tokens of this moment until the next one, so
        that the token account agrees with it though engines write on.
        """
        await self._end_quantum()
        told, running = self._take_inboxes(), list[CompletionEvent]()
        counts = {client.name: client.status.generated_tokens for client in self._clients}

        async def look(client: EngineClient) -> None:
            running.extend(client.receive(await client.engine.progress()))
            # Here, not later: an answer may end while another engine is asked.
            told.extend(client.inbox)
            client.inbox.clear()
            counts[client.name] = client.status.generated_tokens

        await self._each([client for client in self._alive() if client.asks], look)
        # Some died with their engine before it told of all that came.
        begun = (ask for ask in self._queue if ask.deaths and not ask.is_fresh)
        running += [ask.end("running", self._tick) for ask in begun]
        self._counted = None if self._is_awaited else sum(counts.values())
        return [*self._ordered(told), *sorted(running, key=attrgetter("key"))]

    async def abort(self, group_ids: Collection[int]) -> None:
        ids = set(group_ids)
        self._give_back(self._queue.take(ids))
        asked = [client for client in self._alive() if any(key[0] in ids for key in client.asks)]
        for ask in (ask for client in asked for ask in client.asks.values()):
            ask.aborting |= ask.group.group_id in ids

        async def take_back(client: EngineClient) -> None:
            await client.engine.abort(sorted(ids))
            if self._target is None:
                client.receive(await client.engine.events(client.status.tick))

        await self._each(asked, take_back)
        self._news.set()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights; tensors go out in buckets, stored ones are fetched by each engine.

        Raises:
            ValueError: answers are under way, and not all engines take weights live.
            PublicationError: an engine does not hold what was sent; in free mode, the last one.
            WorkerError: as for `events`.
        """
        self._check_may_change()
        await self._end_quantum()
        self._old_version = self._alive()[0].status.weight_version
        try:
            if update.tensors is not None:
                await send(update, self._take_bucket, reject=self._reject)
                update = WeightUpdate(update.version)
            await self._each(self._alive(), partial(_load, update=update))
        finally:
            self._old_version = None
        wrong = [c.name for c in self._alive() if c.status.weight_version != update.version]
        if wrong:
            raise PublicationError(
                f"{', '.join(wrong)} did not take weights of version {update.version}; "
                "look at its lines in the log"
            )

    def _check_may_change(self) -> None:
        are_live = all(client.status.live_updates for client in self._clients)
        check_may_change(self._is_wanted(), are_live)

    async def _take_bucket(self, bucket: Bucket) -> dict[str, int]:
        held: dict[str, int] = {}

        async def take(client: EngineClient) -> None:
            held[client.name] = await client.engine.take_bucket(bucket)

        await self._each(self._alive(), take)
        return held

    async def sleep(self) -> None:
        """Have all engines give their GPU memory back; they must be able to."""
        await self._end_quantum()
        await self._each(self._alive(), lambda client: cast(Any, client.engine).sleep())

    async def wake(self, part: MemoryPart) -> None:
        """Have them take it again."""
        await self._each(self._alive(), lambda client: cast(Any, client.engine).wake(part))

    def _reject(self, name: str, error: PublicationError) -> None:
        """Do without an engine that took damaged weights."""
        if self._deterministic:
            raise error
        self._retire(next(client for client in self._clients if client.name == name), error)

    def status(self) -> EngineStatus:
        """Return sums over the engines; tokens of dead ones count.

        Raises:
            PublicationError: the engines hold different versions.
        """
        every = [client.status for client in self._clients]
        alive = [s for s, c in zip(every, self._clients, strict=True) if not c.is_dead] or every
        versions = sorted({status.weight_version for status in alive})
        if len(versions) > 1 and self._old_version is None:
            raise PublicationError(f"engines hold weights of versions {versions}; publish again")
        version = versions[0] if self._old_version is None else self._old_version
        written = sum(status.generated_tokens for status in every)
        return EngineStatus(
            slots=sum(status.slots for status in alive),
            running=sum(status.running for status in alive),
            queued=sum(status.queued for status in alive) + len(self._queue),
            weight_version=version,
            generated_tokens=written if self._counted is None else self._counted,
            tick=self._tick if self._deterministic else max(status.tick for status in every),
            live_updates=all(status.live_updates for status in alive),
        )

    async def close(self) -> None:
        """Stop the engines' writing, and close those that live."""
        tasks = (client.writing for client in self._clients)
        writing = [task for task in tasks if task is not None and not task.done()]
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        closing = [client.engine.close() for client in self._clients if not client.is_dead]
        for found in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, WorkerError):
                raise found

    # -- deterministic: all together ----------------------------------------------------------

    async def _advance(self, until: int | None) -> None:
        """Run quantum after quantum until something happened, `until`, or the end of all work."""
        while True:
            await self._end_quantum()
            late = until is not None and self._tick >= until
            if self._has_news() or late or not self._is_wanted():
                return
            target = (self._tick // self.quantum_ticks + 1) * self.quantum_ticks
            await self._deal(target if until is None else min(target, until))

    async def _end_quantum(self) -> None:
        """Wait until all engines are at the end of their quantum; they go on if nobody waits."""
        if self._target is None:
            return
        writing = [c.writing for c in self._clients if c.writing is not None]
        under_way = [task for task in writing if not task.done()]
        if under_way and self._fault is None:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
        self._raise_fault()
        # Also when they ran dry before: what follows then begins at a quantum, as after a resume.
        self._tick, self._target = self._target, None

    # -- free: each by itself -----------------------------------------------------------------

    async def _listen(self) -> None:
        """Wait until an engine says something, or nothing is wanted of any."""
        while True:
            self._news.clear()
            if self._has_news():
                return
            self._raise_fault()
            self._alive()
            await self._deal()
            if not self._is_wanted():
                return
            await self._news.wait()

    # -- both ---------------------------------------------------------------------------------

    def _is_wanted(self) -> bool:
        return len(self._queue) > 0 or any(client.asks for client in self._clients)

    def _alive(self) -> list[EngineClient]:
        alive = [client for client in self._clients if not client.is_dead]
        if not alive:
            assert self._last_death is not None
            raise self._last_death
        return alive

    async def _deal(self, until_tick: int | None = None) -> None:
        """Give the engines what they have room for, and have them write, to tick `target`."""
        alive = [client for client in self._clients if not client.is_dead]
        if alive and len(self._queue):
            slots, loads = [c.status.slots for c in alive], [len(c.asks) for c in alive]
            for client, asks in zip(alive, self._queue.place(slots, loads), strict=True):
                if self._deterministic and not client.asks:
                    client.offset = self._tick - client.status.tick
                client.asks.update((ask.key, ask) for ask in asks)
                if asks:
                    await client.engine.submit(requests_of(asks))
        self._target = until_tick
        for client in alive:
            if client.asks and (client.writing is None or client.writing.done()):
                client.writing = asyncio.create_task(self._write(client, until_tick))
                client.writing.add_done_callback(partial(self._wrote, client))

    async def _write(self, client: EngineClient, until_tick: int | None) -> None:
        """Let an engine write to the group's tick `target`, or until it has nothing left."""
        until = None if until_tick is None else until_tick - client.offset
        while client.asks and (until is None or client.status.tick < until):
            await client.look(until)
            if not self._deterministic:
                await self._deal()
                self._news.set()

    def _wrote(self, client: EngineClient, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WorkerError) and not self._deterministic:
            self._retire(client, error)
        elif error is not None:
            self._fault = error
        self._news.set()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    async def _each(
        self, clients: Sequence[EngineClient], do: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Do the same with several engines at once; one that dies of it is retired."""
        found = await asyncio.gather(*map(do, clients), return_exceptions=True)
        for client, error in zip(clients, found, strict=True):
            if isinstance(error, WorkerError | PublicationError) and not self._deterministic:
                self._retire(client, error)
            elif error is not None:
                raise error

    def _retire(
        self,
        client: EngineClient,
        error: WorkerError | PublicationError,
        begun: Collection[Key] | None = None,
    ) -> None:
        """Leave a dead engine's answers to the others, and give back those being aborted.

        Args:
            begun: answers that the engine wrote, and did not only queue; None is all that it had.
        """
        if client.is_dead:
            return
        client.is_dead, self._last_death = True, error
        if client.writing is not None:
            client.writing.cancel()
        asks, client.asks = list(client.asks.values()), {}
        for ask in asks:
            ask.deaths += begun is None or ask.key in begun
        self._give_back([ask for ask in asks if ask.aborting])
        others = [ask for ask in asks if not ask.aborting]
        self._queue.add(ask for ask in others if ask.deaths < _DEATHS)
        fatal = (ask for ask in others if ask.deaths >= _DEATHS)
        self._inbox += [ask.end("failed", self._tick, str(error)) for ask in fatal]
        left = len(self._clients) - len(self.dead)
        log.warning(
            "%s died, %d of %d are left: %s; %d answers go on elsewhere",
            *(client.name, left, len(self._clients), error, len(others)),
        )
        self._news.set()

    def _give_back(self, asks: Sequence[PendingRequest]) -> None:
        self._inbox += [ask.end("aborted", self._tick) for ask in asks]
        self._news.set()

    def _has_news(self) -> bool:
        return bool(self._inbox) or any(client.inbox for client in self._clients)

    def _take_inboxes(self) -> list[CompletionEvent]:
        events = list[CompletionEvent]()
        for inbox in (self._inbox, *(client.inbox for client in self._clients)):
            events += inbox
            inbox.clear()
        return self._ordered(events)

    def _ordered(self, events: list[CompletionEvent]) -> list[CompletionEvent]:
        ticks = self._deterministic  # which engines share then
        return sorted(events, key=lambda event: (event.tick if ticks else 0, event.key))
