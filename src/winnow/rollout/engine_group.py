"""Several engines as one: answers are dealt out by free slots, and outlive an engine.

    submit ──► queue ──place──► engine 0, engine 1, … ──events──► one stream of events
                 ▲                      │ dies
                 └─ behind the last known prefix ◄┘

Deterministic: engines advance together, in quanta of ticks. Answers are dealt out between quanta,
and events come in the order of tick, group and answer, so that nothing depends on how fast an
engine is. Free: a task talks with each engine, and news are told at once; what an engine that died
had not finished goes to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from winnow.errors import PublicationError, WorkerError
from winnow.rollout.engine import (
    EMPTY,
    CompletionEvent,
    Engine,
    EngineStatus,
    GroupRequest,
    WeightUpdate,
)
from winnow.rollout.router import QUANTUM_TICKS, Key, PendingRequest, RequestQueue, requests_of
from winnow.rollout.weights import Receiver, send

log = logging.getLogger(__name__)

T = TypeVar("T")


def _given_back(
    ask: PendingRequest, kind: Literal["aborted", "failed"], tick: int, error: str = ""
) -> CompletionEvent:
    """The end of an answer that no engine reports: with the prefix known of it."""
    return CompletionEvent(*ask.key, kind, ask.request.prefix or EMPTY, "aborted", tick, error)


@dataclass(eq=False)
class EngineClient:
    """An engine of a group, and the answers it was given."""

    engine: Engine
    name: str
    asks: dict[Key, PendingRequest] = field(default_factory=dict)
    """Given to it, and not back yet."""
    inbox: list[CompletionEvent] = field(default_factory=list)
    offset: int = 0
    """The group's tick less its own: an engine without work does not tick."""
    is_dead: bool = False
    sending: asyncio.Task[None] | None = None
    talking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._status = self.engine.status()

    @property
    def status(self) -> EngineStatus:
        """Its status; of a dead engine the last one."""
        if not self.is_dead:
            self._status = self.engine.status()
        return self._status

    async def submit(
        self, asks: Sequence[PendingRequest], before: asyncio.Task[None] | None
    ) -> None:
        """Hand answers to the engine when those before have arrived there."""
        await _ended(before)
        await self.engine.submit(requests_of(asks))

    async def sent(self) -> None:
        """Wait until the engine has all it was given; errors are raised by the sending task."""
        await _ended(self.sending)

    def receive(self, events: Iterable[CompletionEvent]) -> list[CompletionEvent]:
        """Enter events; ends go to the inbox, `running` ones are returned."""
        if self.is_dead:  # too late: its answers are others' by now
            return []
        running = []
        for event in events:
            shifted = replace(event, tick=event.tick + self.offset) if self.offset else event
            key = event.group_id, event.answer
            if event.kind == "running":
                self.asks[key].learn(event.segment)
                running.append(shifted)
            else:
                del self.asks[key]
                self.inbox.append(shifted)
        return running

    def take_inbox(self) -> list[CompletionEvent]:
        """Return the ends of answers that were not taken yet."""
        events, self.inbox = self.inbox, []
        return events

    def check_lost(self) -> None:
        """Fail its answers where the engine, which has told nothing, says that it is idle."""
        sends = self.sending is not None and not self.sending.done()
        status = self.status
        if not sends and not status.running + status.queued:
            lost, tick = self.asks.values(), status.tick + self.offset
            error = "the engine lost the answer"
            self.inbox += [_given_back(ask, "failed", tick, error) for ask in lost]
            self.asks.clear()

    async def run_to(self, tick: int) -> None:
        """Let it write until the group's `tick`, or until it has nothing left.

        Raises:
            WorkerError: it died.
        """
        own = tick - self.offset
        # A `RemoteEngine` tells much in one call where nobody is to act before.
        wait = getattr(self.engine, "events_to", self.engine.events)
        while self.asks:
            events = await wait(own)
            self.receive(events)
            if self.status.tick >= own:
                return
            if not events:
                self.check_lost()
                await asyncio.sleep(0)


