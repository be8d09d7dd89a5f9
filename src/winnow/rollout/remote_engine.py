"""An engine in a worker's process: `EngineWorker` runs it there, `RemoteEngine` calls it.

    RemoteEngine ── call(method, arguments, unsent answers) ──────► EngineWorker ─► Engine
                 ◄── Reply(value, events, status), arrays apart ───

The worker serves one call after the other; a new call ends a wait for events. Every reply has all
events until then and the engine's status, so that the driver never waits for the status. Replies
may arrive in any order; the driver processes them in the order of the calls, so that its state is
one that the worker had.

Such an engine implements `StoringEngine`, and has a subclass of `EngineWorker` that makes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from winnow.errors import WorkerError
from winnow.observe.profile import StepProfiler
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    ImageLists,
    MemoryPart,
    StoringEngine,
    check_may_sleep,
    check_update_allowed,
)
from winnow.rollout.weights import Bucket, WeightUpdate, send_weights
from winnow.types import FloatArray, IntArray, Segment
from winnow.workers.array_refs import ArrayBlock, ArrayRef, SplitResult

if TYPE_CHECKING:
    from winnow.config.model import LoraAdapter

log = logging.getLogger(__name__)

_WORK = {
    **{"events": "write", "progress": "write", "": "write"},
    **dict.fromkeys(("take_bucket", "take_stored", "load_weights"), "publish"),
    "logprobs_of": "canary",
}
"""Names of methods on a timeline."""

PATIENCE_S = 1.0
"""Longest wait of a call for events: it bounds the age of the driver's status, and keeps the
watchdogs of sampler and workers from taking a long answer for a hang."""


@dataclass(frozen=True, eq=False)
class Reply:
    """The result of a call, with the engine's events and status at that moment."""

    value: Any
    events: Sequence[CompletionEvent]
    """All events since the last reply; in a reply to `progress`, then `running` ones."""
    status: EngineStatus


class EngineWorker:
    """The worker of a `RemoteEngine`; a subclass makes the engine, which has decode ticks."""

    def __init__(self, engine: StoringEngine, profiler: StepProfiler | None = None) -> None:
        self._engine, self._profiler = engine, profiler
        self._calls = self._replies = self._unsubmitted = 0
        self._turn = asyncio.Lock()  # fair
        self._patience: asyncio.Timeout | None = None  # of the wait under way
        self._wanted: dict[int, asyncio.Future[CompletionEvent]] = {}  # by `write_answer`, by group
        self._writing: asyncio.Task[None] | None = None

    @property
    def progress(self) -> int:
        """A count that increases with every token, bucket of weights and reply."""
        status = self._engine.status()
        return self._replies + status.generated_tokens + status.buckets

    async def call(
        self, method: str, args: tuple[Any, ...] = (), groups: Sequence[GroupRequest] = ()
    ) -> Reply | SplitResult:
        """Submit groups, then call a method of the engine; "" calls none."""
        self._calls += 1
        number = self._calls
        self._unsubmitted += len(groups)
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time())
        async with self._turn:
            if groups:
                await self._engine.submit(
                    [replace(g, answers=tuple(map(_fetch_prefix, g.answers))) for g in groups]
                )
                self._unsubmitted -= len(groups)
            value: Any = None
            events: list[CompletionEvent] = []
            if method == "events":
                if number == self._calls:
                    await self._wait_for_events(events, *args)
            elif method == "progress":
                events += await self._engine.progress()
            elif method == "take_stored":
                update, patience_s = args
                value = await self._engine.take_stored(
                    update, patience_s, lambda: self._unsubmitted > 0
                )
            elif method:
                value = await getattr(self._engine, method)(*args)
            # Remaining events, without another tick.
            events += await self._engine.events(self._engine.status().tick)
            self._replies += 1
            reply = Reply(value, events, self._engine.status())
            if self._profiler is not None:
                self._profiler.move_to(reply.status.weight_version + 1)
        if not events:
            return reply
        detached, block, extras = _detach_arrays(events)
        return SplitResult(replace(reply, events=detached), block, extras)

    async def write_answer(self, group: GroupRequest) -> CompletionEvent:
        """Generate the only answer of a group, concurrently; not to be mixed with `call`."""
        await self._engine.submit([group])
        wanted: asyncio.Future[CompletionEvent] = asyncio.get_running_loop().create_future()
        self._wanted[group.group_id] = wanted
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._serve_writes())
        return await wanted

    async def _serve_writes(self) -> None:
        try:
            while self._wanted:
                events = await self._engine.events()
                assert events, "the engine lost an answer"
                for event in events:
                    self._wanted.pop(event.group_id).set_result(event)
        except Exception as error:  # raised by the pending calls
            for wanted in self._wanted.values():
                wanted.set_exception(error)
            self._wanted.clear()

    def close(self) -> None:
        """Write the open profile."""
        if self._profiler is not None:
            self._profiler.close()

    async def _wait_for_events(
        self, found: list[CompletionEvent], until: int | None, patience_s: float, gather: bool
    ) -> None:
        """Wait as `Engine.events` does, `patience_s` at most; gather all up to `until` if asked."""
        try:
            async with asyncio.timeout(patience_s) as self._patience:
                while True:
                    events = await self._engine.events(until)
                    found += events
                    if not (gather and events) or self._engine.status().tick == until:
                        break
        except TimeoutError:
            pass
        finally:
            self._patience = None


