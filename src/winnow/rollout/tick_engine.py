"""Base classes of engines: queue, rows and stop strings; ticks and weight updates.

    submit ──► queue (prefixes first, then by priority) ──► rows ── tick: one token a row ──► events

Time is the decode tick. Nothing depends on a clock, so the same submissions give the same tokens at
the same ticks. Running answers must be aborted before weights change, unless the engine has live
updates: then they continue with the keys and values of the older weights. While an update is copied
beside the weights, ticks go on.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from winnow.errors import PublicationError
from winnow.rollout.engine import (
    EMPTY,
    AnswerRequest,
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    check_update_allowed,
)
from winnow.rollout.weights import Bucket, WeightReceiver, WeightUpdate, can_stage, load_stored
from winnow.types import FinishReason, Image, IntArray, Segment, VersionSpan, join_images
from winnow.workers.threads import in_thread


@dataclass(eq=False)
class PendingAnswer:
    """A queued or running answer."""

    group: GroupRequest
    request: AnswerRequest
    spans: tuple[VersionSpan, ...] = field(init=False)
    """Spans of tokens of earlier weights."""

    def __post_init__(self) -> None:
        self.spans = self.prefix.spans

    @property
    def key(self) -> tuple[int, int]:
        """Group and answer."""
        return self.group.group_id, self.request.index

    @property
    def prefix(self) -> Segment:
        """Tokens that were generated before."""
        return self.request.prefix or EMPTY

    @property
    def order(self) -> tuple[bool, int, int]:
        """Its place in the queue: prefixes first, then by priority."""
        return not len(self.prefix), self.group.priority, self.request.index

    def end_event(
        self, kind: Literal["aborted", "failed", "running"], tick: int, error: str = ""
    ) -> CompletionEvent:
        """Return an event that has only the prefix of the answer."""
        return CompletionEvent(*self.key, kind, self.prefix, "aborted", tick, error)

    @property
    def context(self) -> IntArray:
        """Prompt and prefix."""
        if self.request.prefix is None:
            return self.group.prompt_ids
        return np.concatenate([self.group.prompt_ids, self.prefix.token_ids])

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of prompt and prefix, placed in the context."""
        prompt = len(self.group.prompt_ids), self.group.images
        return join_images([prompt, (0, self.prefix.images)])

    def spans_to(self, length: int, version: int) -> tuple[VersionSpan, ...]:
        """Return the spans of an answer of `length` tokens, the newest of which are `version`'s."""
        spans = self.spans
        if length <= (spans[-1].stop if spans else len(self.prefix)):
            return spans
        if spans and spans[-1].version == version:
            spans = spans[:-1]
        return (*spans, VersionSpan(version, length))


@dataclass(eq=False)
class WrittenAnswer(PendingAnswer):
    """A pending answer with its tokens so far."""

    ids: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = self.prefix.token_ids.tolist()
        self.logprobs = self.prefix.logprobs.tolist()

    def segment(self, version: int) -> Segment:
        """Return all tokens; those without a span are of this version."""
        ids, logprobs = np.array(self.ids, np.int64), np.array(self.logprobs, np.float32)
        return Segment(ids, logprobs, self.spans_to(len(ids), version))


Answer = TypeVar("Answer", bound=PendingAnswer)
Written = TypeVar("Written", bound=WrittenAnswer)
T = TypeVar("T")


