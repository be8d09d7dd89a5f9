"""The embedded engine: any Hugging Face causal LM, continuous batching, no server.

    submit ──► queue (prefixes first, then by priority)
                 │ prefill: each distinct prompt once, in blocks
                 ▼
    slots [0, R) ── tick: one token a row ──► finished rows leave, queued answers take their place
                                              at once; without a queue the last rows move up

Time is the decode tick. Nothing here depends on a clock, so the same submissions give the
same tokens at the same ticks. Weights are the trainer's own tensors unless an update brings
some. Answers under way must be aborted before they change, unless the engine was made for live
updates: then answers go on with the keys and values that the older weights left.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from winnow.models.causal_lm import head_logits, hidden_states, output_head
from winnow.rollout.draw import RowParams, draw, logprobs_along, uniform
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest, WeightUpdate
from winnow.rollout.slots import (
    DecodeLayout,
    PendingAnswer,
    PrefillLayout,
    PromptBlock,
    Slots,
    slots_that_fit,
)
from winnow.types import FinishReason, FloatArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.rollout.weights import Bucket, WeightReceiver


class TorchEngine:
    """Implements `PublishedEngine` with a model in this process.

    Args:
        model: loaded by `models.load_causal_lm`; may be the trainer's own.
        slots: answers written at once; fewer where `cache_gib` holds no more.
        prefill_tokens: most padded prompt tokens in one prefill.
        vocab_size: ids at or beyond it are never drawn (padding of the embedding).
        decode: token ids to text; needed only where requests carry stop strings.
        live_updates: take new weights while answers run.
        fp32_head: compute a half-precision model's logits in fp32.
        longest: most tokens of a prompt and its answer; only `cache_gib` needs it.
        cache_gib: most GiB of keys and values; None sets no bound.

    Raises:
        ConfigError: the cache holds not one answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        prefill_tokens: int,
        vocab_size: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        live_updates: bool = False,
        fp32_head: bool = False,
        longest: int | None = None,
        cache_gib: float | None = None,
    ) -> None:
        self._model = model
        self._head = output_head(model)
        self._vocab = min(vocab_size or self._head.out_features, self._head.out_features)
        self._prefill_tokens, self._decode = prefill_tokens, decode
        self._fp32_head = fp32_head
        weight = self._head.weight
        self._device = weight.device
        if longest is not None:
            slots = slots_that_fit(model.config, weight.dtype, slots, longest, cache_gib)
        self._empty_slots = partial(Slots, slots, weight.dtype, weight.device, longest)
        self._slots = self._empty_slots()
        self._queue: list[PendingAnswer] = []
        self._events: list[CompletionEvent] = []  # that nobody has taken yet
        self._live_updates = live_updates
        self._arriving: WeightReceiver | None = None
        self._is_stop = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
        self._stop_ids: tuple[int, ...] = ()
        self._version = self._tick = self._generated = 0

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Queue groups.

        Raises:
            ValueError: other stop ids than those of answers under way, stop strings without
                `decode`, or a prefix that leaves nothing to write.
        """
        for group in groups:
            self._set_stop_ids(group.sampling.stop_token_ids)
            if group.sampling.stop and self._decode is None:
                raise ValueError("stop strings need a tokenizer: give the engine `decode`")
            for request in group.answers:
                answer = PendingAnswer(group, request)
                if len(answer.prefix) >= group.sampling.max_tokens:
                    raise ValueError(
                        f"group {group.group_id}: a prefix of {len(answer.prefix)} tokens leaves "
                        f"nothing to write within max_tokens {group.sampling.max_tokens}"
                    )
                insort(self._queue, answer, key=attrgetter("order"))

    def _set_stop_ids(self, stop_ids: tuple[int, ...]) -> None:
        if stop_ids == self._stop_ids:
            return
        if len(self._slots) or self._queue:
            raise ValueError("one engine decodes with one set of stop ids at a time")
        self._stop_ids = stop_ids
        self._is_stop.zero_()
        self._is_stop[[i for i in stop_ids if i < self._vocab]] = True

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        """Tick until an answer is finished; returns the events since the last call."""
        while not self._events and (len(self._slots) or self._queue):
            if until is not None and self._tick >= until:
                break
            if self._arriving is not None:
                await asyncio.shield(self._arriving.settled)
                continue
            with torch.inference_mode():
                self._refill()
                self._events += self._run_tick()
            # Scorers and other coroutines get their turn between ticks.
            await asyncio.sleep(0)
        events, self._events = self._events, []
        return events

    async def progress(self) -> Sequence[CompletionEvent]:
        events, self._events = self._events, []
        return [*events, *self._events_of(range(len(self._slots)), "running")]

    async def abort(self, group_ids: Collection[int]) -> None:
        wanted = set(group_ids)
        running = [r for r, a in enumerate(self._slots.answers) if a.group.group_id in wanted]
        queued = [answer for answer in self._queue if answer.group.group_id in wanted]
        events = self._events_of(running, "aborted")
        for answer in queued:
            key = answer.group.group_id, answer.request.index
            event = CompletionEvent(*key, "aborted", answer.prefix, "aborted", self._tick)
            insort(events, event, key=attrgetter("key"))
        self._slots.leave(running)
        self._queue = [a for a in self._queue if a.group.group_id not in wanted]
        self._events += events

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights: tensors by name, or those of which all buckets came before.

        Raises:
            ValueError: answers are still running in an engine without live updates, or a tensor
                has no place or another shape.
            PublicationError: a tensor is missing in the buckets, or they are of another version;
                nothing is decoded then.
        """
        self._check_may_change()
        if update.tensors is not None:
            own = dict(self._model.named_parameters())
            for name, tensor in update.tensors:
                if name not in own or own[name].shape != tensor.shape:
                    raise ValueError(f"weight update: {name} {tuple(tensor.shape)} does not fit")
                own[name].data.copy_(tensor)
        if self._arriving is not None:
            self._arriving.finish(update.version)
            self._arriving = None
        self._slots.close_spans(self._version)
        for answer in self._queue:
            answer.block = None  # what has not begun begins with the new weights
        self._version = update.version

    def _check_may_change(self) -> None:
        if (len(self._slots) or self._queue) and not self._live_updates:
            raise ValueError("abort what runs before new weights: its cache is of the old ones")

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket into the model; answers under way wait until all have come.

        Raises:
            ValueError: there are some, in an engine without live updates.
            PublicationError: it does not fit.
        """
        if bucket.index == 0:
            self._check_may_change()
            from winnow.rollout.weights import WeightReceiver

            before, self._arriving = self._arriving, WeightReceiver(self._model, bucket.version)
            if before is not None:  # it never came to an end
                before.settled.set_result(None)
        assert self._arriving is not None, "bucket 0 comes first"
        return self._arriving.take(bucket)

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float, last: int
    ) -> list[FloatArray]:
        """Score the last tokens of sequences by the engine's own prefill and output layer."""
        found = []
        for ids in sequences:
            with torch.inference_mode():
                hidden, _ = self._run_prefill([ids])
                following = torch.from_numpy(ids[1:][-last:]).to(self._device)
                states = hidden[0, -len(following) :]
                found.append(logprobs_along(self._logits, states, following, temperature))
            await asyncio.sleep(0)
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self._head, hidden, self._fp32_head)[:, : self._vocab]

    def status(self) -> EngineStatus:
        return EngineStatus(
            slots=self._slots.count,
            running=len(self._slots),
            queued=len(self._queue),
            weight_version=self._version,
            generated_tokens=self._generated,
            tick=self._tick,
            live_updates=self._live_updates,
        )

    async def close(self) -> None:
        """Drop queue, rows and cache."""
        self._queue.clear()
        self._events.clear()
        self._slots = self._empty_slots()

    # -- filling rows -------------------------------------------------------------------------

    def _refill(self) -> None:
        """Put queued answers into free rows, a block of prefilled contexts at a time."""
        while self._queue and self._slots.free:
            if self._queue[0].block is None:
                self._prefill()
            block = self._queue[0].block
            assert block is not None
            batch: list[PendingAnswer] = []
            for answer in self._queue[: self._slots.free]:
                if answer.block is not block:
                    break
                batch.append(answer)
            del self._queue[: len(batch)]
            self._slots.place(batch, block)

    def _prefill(self) -> None:
        """Prefill the next contexts of the queue as one padded block.

        Answers of one group without a prefix share a row of it.
        """
        contexts: list[IntArray] = []
        shared: dict[int, int] = {}
        width = 1
        block = PromptBlock([])
        for answer in self._queue:
            if answer.block is not None:
                continue
            key = id(answer.group) if answer.request.prefix is None else id(answer)
            if key not in shared:
                longest = max(width, len(answer.context) - 1)
                if contexts and longest * (len(contexts) + 1) > self._prefill_tokens:
                    break
                width = longest
                shared[key] = len(contexts)
                contexts.append(answer.context)
            answer.block, answer.block_row = block, shared[key]
        _, block.layers[:] = self._run_prefill(contexts)

    def _run_prefill(
        self, contexts: Sequence[IntArray]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return hidden states [P, L, H] of contexts without their last tokens, keys and values.

        The last token of a context is fed by the first tick, which draws the next one.
        """
        width = max(1, *(len(context) - 1 for context in contexts))
        padded = np.zeros((len(contexts), width), np.int64)
        for row, context in enumerate(contexts):
            padded[row, : len(context) - 1] = context[:-1]
        ids = torch.from_numpy(padded).to(self._device)
        positions = torch.arange(width, device=self._device).repeat(len(contexts))
        layout = PrefillLayout(len(contexts))
        hidden = hidden_states(self._model, ids.flatten(), positions, layout)
        return hidden.view(len(contexts), width, -1), layout.layers

    # -- one tick -----------------------------------------------------------------------------

    def _run_tick(self) -> list[CompletionEvent]:
        """Draw one token in each row; returns what that finished, by group and answer."""
        slots, cache = self._slots, self._slots.cache
        count = len(slots)
        rows, at = slots.rows[:count], slots.at[:count]
        length = int(slots.lengths[:count].max())
        cache.reserve(length)
        cache.bias[rows, at] = 0.0
        layout = DecodeLayout(cache, rows, at, length)
        hidden = hidden_states(self._model, slots.ids[rows, at], at, layout)
        u = uniform(slots.seed[:count], at + 1 - slots.start[:count])
        params = RowParams(slots.kinds, slots.kind[:count])
        ids, logprobs = draw(self._logits(hidden), u, params)
        slots.append(ids, logprobs)
        self._tick += 1
        self._generated += count
        reasons = self._finished(ids)
        if not reasons:
            return []
        events = self._events_of(list(reasons), "finished", reasons)
        slots.leave(list(reasons))
        return events

    def _finished(self, ids: Tensor) -> dict[int, FinishReason]:
        """Return rows whose newest token ended them, with the reason."""
        count = len(self._slots)
        stopped = self._is_stop[ids]
        ended = stopped | (self._slots.at[:count] >= self._slots.limit[:count])
        reasons: dict[int, FinishReason] = {}
        if bool(ended.any()):
            done = ended.nonzero().flatten()
            for row, stop in zip(done.tolist(), stopped[done].tolist(), strict=True):
                reasons[row] = "stop" if stop else "length"
        reasons |= dict.fromkeys(self._with_stop_string(), "stop")
        return reasons

    def _with_stop_string(self) -> list[int]:
        """Return rows whose newest tokens complete one of their stop strings."""
        rows = self._slots.with_stop_strings
        if not rows:
            return []
        assert self._decode is not None
        stops = [self._slots.answers[row].group.sampling.stop for row in rows]
        # A character takes at most four byte-level tokens.
        width = 4 * max(len(stop) for each in stops for stop in each) + 4
        texts = map(self._decode, self._slots.tails(rows, width))
        found = zip(rows, stops, texts, strict=True)
        return [row for row, each, text in found if any(stop in text for stop in each)]

    def _events_of(
        self,
        rows: Sequence[int],
        kind: Literal["finished", "aborted", "running"],
        reasons: Mapping[int, FinishReason] | None = None,
    ) -> list[CompletionEvent]:
        """Return what happened to the answers of rows, by group and answer."""
        events = []
        for row, segment in zip(rows, self._slots.written(rows, self._version), strict=True):
            answer = self._slots.answers[row]
            key = answer.group.group_id, answer.request.index
            reason = "aborted" if reasons is None else reasons[row]
            events.append(CompletionEvent(*key, kind, segment, reason, self._tick))
        return sorted(events, key=attrgetter("key"))