def _detach_arrays(
    events: Sequence[CompletionEvent],
) -> tuple[list[CompletionEvent], ArrayBlock, ArrayBlock | None]:
    """Concatenate token ids (int32) and log-probs (fp32) of events in a block, extras in another.

    Two arrays are cheaper to send than two per answer, and may stay on this node. An extra that
    several answers share is sent once. Readers of tokens fetch no extras.
    """
    segments = [event.segment for event in events]
    ids = np.concatenate([np.asarray(s.token_ids, np.int32) for s in segments])
    logprobs = np.concatenate([np.asarray(s.logprobs, np.float32) for s in segments])
    extras = [_distinct(events, name) for name in sorted({n for e in events for n in e.extras})]
    block, detached, stop = ArrayBlock((ids, logprobs)), list[CompletionEvent](), 0
    more, places = ArrayBlock(tuple(map(np.concatenate, extras))), dict[int, Any]()
    for index, arrays in enumerate(extras):
        for each, end in zip(arrays, np.cumsum([*map(len, arrays)]).tolist(), strict=True):
            places[id(each)] = ArrayRef(more, index, end - len(each), end, each.dtype)
    for event, segment in zip(events, segments, strict=True):
        start, stop = stop, stop + len(segment)
        bare = Segment(
            cast("IntArray", ArrayRef(block, 0, start, stop, np.int64)),
            cast("FloatArray", ArrayRef(block, 1, start, stop, np.float32)),
            segment.spans,
            segment.source,
        )
        told = {name: places[id(each)] for name, each in event.extras.items()}
        detached.append(replace(event, segment=bare, extras=told))
    return detached, block, more if extras else None


def _distinct(events: Sequence[CompletionEvent], name: str) -> list[NDArray[Any]]:
    """Return the distinct extras of events with one name."""
    arrays = (event.extras[name] for event in events if name in event.extras)
    return list({id(each): each for each in arrays}.values())


def _fetch_prefix(answer: AnswerRequest) -> AnswerRequest:
    """Fetch an answer's prefix; drop one that was lost with its node."""
    prefix = answer.prefix
    if prefix is None or not isinstance(cast("object", prefix.token_ids), ArrayRef):
        return answer
    try:
        ids, logprobs = np.asarray(prefix.token_ids), np.asarray(prefix.logprobs)
    except WorkerError as error:
        log.warning("an answer restarts without its prefix: %s", error)
        return replace(answer, prefix=None)
    return replace(answer, prefix=replace(prefix, token_ids=ids, logprobs=logprobs))