class QueueEngine(ABC, Generic[Answer]):
    """Queue, rows and events of an engine: submission, abort, progress, status and stop strings.

    Args:
        make_answer: makes the entries of the queue.
        slots: most concurrent answers.
        decode: token ids to text; needed for stop strings only.
        live_updates: accept new weights while answers run.
    """

    def __init__(
        self,
        make_answer: Callable[[GroupRequest, AnswerRequest], Answer],
        slots: int,
        decode: Callable[[Sequence[int]], str] | None,
        live_updates: bool,
    ) -> None:
        self._make_answer, self._slot_count = make_answer, slots
        self._decode, self._live_updates = decode, live_updates
        self._queue: list[Answer] = []
        self._rows: list[Answer] = []
        self._events: list[CompletionEvent] = []  # not returned yet
        self._version = self._tick = self._generated = self._buckets = 0

    @property
    def _running(self) -> Sequence[Answer]:
        """Answers of the rows."""
        return self._rows

    @abstractmethod
    def _newest_ids(self, rows: Sequence[int], width: int) -> list[list[int]]:
        """Return the newest ids of answers, at most `width` of each and none of the prompt."""

    @abstractmethod
    def _segments(self, rows: Sequence[int]) -> list[Segment]:
        """Return answers so far, prefixes included; new tokens are of the current version."""

    def _extras(self, row: int) -> Mapping[str, NDArray[Any]]:
        """Return further arrays of a finished answer."""
        return {}

    @abstractmethod
    def _free_rows(self, rows: Sequence[int]) -> None:
        """Free rows."""

    def _check(self, group: GroupRequest) -> None:
        """Raise a ValueError for a group that this engine cannot generate."""
        if group.sampling.stop and self._decode is None:
            raise ValueError("stop strings need a tokenizer: pass `decode` to the engine")

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups.

        Raises:
            ValueError: the engine cannot generate a group, there are stop strings without
                `decode`, or a prefix has max_tokens already.
        """
        for group in groups:
            self._check(group)
            for request in group.answers:
                answer = self._make_answer(group, request)
                if len(answer.prefix) >= group.sampling.max_tokens:
                    raise ValueError(
                        f"group {group.group_id}: a prefix of {len(answer.prefix)} tokens "
                        f"reaches max_tokens {group.sampling.max_tokens}"
                    )
                insort(self._queue, answer, key=attrgetter("order"))

    async def progress(self) -> Sequence[CompletionEvent]:
        events, self._events = self._events, []
        return [*events, *self._make_events(range(len(self._running)), "running")]

    async def abort(self, group_ids: Collection[int]) -> None:
        wanted = set(group_ids)
        running = [r for r, a in enumerate(self._running) if a.group.group_id in wanted]
        queued = [answer for answer in self._queue if answer.group.group_id in wanted]
        events = self._make_events(running, "aborted")
        for answer in queued:
            insort(events, answer.end_event("aborted", self._tick), key=attrgetter("key"))
        self._free_rows(running)
        self._queue = [a for a in self._queue if a.group.group_id not in wanted]
        self._events += events

    def _check_update_allowed(self) -> None:
        check_update_allowed(bool(self._running or self._queue), self._live_updates)

    def status(self) -> EngineStatus:
        return EngineStatus(
            slots=self._slot_count,
            running=len(self._running),
            queued=len(self._queue),
            weight_version=self._version,
            generated_tokens=self._generated,
            tick=self._tick,
            live_updates=self._live_updates,
            buckets=self._buckets,
        )

    async def close(self) -> None:
        """Drop all answers."""
        self._queue.clear()
        self._events.clear()
        self._free_rows(range(len(self._running)))

    def _make_events(
        self,
        rows: Sequence[int],
        kind: Literal["finished", "aborted", "failed", "running"],
        reasons: Mapping[int, FinishReason] | None = None,
    ) -> list[CompletionEvent]:
        """Return events of rows, ordered by group and answer."""
        events = []
        for row, segment in zip(rows, self._segments(rows), strict=True):
            reason = "aborted" if reasons is None else reasons[row]
            key, extras = self._running[row].key, self._extras(row) if kind == "finished" else {}
            event = CompletionEvent(*key, kind, segment, reason, self._tick, extras=extras)
            events.append(event)
        return sorted(events, key=attrgetter("key"))

    def _rows_at_stop(self, rows: Sequence[int]) -> list[int]:
        """Return the rows whose newest tokens contain one of their stop strings."""
        if not rows:
            return []
        assert self._decode is not None
        stops = [self._running[row].group.sampling.stop for row in rows]
        # A character takes at most four byte-level tokens.
        width = 4 * max(len(stop) for each in stops for stop in each) + 4
        texts = map(self._decode, self._newest_ids(rows, width))
        found = zip(rows, stops, texts, strict=True)
        return [row for row, each, text in found if any(stop in text for stop in each)]


class WrittenRows(QueueEngine[Written]):
    """Rows of an engine as a list of answers with their tokens."""

    def _segments(self, rows: Sequence[int]) -> list[Segment]:
        return [self._rows[row].segment(self._version) for row in rows]

    def _newest_ids(self, rows: Sequence[int], width: int) -> list[list[int]]:
        return [self._rows[row].ids[-width:] for row in rows]


class TickEngine(QueueEngine[Answer]):
    """Implements `PublishedEngine`, except for rows, ticks and weights."""

    _staging = 0
    """As `can_stage` takes `engines`."""
    _staging_device = torch.device("cpu")
    _receiving: WeightReceiver | None = None
    _loading: tuple[int, AsyncIterator[None]] | None = None
    """A version, and what loads its stored buckets one by one."""

    # -- left to each engine --------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> list[CompletionEvent]:
        """Fill free rows and run one tick; return its events, ordered by group and answer."""

    @abstractmethod
    def _make_receiver(self, version: int) -> WeightReceiver:
        """Return a receiver for an update."""

    @abstractmethod
    async def _load_tensors(self, update: WeightUpdate) -> None:
        """Load the tensors of an update."""

    @abstractmethod
    def _reset_caches(self) -> None:
        """Drop what is prefilled with older weights, except for running answers."""

    # -- the protocol ---------------------------------------------------------------------------

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Run ticks until an answer ends; return the events since the last call."""
        while not self._events and (self._running or self._queue):
            if until is not None and self._tick >= until:
                break
            if self._receiving is not None and not self._receiving.is_staged:
                await asyncio.shield(self._receiving.ready)
                continue
            self._events += self._advance()
            # Scorers and other coroutines run between ticks.
            await asyncio.sleep(0)
        events, self._events = self._events, []
        return events

    async def load_weights(self, update: WeightUpdate) -> None:
        """Load new weights: tensors by name, stored buckets, or the buckets received before.

        Raises:
            ValueError: answers are running in an engine without live updates, or the model has no
                such tensor.
            PublicationError: a tensor is missing in the buckets, they are of another version, or
                the model has other bytes than were sent. The engine then decodes no more, or
                goes on with the old weights if the update was copied beside them.
        """
        self._check_update_allowed()
        with self._aborting_on_error(update.version):
            if update.tensors is not None:
                await self._load_tensors(update)
            while update.stored is not None and not await self._load_stored(update, math.inf):
                pass
            if self._receiving is not None:
                self._receiving.finish(update.version)
                self._receiving = None
        rows = range(len(self._running))
        for answer, segment in zip(self._running, self._segments(rows), strict=True):
            answer.spans = segment.spans
        self._reset_caches()
        self._version = update.version

    async def take_stored(
        self, update: WeightUpdate, patience_s: float, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        with self._aborting_on_error(update.version):
            return await self._load_stored(update, patience_s, is_due)

    async def _load_stored(
        self, update: WeightUpdate, patience_s: float, is_due: Callable[[], bool] = lambda: False
    ) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        if self._loading is None or self._loading[0] != update.version:
            loading = load_stored(update, self._copy_bucket, self._fetch)
            self._loading = update.version, loading
        try:
            async for _ in self._loading[1]:
                if self._events or loop.time() >= until or is_due():
                    return False
        except BaseException:
            self._loading = None
            raise
        self._loading = None
        return True

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket; running answers wait until all are there, or go on beside the update.

        Raises:
            ValueError: answers are running in an engine without live updates.
            PublicationError: the bucket does not fit the model.
        """
        with self._aborting_on_error(bucket.version):
            return await self._copy_bucket(bucket)

    async def _copy_bucket(self, bucket: Bucket) -> int:
        if bucket.index == 0:
            self._check_update_allowed()
            before, self._receiving = self._receiving, None  # its memory is free again
            if before is not None:  # it was not completed
                before.ready.set_result(None)
            self._receiving = self._make_receiver(bucket.version)
        receiving = self._receiving
        assert receiving is not None, "bucket 0 comes first"
        self._buckets += 1
        if not receiving.is_staged:
            return receiving.take(bucket)
        async with receiving.turn:
            return await self._tick_during(partial(receiving.take, bucket))

    @contextmanager
    def _aborting_on_error(self, version: int) -> Iterator[None]:
        try:
            yield
        except PublicationError as error:
            self._abort_update(version, error)
            raise

    def _abort_update(self, version: int, error: PublicationError) -> None:
        """Drop what was copied beside the weights, which stay in use."""
        receiving = self._receiving
        if receiving is not None and receiving.is_staged:
            receiving.ready.set_result(None)
            self._receiving = None

    def _may_stage(self, nbytes: int) -> bool:
        """Return whether an update is copied beside the weights: answers run, and memory allows."""
        is_busy = bool(self._running or self._queue)
        return is_busy and can_stage(nbytes, self._staging_device, self._staging)

    async def _fetch(self, buckets: Iterator[Bucket]) -> Bucket | None:
        work: Callable[[], Bucket | None] = partial(next, buckets, None)
        if self._receiving is None or not self._receiving.is_staged:
            return work()
        return await self._tick_during(work)

    async def _tick_during(self, work: Callable[[], T]) -> T:
        """Do work in a thread, and run ticks meanwhile."""
        task = asyncio.ensure_future(in_thread(work))
        try:
            while not task.done():
                if self._running or self._queue:
                    self._events += self._advance()
                    await asyncio.sleep(0)
                else:
                    await asyncio.wait([task])
        finally:  # a thread cannot be cancelled
            if not task.done():
                await asyncio.wait([task])
        return await task
