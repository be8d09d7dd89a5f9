"""Queue, rows and stop strings of all engines; ticks and publications of those that decode.

    submit ──► queue (prefixes first, then by priority) ──► rows ── tick: one token a row ──► events

Time is the decode tick. Nothing here depends on a clock, so the same submissions give the same
tokens at the same ticks. Answers under way must be aborted before weights change, unless the engine
was made for live updates: then answers go on with the keys and values that the older weights left.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from winnow.rollout.engine import (
    EMPTY,
    AnswerRequest,
    CompletionEvent,
    EngineStatus,
    GroupRequest,
    check_update_allowed,
)
from winnow.rollout.weights import Bucket, WeightReceiver, WeightUpdate, load_stored
from winnow.types import FinishReason, IntArray, Segment, VersionSpan


@dataclass(eq=False)
class PendingAnswer:
    """An answer on its way: queued, or in a row."""

    group: GroupRequest
    request: AnswerRequest
    spans: tuple[VersionSpan, ...] = field(init=False)
    """Spans of tokens that earlier weights wrote."""

    def __post_init__(self) -> None:
        self.spans = self.prefix.spans

    @property
    def key(self) -> tuple[int, int]:
        """Group and answer."""
        return self.group.group_id, self.request.index

    @property
    def prefix(self) -> Segment:
        """Tokens that were written before."""
        return self.request.prefix or EMPTY

    @property
    def order(self) -> tuple[bool, int, int]:
        """Its place in the queue: prefixes first, then by priority."""
        return not len(self.prefix), self.group.priority, self.request.index

    def end_event(
        self, kind: Literal["aborted", "failed", "running"], tick: int, error: str = ""
    ) -> CompletionEvent:
        """Return an event with no more of the answer than its prefix."""
        return CompletionEvent(*self.key, kind, self.prefix, "aborted", tick, error)

    @property
    def context(self) -> IntArray:
        """Prompt and prefix, from which the next token is drawn."""
        if self.request.prefix is None:
            return self.group.prompt_ids
        return np.concatenate([self.group.prompt_ids, self.prefix.token_ids])

    def spans_to(self, length: int, version: int) -> tuple[VersionSpan, ...]:
        """Return spans of an answer of so many tokens, the newest of which `version` wrote."""
        spans = self.spans
        if length <= (spans[-1].stop if spans else len(self.prefix)):
            return spans
        if spans and spans[-1].version == version:
            spans = spans[:-1]
        return (*spans, VersionSpan(version, length))


@dataclass(eq=False)
class WrittenAnswer(PendingAnswer):
    """A pending answer with all of its tokens so far."""

    ids: list[int] = field(init=False)
    logprobs: list[float] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = self.prefix.token_ids.tolist()
        self.logprobs = self.prefix.logprobs.tolist()

    def segment(self, version: int) -> Segment:
        """Return all that is written; what has no span yet is of this version."""
        ids, logprobs = np.array(self.ids, np.int64), np.array(self.logprobs, np.float32)
        return Segment(ids, logprobs, self.spans_to(len(ids), version))


Answer = TypeVar("Answer", bound=PendingAnswer)
Written = TypeVar("Written", bound=WrittenAnswer)


class QueueEngine(ABC, Generic[Answer]):
    """Queue, rows and events of an engine: submission, abort, progress, status and stop strings.

    Args:
        make_answer: makes what the queue holds.
        slots: answers that it writes at once.
        decode: token ids to text; needed only where requests carry stop strings.
        live_updates: take new weights while answers run.
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
        self._events: list[CompletionEvent] = []  # that nobody has taken yet
        self._version = self._tick = self._generated = self._buckets = 0

    @property
    def _running(self) -> Sequence[Answer]:
        """Answers of the rows."""
        return self._rows

    @abstractmethod
    def _tails(self, rows: Sequence[int], width: int) -> list[list[int]]:
        """Return the newest ids of answers, at most `width` of each and none of the prompt."""

    @abstractmethod
    def _written(self, rows: Sequence[int]) -> list[Segment]:
        """Return answers so far, prefixes included; new tokens are of the version in use."""

    def _extras(self, row: int) -> Mapping[str, NDArray[Any]]:
        """Return what a finished answer brings beside its tokens."""
        return {}

    @abstractmethod
    def _leave(self, rows: Sequence[int]) -> None:
        """Free rows."""

    def _check(self, group: GroupRequest) -> None:
        """Refuse what this engine cannot write, by a ValueError."""
        if group.sampling.stop and self._decode is None:
            raise ValueError("stop strings need a tokenizer: pass `decode` to the engine")

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups.

        Raises:
            ValueError: the engine cannot write one, there are stop strings without `decode`, or a
                prefix leaves nothing to write.
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
        return [*events, *self._events_of(range(len(self._running)), "running")]

    async def abort(self, group_ids: Collection[int]) -> None:
        wanted = set(group_ids)
        running = [r for r, a in enumerate(self._running) if a.group.group_id in wanted]
        queued = [answer for answer in self._queue if answer.group.group_id in wanted]
        events = self._events_of(running, "aborted")
        for answer in queued:
            insort(events, answer.end_event("aborted", self._tick), key=attrgetter("key"))
        self._leave(running)
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
        """Drop queue and rows."""
        self._queue.clear()
        self._events.clear()
        self._leave(range(len(self._running)))

    def _events_of(
        self,
        rows: Sequence[int],
        kind: Literal["finished", "aborted", "failed", "running"],
        reasons: Mapping[int, FinishReason] | None = None,
    ) -> list[CompletionEvent]:
        """Return what happened to the answers of rows, by group and answer."""
        events = []
        for row, segment in zip(rows, self._written(rows), strict=True):
            reason = "aborted" if reasons is None else reasons[row]
            key, extras = self._running[row].key, self._extras(row) if kind == "finished" else {}
            event = CompletionEvent(*key, kind, segment, reason, self._tick, extras=extras)
            events.append(event)
        return sorted(events, key=attrgetter("key"))

    def _with_stop_string(self, rows: Sequence[int]) -> list[int]:
        """Return those of rows whose newest tokens complete one of their stop strings."""
        if not rows:
            return []
        assert self._decode is not None
        stops = [self._running[row].group.sampling.stop for row in rows]
        # A character takes at most four byte-level tokens.
        width = 4 * max(len(stop) for each in stops for stop in each) + 4
        texts = map(self._decode, self._tails(rows, width))
        found = zip(rows, stops, texts, strict=True)
        return [row for row, each, text in found if any(stop in text for stop in each)]