class EngineGroup:
    """Implements `Engine` over engines that hold the same weights.

    Args:
        engines: at least one.
        deterministic: events depend on submissions and ticks alone. An engine's death is then
            raised; else it is logged, and raised when none is left.
        quantum_ticks: ticks that deterministic engines advance between two looks at all of them.

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
        self._clients = [EngineClient(engine, f"engine {i}") for i, engine in enumerate(engines)]
        self._deterministic = deterministic
        self.quantum_ticks = quantum_ticks
        self._queue = RequestQueue()
        self._inbox: list[CompletionEvent] = []  # of answers that no engine has
        self._tick = 0
        self._quantum: asyncio.Task[None] | None = None  # outlives a wait that is cancelled
        self._news: asyncio.Future[None] | None = None  # while the free mode waits
        self._fault: Exception | None = None  # what ended a task, to be raised
        self._last_death: WorkerError | None = None
        self._old_version: int | None = None  # while new weights come
        self._counted: int | None = None  # tokens at the last `progress`

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines that live, by name."""
        return {client.name: client.engine for client in self._alive()}

    @property
    def dead(self) -> list[str]:
        """Names of engines that died."""
        return [client.name for client in self._clients if client.is_dead]

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; what an engine refuses is raised by `events`."""
        self._queue.add(
            PendingRequest(group, request) for group in groups for request in group.answers
        )
        if not self._deterministic:
            self._deal()
            self._wake()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for events; the free mode takes no notice of `until`.

        When the wait is cancelled the engines go on: to the end of their quantum, or in free mode
        with all they were given.

        Raises:
            WorkerError: an engine died; in free mode, the last one.
        """
        self._counted = None
        await (self._advance(until) if self._deterministic else self._listen())
        return self._take_inboxes()

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events and answers under way; in deterministic mode a quantum ends first.

        Until the next `events`, `status` tells the tokens that had been written at this moment, so
        that the token account agrees with it though engines write on.
        """
        await self._end_quantum()
        told, running = self._take_inboxes(), list[CompletionEvent]()
        counts = {client.name: client.status.generated_tokens for client in self._clients}

        async def look(client: EngineClient) -> None:
            running.extend(client.receive(await client.engine.progress()))
            # Here, not later: an answer may end while another engine is asked.
            told.extend(client.take_inbox())
            counts[client.name] = client.status.generated_tokens

        await self._each([client for client in self._alive() if client.asks], look)
        self._counted = sum(counts.values())
        return [*self._ordered(told), *sorted(running, key=lambda e: (e.group_id, e.answer))]

    async def abort(self, group_ids: Collection[int]) -> None:
        ids = set(group_ids)
        self._give_back(self._queue.take(ids))
        self._wake()
        held = {
            client.name: [ask for ask in client.asks.values() if ask.key[0] in ids]
            for client in self._alive()
        }
        for ask in (ask for asks in held.values() for ask in asks):
            ask.aborting = True

        async def take_back(client: EngineClient) -> None:
            await client.sent()
            await client.engine.abort(sorted({ask.key[0] for ask in held[client.name]}))
            if self._deterministic and self._quantum is None:
                client.receive(await client.engine.events(client.status.tick))

        await self._each([client for client in self._alive() if held[client.name]], take_back)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights; tensors go out in buckets, to all engines at once.

        Raises:
            ValueError: answers are under way, and not all engines take weights live.
            PublicationError: an engine does not hold what was sent.
            WorkerError: as for `events`.
        """
        alive = self._alive()
        wanted = len(self._queue) or any(client.asks for client in alive)
        if wanted and not all(client.status.live_updates for client in alive):
            raise ValueError("abort what runs before new weights: its cache is of the old ones")
        await self._end_quantum()
        self._old_version = alive[0].status.weight_version
        try:
            if update.tensors is None and update.buckets is None:
                await self._each(self._alive(), lambda c: c.engine.load_weights(update))
            else:
                await send(update, self._ask)
        finally:
            self._old_version = None
        wrong = [c.name for c in self._alive() if c.status.weight_version != update.version]
        if wrong:
            raise PublicationError(
                f"{', '.join(wrong)} did not take weights of version {update.version}; "
                "look at its lines in the log"
            )

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
            masked_probability=sum(status.masked_probability for status in every),
            tick=self._tick if self._deterministic else max(status.tick for status in every),
            live_updates=all(status.live_updates for status in alive),
            healthy=not self.dead and all(status.healthy for status in alive),
        )

    async def close(self) -> None:
        """End all talk, and close the engines that live."""
        await _cancelled([t for c in self._clients for t in (c.sending, c.talking)])
        await _cancelled([self._quantum])
        closing = [client.engine.close() for client in self._clients if not client.is_dead]
        for found in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, WorkerError):
                raise found

    # -- deterministic: all together ----------------------------------------------------------

    async def _advance(self, until: int | None) -> None:
        """Run quantum after quantum until something happened, `until`, or the end of all work."""
        while True:
            await self._end_quantum()
            wanted = len(self._queue) or any(client.asks for client in self._clients)
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
        await asyncio.gather(*(client.sent() for client in self._clients))
        self._raise_fault()
        busy = [client for client in self._clients if client.asks]
        if not busy:  # all was taken back meanwhile
            return
        tasks = [asyncio.create_task(client.run_to(target)) for client in busy]
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
            clients = self._alive()
            self._deal()
            if not any(client.asks for client in clients):
                return
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _talk(self, client: EngineClient) -> None:
        """Enter all events of one engine while it has something to write."""
        while client.asks:
            await client.sent()
            events = await client.engine.events()
            client.receive(events)
            if not events:
                client.check_lost()
                await asyncio.sleep(0)
            self._deal()
            self._wake()

    # -- both ---------------------------------------------------------------------------------

    def _alive(self) -> list[EngineClient]:
        alive = [client for client in self._clients if not client.is_dead]
        if not alive:
            assert self._last_death is not None
            raise self._last_death
        return alive

    def _deal(self) -> None:
        """Give the engines what they have room for, and see that it is sent."""
        alive = [client for client in self._clients if not client.is_dead]
        if alive and len(self._queue):
            slots, loads = [c.status.slots for c in alive], [len(c.asks) for c in alive]
            for client, asks in zip(alive, self._queue.place(slots, loads), strict=True):
                if not asks:
                    continue
                if self._deterministic and not client.asks:
                    client.offset = self._tick - client.status.tick
                client.asks.update((ask.key, ask) for ask in asks)
                client.sending = self._task(client, client.submit, asks, client.sending)
        for client in alive if not self._deterministic else ():
            if client.asks and (client.talking is None or client.talking.done()):
                client.talking = self._task(client, self._talk, client)

    def _task(
        self, client: EngineClient, work: Callable[..., Awaitable[None]], *args: Any
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self._guarded(client, work, *args))

    async def _guarded(
        self, client: EngineClient, work: Callable[..., Awaitable[None]], *args: Any
    ) -> None:
        """Work with a client; the next wait for events raises what goes wrong."""
        try:
            await work(*args)
        except WorkerError as error:
            if self._deterministic:
                self._fault = error
            else:
                self._bury(client, error)
        except Exception as error:
            self._fault = error
        self._wake()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    async def _each(
        self, clients: Sequence[EngineClient], do: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Do the same with several engines at once; one that dies of it is buried."""
        found = await asyncio.gather(*map(do, clients), return_exceptions=True)
        for client, error in zip(clients, found, strict=True):
            if isinstance(error, WorkerError):
                self._bury(client, error)
            elif error is not None:
                raise error

    async def _ask(self, do: Callable[[Receiver], Awaitable[T]]) -> Mapping[str, T]:
        """Ask all engines that live the same, for `weights.send`."""
        answers: dict[str, T] = {}

        async def one(client: EngineClient) -> None:
            assert isinstance(client.engine, Receiver), f"{client.name} takes no buckets"
            answers[client.name] = await do(client.engine)

        await self._each(self._alive(), one)
        return answers

    def _bury(self, client: EngineClient, error: WorkerError) -> None:
        """Hand a dead engine's answers to the others, and give back those being aborted."""
        if self._deterministic:
            raise error
        if client.is_dead:
            return
        client.is_dead, self._last_death = True, error
        for task in (client.sending, client.talking):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        asks, client.asks = list(client.asks.values()), {}
        self._give_back([ask for ask in asks if ask.aborting])
        others = [ask for ask in asks if not ask.aborting]
        self._queue.add(others)
        left = len(self._clients) - len(self.dead)
        log.warning(
            "%s died, %d of %d are left: %s; %d answers go on elsewhere",
            *(client.name, left, len(self._clients), error, len(others)),
        )
        self._deal()
        self._wake()

    def _give_back(self, asks: Sequence[PendingRequest]) -> None:
        self._inbox += [_given_back(ask, "aborted", self._tick) for ask in asks]

    def _has_news(self) -> bool:
        return bool(self._inbox) or any(client.inbox for client in self._clients)

    def _take_inboxes(self) -> list[CompletionEvent]:
        events, self._inbox = self._inbox, []
        for client in self._clients:
            events += client.take_inbox()
        return self._ordered(events)

    def _ordered(self, events: list[CompletionEvent]) -> list[CompletionEvent]:
        ticks = self._deterministic  # which engines share then
        return sorted(events, key=lambda e: (e.tick if ticks else 0, e.group_id, e.answer))


async def _ended(task: asyncio.Task[Any] | None) -> None:
    """Wait until a task is over, whatever became of it."""
    if task is not None and not task.done():
        await asyncio.wait([task])


async def _cancelled(tasks: Sequence[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until they are gone."""
    under_way = [task for task in tasks if task is not None and not task.done()]
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
