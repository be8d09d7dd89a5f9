"""An engine in another process, as the driver sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from winnow.rollout.detached_events import attach_arrays
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest, WeightUpdate
from winnow.rollout.weights import Bucket, Receiver, WeightReceipt, send
from winnow.rollout.worker import Reply
from winnow.types import FloatArray, IntArray
from winnow.workers.array_refs import SplitResult

PATIENCE_S = 1.0
"""A call for events returns after so long without any: the status that the driver knows is then
hardly older, and neither the sampler's watchdog nor the workers' takes a long answer for a hang."""
T = TypeVar("T")


class Workers(Protocol):
    """What of `cluster.WorkerGroup` an engine needs."""

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a worker."""
        ...


class RemoteEngine:
    """Implements `Engine` over a worker that is an `EngineWorker`.

    A call for events whose wait is cancelled goes on in the worker, to the tick it was given; what
    it brings is kept for the next one. All methods raise WorkerError when the worker fails.

    Args:
        workers: the group it belongs to. A group fails as a whole: engines that may die one by one
            are a group each.
        rank: which of them.
        status: how it stands; `connect` asks for it.
    """

    def __init__(self, workers: Workers, rank: int, status: EngineStatus) -> None:
        self._workers, self._rank = workers, rank
        self._status, self._newest = status, 0
        self._heard = 0  # the newest reply about events: only the newest of all says "idle"
        self._inbox: list[tuple[int, Sequence[CompletionEvent]]] = []  # by serial of the reply
        self._listening: asyncio.Task[None] | None = None
        self._listened = 0
        self._looking = asyncio.Lock()  # held while `progress` waits for its reply

    @classmethod
    async def connect(cls, workers: Workers, rank: int = 0) -> RemoteEngine:
        """An engine over a worker that has been started."""
        reply: Reply = await workers.call_rank(rank, "ask", "")
        return cls(workers, rank, reply.status)

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """See `Engine.submit`; what the engine refuses is a WorkerError."""
        await self._ask("submit", list(groups))

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """See `Engine.events`."""
        return await self._events(until)

    async def events_to(
        self, tick: int, groups: Sequence[GroupRequest]
    ) -> Sequence[CompletionEvent]:
        """Submit groups; all that happens up to a tick, or some of it where that takes long.

        One call, where `submit` and `events` would be two and more.
        """
        if self._listening is not None or self._inbox:  # by a call that knew nothing of them
            await self.submit(groups)
            groups = ()
        return await self._events(tick, list(groups))

    async def _events(
        self, until: int | None, groups: list[GroupRequest] | None = None
    ) -> Sequence[CompletionEvent]:
        """Wait for events; for all up to `until` where there are groups to submit, or none."""
        while not self._inbox:
            await self._listen(until, groups)
            groups = groups and []
            status = self._status
            if until is not None and status.tick >= until:
                break
            is_idle = not status.running + status.queued and self._heard == self._newest
            if is_idle and not self._inbox:
                async with self._looking:  # a look may have been told what this was not
                    break
        return self._take_inbox()

    async def progress(self) -> Sequence[CompletionEvent]:
        """See `Engine.progress`."""
        async with self._looking:
            while True:
                reply = await self._ask("progress")
                if self._listening is not None and reply.listened >= self._listened:
                    await asyncio.wait([self._listening])  # it was answered before
                if reply.serial == self._newest:
                    return [*self._take_inbox(), *reply.value]
                # Later news were faster. The look is out of date; ends in it still count.
                ends = [event for event in reply.value if event.kind != "running"]
                if ends:
                    self._inbox.append((reply.serial, ends))

    async def abort(self, group_ids: Collection[int]) -> None:
        """See `Engine.abort`."""
        await self._ask("abort", list(group_ids))

    async def load_weights(self, update: WeightUpdate) -> None:
        """See `Engine.load_weights`; tensors go in buckets.

        Raises:
            ValueError: answers run, and the engine takes no weights live.
            PublicationError: it does not hold what was sent.
        """
        self._check_may_change()
        if update.tensors is None and update.buckets is None:
            await self._ask("load_weights", update)
        else:
            await send(update, self._ask_alone)

    async def begin_update(self, version: int) -> None:
        """See `weights.Receiver`.

        Raises:
            ValueError: as for `load_weights`.
        """
        self._check_may_change()
        await self._ask("begin_update", version)

    async def take_bucket(self, bucket: Bucket) -> int:
        """See `weights.Receiver`."""
        return int((await self._ask("take_bucket", bucket)).value)

    async def finish_update(self) -> WeightReceipt:
        """See `weights.Receiver`."""
        held: WeightReceipt = (await self._ask("finish_update")).value
        return held

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `TorchEngine.logprobs_of`."""
        found: list[FloatArray] = (
            await self._ask("logprobs_of", list(sequences), temperature)
        ).value
        return found

    def status(self) -> EngineStatus:
        """See `Engine.status`: as the newest reply told it."""
        return self._status

    async def close(self) -> None:
        """Give back what the engine holds; the worker stays."""
        if self._listening is not None:
            self._listening.cancel()
        await self._ask("close")

    def _check_may_change(self) -> None:
        status = self._status
        if (status.running or status.queued) and not status.live_updates:
            raise ValueError("abort what runs before new weights: its cache is of the old ones")

    async def _ask(self, method: str, *args: Any) -> Reply:
        reply = _whole(await self._workers.call_rank(self._rank, "ask", method, *args))
        self._see(reply)
        return reply

    async def _ask_alone(self, do: Callable[[Receiver], Awaitable[T]]) -> Mapping[str, T]:
        return {f"engine {self._rank}": await do(self)}

    def _see(self, reply: Reply) -> None:
        if reply.serial > self._newest:
            self._status, self._newest = reply.status, reply.serial

    async def _listen(self, until: int | None, groups: list[GroupRequest] | None) -> None:
        """Wait for one call for events, which may be one that was begun before."""
        if self._listening is None or self._listening.cancelled():
            self._listened += 1
            self._listening = asyncio.create_task(self._hear(until, groups))
            self._listening.add_done_callback(_seen)  # by whoever asks next, if anyone does
        task = self._listening
        try:
            await asyncio.shield(task)
        finally:
            if task.done():
                self._listening = None

    async def _hear(self, until: int | None, groups: list[GroupRequest] | None) -> None:
        asked = self._rank, "events", until, PATIENCE_S, groups
        reply = _whole(await self._workers.call_rank(*asked))
        self._see(reply)
        self._heard = reply.serial
        if reply.value:
            self._inbox.append((reply.serial, reply.value))

    def _take_inbox(self) -> list[CompletionEvent]:
        taken, self._inbox = sorted(self._inbox, key=lambda entry: entry[0]), []
        return [event for _, events in taken for event in events]


def _whole(said: Reply | SplitResult) -> Reply:
    """A reply with its events' arrays, or with what stands for them."""
    if isinstance(said, Reply):
        return said
    reply: Reply = said.told
    return replace(reply, value=attach_arrays(reply.value, said.kept))


def _seen(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