class WrittenRows(QueueEngine[Written]):
    """Answers of an engine whose rows are a list of them, with all of their tokens."""

    def _written(self, rows: Sequence[int]) -> list[Segment]:
        return [self._rows[row].segment(self._version) for row in rows]

    def _tails(self, rows: Sequence[int], width: int) -> list[list[int]]:
        return [self._rows[row].ids[-width:] for row in rows]


class TickEngine(QueueEngine[Answer]):
    """Implements `PublishedEngine`, but for rows, ticks and weights; arguments of `QueueEngine`."""

    _receiving: WeightReceiver | None = None

    # -- left to each engine --------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> list[CompletionEvent]:
        """Fill free rows and run one tick; returns what that finished, by group and answer."""

    @abstractmethod
    def _receiver(self, version: int) -> WeightReceiver:
        """Begin an update."""

    @abstractmethod
    async def _take_tensors(self, update: WeightUpdate) -> None:
        """Take an update's tensors, all of them."""

    @abstractmethod
    def _renew(self) -> None:
        """Prepare for the next version: nothing is used of which older weights made the keys."""

    # -- the protocol ---------------------------------------------------------------------------

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Tick until an answer is finished; returns the events since the last call."""
        while not self._events and (self._running or self._queue):
            if until is not None and self._tick >= until:
                break
            if self._receiving is not None:
                await asyncio.shield(self._receiving.ready)
                continue
            self._events += self._advance()
            # Scorers and other coroutines get their turn between ticks.
            await asyncio.sleep(0)
        events, self._events = self._events, []
        return events

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights: tensors by name, in stored buckets, or in buckets that came before.

        Raises:
            ValueError: answers are still running in an engine without live updates, or a tensor
                has no place or another shape.
            PublicationError: a tensor is missing in the buckets, they are of another version, or
                the model holds other bytes than were sent; nothing is decoded then.
        """
        self._check_update_allowed()
        if update.tensors is not None:
            await self._take_tensors(update)
        if update.stored is not None:
            await load_stored(update, self.take_bucket)
        if self._receiving is not None:
            self._receiving.finish(update.version)
            self._receiving = None
        rows = range(len(self._running))
        for answer, segment in zip(self._running, self._written(rows), strict=True):
            answer.spans = segment.spans
        self._renew()
        self._version = update.version

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket into the model; answers under way wait until all have come.

        Raises:
            ValueError: there are some, in an engine without live updates.
            PublicationError: it does not fit.
        """
        if bucket.index == 0:
            self._check_update_allowed()
            before, self._receiving = self._receiving, self._receiver(bucket.version)
            if before is not None:  # it never came to an end
                before.ready.set_result(None)
        assert self._receiving is not None, "bucket 0 comes first"
        self._buckets += 1
        return self._receiving.take(bucket)
