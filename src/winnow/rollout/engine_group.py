"""Several engines as one: answers are assigned by free slots, and survive the death of an engine.

    submit ──► queue ──place──► engine 0, engine 1, … ──events──► one stream of events
                 ▲                      │ dies
                 └─ with the last known prefix ◄──┘

Deterministic mode: engines advance together, in quanta of ticks. Answers are assigned between
quanta, and events are ordered by tick, group and answer, so that nothing depends on an engine's
speed. Free mode: engines run independently, events are returned at once, and unfinished answers of
a dead engine move to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import cast

from winnow.errors import PublicationError, TrainingError, WorkerError
from winnow.rollout.engine import (
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    MemoryPart,
    PublishedEngine,
    SleepingEngine,
    check_update_allowed,
)
from winnow.rollout.remote_engine import RemoteEngine
from winnow.rollout.request_queue import Key, RequestQueue, TrackedAnswer, merge_requests
from winnow.rollout.weights import Bucket, WeightUpdate, send_weights

log = logging.getLogger(__name__)

QUANTUM_TICKS = 8
"""Least number of ticks between two polls of all engines.

Polling takes 1 to 3 ms an engine and waits for the slowest; eight ticks of a model worth
distributing take 50 ms and more. A slot may be empty, and an event unseen, for a quantum.
"""
_POLLS = 32
_DEATHS = 5
"""Deaths of engines in a row without a new token of an answer, after which it fails."""


def quantum_for(max_tokens: int) -> int:
    """Return the ticks between two polls for answers of at most `max_tokens`.

    About `_POLLS` polls of a longest answer: fewer slots end in between than may wait in an engine
    (`max_waiting`), unless nearly all answers are short.
    """
    return max(QUANTUM_TICKS, max_tokens // _POLLS)


@dataclass(eq=False)
class EngineClient:
    """An engine of a group, and its answers."""

    engine: PublishedEngine
    name: str
    answers: dict[Key, TrackedAnswer] = field(default_factory=dict)
    """Submitted to it, and not ended yet."""
    retained: set[Key] = field(default_factory=set)
    """Answers that it has ended last, and that may be continued with their keys."""
    inbox: list[CompletionEvent] = field(default_factory=list)
    tick_offset: int = 0
    """The group's tick minus the engine's, which stands still without work."""
    is_dead: bool = False
    task: asyncio.Task[None] | None = None
    finished: int = 0
    """Answers that it has finished."""
    is_unchecked: bool = False
    """True for a replacement whose first weights are not checked yet: it gets no answers."""
    attempt: int = 0
    """Number of replacements in a row, up to this one, without a finished answer in between."""
    earlier_tokens: int = 0
    """Tokens that the engines before it generated."""

    @property
    def status(self) -> EngineStatus:
        """The engine's status, tokens of those before it included; the last one if it is dead."""
        status = self.engine.status()
        if not self.earlier_tokens:
            return status
        return replace(status, generated_tokens=status.generated_tokens + self.earlier_tokens)

    def receive(self, events: Iterable[CompletionEvent]) -> list[CompletionEvent]:
        """Process events: put ends into the inbox, and return `running` ones."""
        if self.is_dead:  # its answers have moved to other engines
            return []
        running, offset = [], self.tick_offset
        for event in events:
            shifted = replace(event, tick=event.tick + offset) if offset else event
            if event.kind == "running":
                self.answers[event.key].extend_prefix(event.segment)
                running.append(shifted)
            else:
                if self.answers.pop(event.key).request.retain_cache and event.kind == "finished":
                    self.retained.add(event.key)
                self.inbox.append(shifted)
                self.finished += event.kind == "finished"
        return running

    async def poll(self, until: int | None) -> None:
        """Wait for the engine's next events, up to its tick `until`, and process them."""
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
            lost, tick = self.answers.values(), status.tick + self.tick_offset
            error = "the engine lost the answer"
            self.inbox += [answer.end_event("failed", tick, error) for answer in lost]
            self.answers.clear()
        await asyncio.sleep(0)


async def _load_weights(client: EngineClient, update: WeightUpdate) -> None:
    try:
        await client.engine.load_weights(update)
        client.retained.clear()
    except PublicationError as error:
        raise PublicationError(f"{client.name}: {error}") from error