class TorchEngineWorker(EngineWorker):
    """An `EngineWorker` with a `TorchEngine`.

    Args:
        rank: a `workers.RankInfo`; its `device_index` names the CUDA device, None the CPU.
        model: a Hugging Face folder.
        dtype: of the weights; must be that of published ones.
        tokenizer: folder of the tokenizer, for stop strings.
        adapter: adapter to add to the model; publications then have its weights only.
        profiler: of this process.
        options: of `TorchEngine`.

    Raises:
        ModelError: the model is not usable.
    """

    def __init__(
        self,
        rank: Any,
        *,
        model: str,
        dtype: Literal["float32", "bfloat16"],
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        adapter: LoraAdapter | None = None,
        profiler: StepProfiler | None = None,
        **options: Any,
    ) -> None:
        import torch

        from winnow.models.causal_lm import load_causal_lm
        from winnow.models.folders import torch_dtype
        from winnow.rollout.embedded.torch_engine import TorchEngine

        device = torch.device("cpu" if rank.device_index is None else f"cuda:{rank.device_index}")
        made = load_causal_lm(model, torch_dtype(dtype), device, trust_remote_code)
        if adapter is not None:
            from winnow.models.lora import add_lora

            add_lora(made, adapter, seed=0)  # the first publication comes before the first token
        decode = None if tokenizer is None else load_decoder(tokenizer, trust_remote_code)
        super().__init__(TorchEngine(made, decode=decode, **options), profiler)


def load_decoder(tokenizer: str, trust_remote_code: bool) -> Callable[[Sequence[int]], str]:
    """Return the function of a tokenizer that decodes token ids, special tokens included."""
    from transformers import AutoTokenizer

    from winnow.models.fetch import local_folder

    folder = local_folder(tokenizer)
    read = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return lambda ids: cast("str", read.decode(ids, skip_special_tokens=False))