class EngineGroup:
    """Implements `Engine` over engines that hold the same weights.

    Args:
        engines: at least one.
        deterministic: events depend on submissions and ticks alone. Deaths of engines and damaged
            weights are then raised; else they are logged, and raised when no engine is left
            (`replacement` has a group that starts such engines again).
        quantum_ticks: ticks between two polls of deterministic engines.

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
            raise ValueError("an engine group needs at least one engine")
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
        """The live engines, by name."""
        return {client.name: client.engine for client in self._alive()}

    @property
    def dead(self) -> list[str]:
        """Names of engines that died."""
        return [client.name for client in self._clients if client.is_dead]

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups; an engine's refusal is raised here or by `events`."""
        self._queue.add(
            TrackedAnswer(group, request) for group in groups for request in group.answers
        )
        if not self._deterministic:
            await self._dispatch()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Wait for events; the free mode ignores `until`.

        If the wait is cancelled, engines continue to the end of their quantum, or in free mode to
        the end of their answers.

        Raises:
            WorkerError: an engine died; in free mode, the last one.
        """
        self._counted, self._is_awaited = None, True
        try:
            await (self._advance(until) if self._deterministic else self._wait_for_news())
        finally:
            self._is_awaited = False
        return self._drain_inboxes()

    async def progress(self) -> Sequence[CompletionEvent]:
        """Return events and running answers; in deterministic mode, at the end of the quantum.

        Unless an `events` call waits, `status` has the tokens of this moment until the next call,
        so that the token account agrees with it while engines continue.
        """
        await self._finish_quantum()
        told, running = self._drain_inboxes(), list[CompletionEvent]()
        counts = {client.name: client.status.generated_tokens for client in self._clients}

        async def poll(client: EngineClient) -> None:
            running.extend(client.receive(await client.engine.progress()))
            # At once: an answer may end while another engine is polled.
            told.extend(client.inbox)
            client.inbox.clear()
            counts[client.name] = client.status.generated_tokens

        await self._for_each([client for client in self._alive() if client.answers], poll)
        # Answers of dead engines, which are queued again.
        begun = (answer for answer in self._queue if answer.deaths and not answer.is_fresh)
        running += [answer.end_event("running", self._tick) for answer in begun]
        self._counted = None if self._is_awaited else sum(counts.values())
        return [*self._sort_events(told), *sorted(running, key=attrgetter("key"))]

    async def abort(self, group_ids: Collection[int]) -> None:
        ids = set(group_ids)
        self._report_aborted(self._queue.remove(ids))
        asked = [c for c in self._alive() if any(k[0] in ids for k in (*c.answers, *c.retained))]
        for answer in (answer for client in asked for answer in client.answers.values()):
            answer.aborting |= answer.group.group_id in ids

        async def take_back(client: EngineClient) -> None:
            client.retained = {key for key in client.retained if key[0] not in ids}
            await client.engine.abort(sorted(ids))
            if self._target is None:
                client.receive(await client.engine.events(client.status.tick))

        await self._for_each(asked, take_back)
        self._news.set()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load new weights: tensors are sent in buckets, stored ones are fetched by each engine.

        Raises:
            ValueError: answers are running, and not all engines have live updates.
            PublicationError: an engine has other weights than sent; in free mode, the last one.
            WorkerError: as for `events`.
        """
        self._check_update_allowed()
        await self._finish_quantum()
        oldest = min(self._alive(), key=attrgetter("is_unchecked"))
        self._old_version = oldest.status.weight_version
        try:
            if update.tensors is not None:
                await send_weights(update, self._take_bucket, reject=self._reject)
                update = WeightUpdate(update.version)
            await self._for_each(self._alive(), partial(_load_weights, update=update))
        finally:
            self._old_version = None
        wrong = [c.name for c in self._alive() if c.status.weight_version != update.version]
        if wrong:
            raise PublicationError(
                f"{', '.join(wrong)} did not load weights of version {update.version}; "
                "see its lines in the log"
            )

    def _check_update_allowed(self) -> None:
        are_live = all(client.status.live_updates for client in self._clients)
        check_update_allowed(self._has_work(), are_live)

    async def _take_bucket(self, bucket: Bucket) -> dict[str, int]:
        held: dict[str, int] = {}

        async def take(client: EngineClient) -> None:
            held[client.name] = await client.engine.take_bucket(bucket)

        await self._for_each(self._alive(), take)
        return held

    async def sleep(self) -> None:
        """Have all engines free their GPU memory; all must support it."""
        await self._finish_quantum()
        await self._for_each(self._alive(), lambda c: cast(SleepingEngine, c.engine).sleep())

    async def wake(self, part: MemoryPart) -> None:
        """Have all engines allocate their GPU memory again."""
        await self._for_each(self._alive(), lambda c: cast(SleepingEngine, c.engine).wake(part))

    def _reject(self, name: str, error: PublicationError) -> None:
        """Retire an engine with damaged weights; in deterministic mode, raise."""
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
        """Cancel the engines' tasks, and close the live engines."""
        tasks = (client.task for client in self._clients)
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
        """Run quantum after quantum until there are events, `until`, or no work."""
        while True:
            await self._finish_quantum()
            late = until is not None and self._tick >= until
            if self._has_events() or late or not self._has_work():
                return
            target = (self._tick // self.quantum_ticks + 1) * self.quantum_ticks
            await self._dispatch(target if until is None else min(target, until))

    async def _finish_quantum(self) -> None:
        """Wait until all engines are at the end of the quantum."""
        if self._target is None:
            return
        writing = [c.task for c in self._clients if c.task is not None]
        under_way = [task for task in writing if not task.done()]
        if under_way and self._fault is None:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_EXCEPTION)
        self._raise_fault()
        # Also if engines became idle before: work then starts at a quantum, as after a resume.
        self._tick, self._target = self._target, None

    # -- free: each by itself -----------------------------------------------------------------

    async def _wait_for_news(self) -> None:
        """Wait until an engine has events, or there is no work."""
        while True:
            self._news.clear()
            if self._has_events():
                return
            self._raise_fault()
            self._alive()
            await self._dispatch()
            if not self._has_work():
                return
            await self._news.wait()

    # -- both ---------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return len(self._queue) > 0 or any(client.answers for client in self._clients)

    def _alive(self) -> list[EngineClient]:
        alive = [client for client in self._clients if not client.is_dead]
        if not alive:
            assert self._last_death is not None
            raise self._last_death
        return alive

    async def _dispatch(self, until_tick: int | None = None) -> None:
        """Submit queued answers to engines with room, and run all engines to a tick."""
        alive = [c for c in self._clients if not (c.is_dead or c.is_unchecked)]
        if alive and len(self._queue):
            slots, loads = [c.status.slots for c in alive], [len(c.answers) for c in alive]
            placed = self._queue.assign(slots, loads, [c.retained for c in alive])
            for client, answers in zip(alive, placed, strict=True):
                for other in alive if answers else []:
                    other.retained.difference_update(answer.key for answer in answers)
                if self._deterministic and not client.answers:
                    client.tick_offset = self._tick - client.status.tick
                client.answers.update((answer.key, answer) for answer in answers)
                if answers:
                    await client.engine.submit(merge_requests(answers))
        self._target = until_tick
        for client in alive:
            if client.answers and (client.task is None or client.task.done()):
                client.task = asyncio.create_task(self._run_client(client, until_tick))
                client.task.add_done_callback(partial(self._on_client_done, client))

    async def _run_client(self, client: EngineClient, until_tick: int | None) -> None:
        """Run an engine to a tick of the group, or until it has no answers."""
        until = None if until_tick is None else until_tick - client.tick_offset
        while client.answers and (until is None or client.status.tick < until):
            await client.poll(until)
            if not self._deterministic:
                await self._dispatch()
                self._news.set()

    def _on_client_done(self, client: EngineClient, task: asyncio.Task[None]) -> None:
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

    async def _for_each(
        self, clients: Sequence[EngineClient], do: Callable[[EngineClient], Awaitable[None]]
    ) -> None:
        """Run a function on several engines concurrently; in free mode, retire those that die."""
        found = await asyncio.gather(*map(do, clients), return_exceptions=True)
        for client, error in zip(clients, found, strict=True):
            if isinstance(error, WorkerError | PublicationError) and not self._deterministic:
                self._retire(client, error)
            elif error is not None:
                raise error

    def _retire(self, client: EngineClient, error: WorkerError | PublicationError) -> None:
        """Queue a dead engine's answers again, and report those being aborted."""
        if client.is_dead:
            return
        begun = self._started_keys(client)
        client.is_dead, self._last_death = True, error
        if client.task is not None:
            client.task.cancel()
        answers, client.answers = list(client.answers.values()), {}
        for answer in answers:
            answer.deaths += answer.key in begun
        self._report_aborted([answer for answer in answers if answer.aborting])
        others = [answer for answer in answers if not answer.aborting]
        self._queue.add(answer for answer in others if answer.deaths < _DEATHS)
        fatal = (answer for answer in others if answer.deaths >= _DEATHS)
        self._inbox += [answer.end_event("failed", self._tick, str(error)) for answer in fatal]
        left = len(self._clients) - len(self.dead)
        log.warning(
            "%s died, %d of %d engines remain: %s; %d answers continue on them",
            *(client.name, left, len(self._clients), error, len(others)),
        )
        self._on_retired(client, error)
        self._news.set()

    def _started_keys(self, client: EngineClient) -> Collection[Key]:
        """Return the answers that a dying engine may have started: all that it has."""
        return set(client.answers)

    def _on_retired(self, client: EngineClient, error: WorkerError | PublicationError) -> None:
        """Do what a kind of group does about a dead engine: here nothing."""

    def _report_aborted(self, answers: Sequence[TrackedAnswer]) -> None:
        self._inbox += [answer.end_event("aborted", self._tick) for answer in answers]
        self._news.set()

    def _has_events(self) -> bool:
        return bool(self._inbox) or any(client.inbox for client in self._clients)

    def _drain_inboxes(self) -> list[CompletionEvent]:
        events = list[CompletionEvent]()
        for inbox in (self._inbox, *(client.inbox for client in self._clients)):
            events += inbox
            inbox.clear()
        return self._sort_events(events)

    def _sort_events(self, events: list[CompletionEvent]) -> list[CompletionEvent]:
        ticks = self._deterministic  # only then engines share ticks
        return sorted(events, key=lambda event: (event.tick if ticks else 0, event.key))