class Workers(Protocol):
    """The part of `workers.WorkerGroup` that an engine needs."""

    async def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a worker; calls start in their order."""


class RemoteEngine:
    """Implements `PublishedEngine` over a worker that is an `EngineWorker`.

    Submitted answers are sent with the next call, or at once if a wait is pending. If `events` is
    cancelled, its call continues in the worker up to its tick, and its events are returned by the
    next one. All methods raise WorkerError if the worker fails. An engine's refusal of answers is
    raised by the call that sent them.

    Args:
        workers: a group of one worker; a group fails as a whole.
        first_reply: the worker's reply to `call("")`.
    """

    def __init__(self, workers: Workers, first_reply: Reply) -> None:
        self._workers, self._newest = workers, first_reply
        self._unsent: list[GroupRequest] = []
        self._on_way = 0  # submitted answers that no status counts yet
        self._inbox: list[CompletionEvent] = []
        self._last: asyncio.Task[Reply] | None = None  # call
        self._listening: asyncio.Task[Reply] | None = None
        self._wanted: tuple[int | None, bool] = None, False  # what it waits for
        self._served_s = 0.0
        self.on_served: Callable[[str, float, float], None] = lambda *_: None
        """Called for each call that the worker has served: its kind, start and end."""

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        self._unsent += groups
        self._on_way += sum(len(group.answers) for group in groups)
        if self._listening is not None:  # the pending wait has not got them
            self._start_wait(*self._wanted)

    async def events(
        self, until: int | None = None, gather: bool = False
    ) -> Sequence[CompletionEvent]:
        """Wait as `Engine.events` does; with `gather`, for all events up to `until`."""
        while not self._inbox:
            status = self.status()
            is_idle = not status.running + status.queued
            if is_idle or (until is not None and status.tick >= until):
                break
            await asyncio.shield(self._listening or self._start_wait(until, gather))
        events, self._inbox = self._inbox, []
        return events

    def _start_wait(self, until: int | None, gather: bool) -> asyncio.Task[Reply]:
        """Start a wait; the worker ends the previous one."""
        self._wanted = until, gather
        self._listening = self._start_call("events", until, PATIENCE_S, gather)
        return self._listening

    async def progress(self) -> Sequence[CompletionEvent]:
        while True:
            reply = await asyncio.shield(self._start_call("progress"))
            if reply is self._newest:
                running = [event for event in reply.events if event.kind == "running"]
                events, self._inbox = self._inbox, []
                return [*events, *running]
            # Another reply was processed meanwhile: this one is out of date.

    async def abort(self, group_ids: Collection[int]) -> None:
        await self._call("abort", list(group_ids))

    async def load_weights(self, update: WeightUpdate) -> None:
        self._check_update_allowed()
        if update.tensors is not None:
            await send_weights(update, self._take_bucket)
            update = WeightUpdate(update.version)
        if update.stored is not None:
            # In parts, as answers may go on meanwhile: replies tell of those that end.
            while not await self._call("take_stored", update, PATIENCE_S):
                pass
            update = WeightUpdate(update.version)
        await self._call("load_weights", update)

    async def _take_bucket(self, bucket: Bucket) -> dict[str, int]:
        return {"engine 0": await self.take_bucket(bucket)}

    async def take_bucket(self, bucket: Bucket) -> int:
        self._check_update_allowed()
        return cast("int", await self._call("take_bucket", bucket))

    def _check_update_allowed(self) -> None:
        status = self.status()  # checked here, so that the worker does not fail
        check_update_allowed(status.running + status.queued > 0, status.live_updates)

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int, images: ImageLists = ()
    ) -> list[FloatArray]:
        found = await self._call("logprobs_of", list(sequences), temperature, last, list(images))
        return cast("list[FloatArray]", found)

    def status(self) -> EngineStatus:
        status = self._newest.status
        return replace(status, queued=status.queued + self._on_way) if self._on_way else status

    async def sleep(self) -> None:
        """Have the engine free its GPU memory, if it supports that."""
        status = self.status()  # here, so that the worker need not fail
        check_may_sleep(status.running + status.queued > 0)
        await self._call("sleep")

    async def wake(self, part: MemoryPart) -> None:
        """Have the engine allocate its GPU memory again."""
        await self._call("wake", part)

    async def close(self) -> None:
        """Free the engine's resources; the worker stays."""
        await self._call("close")

    async def _call(self, method: str, *args: Any) -> Any:
        return (await asyncio.shield(self._start_call(method, *args))).value

    def _start_call(self, method: str, *args: Any) -> asyncio.Task[Reply]:
        """Start a call, which sends submitted answers and continues if it is not awaited."""
        groups, self._unsent = self._unsent, []
        self._last = asyncio.create_task(self._round_trip(method, args, groups, self._last))
        # An error is raised by this call if awaited, and by the next one.
        self._last.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._last

    async def _round_trip(
        self,
        method: str,
        args: tuple[Any, ...],
        groups: list[GroupRequest],
        previous: asyncio.Task[Reply] | None,
    ) -> Reply:
        asked_s = time.perf_counter()
        try:
            said = await self._workers.call_rank(0, "call", method, args, groups)
            if previous is not None:
                if not previous.done():
                    await asyncio.wait([previous])
                previous.result()
        finally:
            if self._listening is asyncio.current_task():
                self._listening = None
        reply: Reply = said.inline if isinstance(said, SplitResult) else said
        # The worker serves one call after the other.
        began_s, self._served_s = max(asked_s, self._served_s), time.perf_counter()
        self.on_served(_WORK.get(method, method), began_s, self._served_s)
        self._newest = reply
        self._on_way -= sum(len(group.answers) for group in groups)
        self._inbox += [event for event in reply.events if event.kind != "running"]
        return reply
