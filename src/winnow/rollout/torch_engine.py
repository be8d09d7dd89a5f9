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
from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from winnow.models.causal_lm import head_logits, hidden_states, output_head
from winnow.rollout.draw import draw, logprobs_along, uniform
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest, WeightUpdate
from winnow.rollout.kv_cache import (
    DecodeLayout,
    PrefillLayout,
    PromptBlock,
    SlotCache,
    slots_that_fit,
)
from winnow.rollout.slots import PendingAnswer, Slots
from winnow.types import FinishReason, FloatArray, IntArray, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from winnow.rollout.weights import Bucket, WeightReceipt, WeightReceiver

_QueueEntry = tuple[bool, int, int, int, PendingAnswer]


class TorchEngine:
    """Implements `Engine`, and `weights.Receiver`, with a model in this process.

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
        self._slots = Slots(slots, self._device)
        self._cache = SlotCache(slots, weight.dtype, self._device, longest)
        self._queue: list[_QueueEntry] = []
        self._events: list[CompletionEvent] = []  # that nobody has taken yet
        self._live_updates = live_updates
        self._arriving: WeightReceiver | None = None
        self._is_stop = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
        self._stop_ids: tuple[int, ...] = ()
        self._version = self._tick = self._generated = self._submitted = 0
        self._masked = 0.0

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
                fresh = not len(answer.prefix)
                if len(answer.prefix) >= group.sampling.max_tokens:
                    raise ValueError(
                        f"group {group.group_id}: a prefix of {len(answer.prefix)} tokens leaves "
                        f"nothing to write within max_tokens {group.sampling.max_tokens}"
                    )
                self._submitted += 1
                entry = (fresh, group.priority, request.index, self._submitted, answer)
                heappush(self._queue, entry)

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
        segments = self._slots.written(range(len(self._slots)), self._version)
        running = [
            self._event(answer, "running", segment, "aborted")
            for answer, segment in zip(self._slots.answers, segments, strict=True)
        ]
        return [*events, *sorted(running, key=lambda e: (e.group_id, e.answer))]

    async def abort(self, group_ids: Collection[int]) -> None:
        wanted = set(group_ids)
        running = [r for r, a in enumerate(self._slots.answers) if a.group.group_id in wanted]
        queued = [entry[-1] for entry in self._queue if entry[-1].group.group_id in wanted]
        segments = self._slots.written(running, self._version)
        events = [
            self._event(self._slots.answers[row], "aborted", segment, "aborted")
            for row, segment in zip(running, segments, strict=True)
        ]
        events += [self._event(a, "aborted", a.prefix, "aborted") for a in queued]
        self._leave(running)
        self._queue = [e for e in self._queue if e[-1].group.group_id not in wanted]
        heapify(self._queue)
        self._events += sorted(events, key=lambda e: (e.group_id, e.answer))

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take new weights, whole.

        Raises:
            ValueError: answers are still running in an engine without live updates, or a tensor
                has no place or another shape.
        """
        self._check_may_change()
        if update.tensors is not None:
            own = dict(self._model.named_parameters())
            for name, tensor in update.tensors:
                if name not in own or own[name].shape != tensor.shape:
                    raise ValueError(f"weight update: {name} {tuple(tensor.shape)} does not fit")
                own[name].data.copy_(tensor)
        self._use(update.version)

    def _check_may_change(self) -> None:
        if (len(self._slots) or self._queue) and not self._live_updates:
            raise ValueError("abort what runs before new weights: its cache is of the old ones")

    def _use(self, version: int) -> None:
        """Book tokens from now on as this version's."""
        self._slots.close_spans(self._version)
        for *_, answer in self._queue:
            answer.block = None  # what has not begun begins with the new weights
        self._version = version

    async def begin_update(self, version: int) -> None:
        """Begin to take new weights; answers under way wait.

        Raises:
            ValueError: there are some, in an engine without live updates.
        """
        self._check_may_change()
        from winnow.rollout.weights import WeightReceiver

        before, self._arriving = self._arriving, WeightReceiver(self._model, version)
        if before is not None:  # it never came to an end
            before.settled.set_result(None)

    async def take_bucket(self, bucket: Bucket) -> int:
        """Copy a bucket into the model; returns the checksum of what the model then holds.

        Raises:
            PublicationError: it does not fit.
        """
        assert self._arriving is not None, "begin_update comes first"
        return self._arriving.take(bucket)

    async def finish_update(self) -> WeightReceipt:
        """Decode with the new weights.

        Raises:
            PublicationError: a tensor is missing; nothing is decoded then.
        """
        assert self._arriving is not None, "begin_update comes first"
        held = self._arriving.finish()
        self._use(held.version)
        self._arriving.settled.set_result(None)
        self._arriving = None
        return held

    async def logprobs_of(
        self, sequences: Sequence[IntArray], temperature: float = 1.0
    ) -> list[FloatArray]:
        """Return log-probs in nats of each token given those before it, [L - 1] a sequence [L].

        Under softmax(logits / temperature), by the engine's own prefill and output layer.
        """
        found = []
        for ids in sequences:
            with torch.inference_mode():
                hidden, _ = self._run_prefill([ids])
                following = torch.from_numpy(ids[1:]).to(self._device)
                found.append(logprobs_along(self._logits, hidden[0], following, temperature))
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
            masked_probability=self._masked,
            tick=self._tick,
            live_updates=self._live_updates,
        )

    async def close(self) -> None:
        """Drop queue, rows and cache."""
        self._queue.clear()
        self._events.clear()
        self._slots = Slots(self._slots.count, self._device)
        self._cache = SlotCache(
            self._slots.count, self._cache.dtype, self._device, self._cache.longest
        )

    # -- filling rows -------------------------------------------------------------------------

    def _refill(self) -> None:
        """Put queued answers into free rows, a block of prefilled contexts at a time."""
        while self._queue and self._slots.free:
            if self._queue[0][-1].block is None:
                self._prefill()
            block = self._queue[0][-1].block
            assert block is not None
            batch: list[PendingAnswer] = []
            while (
                self._queue and len(batch) < self._slots.free and self._queue[0][-1].block is block
            ):
                batch.append(heappop(self._queue)[-1])
            rows = self._slots.place(batch)
            prompts = torch.tensor([a.block_row for a in batch], device=self._device)
            longest = int(self._slots.lengths[rows].max()) - 1  # without the newest token
            self._cache.reserve(longest + 2)
            self._cache.fill(block, prompts, rows, self._slots.at[rows], longest)
            for answer in batch:
                answer.block = None

    def _prefill(self) -> None:
        """Prefill the next contexts of the queue as one padded block.

        Answers of one group without a prefix share a row of it.
        """
        contexts: list[IntArray] = []
        shared: dict[int, int] = {}
        width = 1
        block = PromptBlock([])
        for *_, answer in sorted(self._queue):
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
        slots = self._slots
        count = len(slots)
        rows, at = slots.rows[:count], slots.at[:count]
        length = int(slots.lengths[:count].max())
        self._cache.reserve(length)
        self._cache.bias[rows, at] = 0.0
        layout = DecodeLayout(self._cache, rows, at, length)
        hidden = hidden_states(self._model, slots.ids[rows, at], at, layout)
        logits = head_logits(self._head, hidden, self._fp32_head)
        if self._vocab < logits.shape[1]:
            logits = self._mask(logits)
        u = uniform(slots.seed[:count], at + 1 - slots.start[:count])
        ids, logprobs = draw(logits, u, slots.params)
        slots.append(ids, logprobs)
        self._tick += 1
        self._generated += count
        reasons = self._finished(ids)
        if not reasons:
            return []
        segments = slots.written(list(reasons), self._version)
        events = [
            self._event(slots.answers[row], "finished", segment, reason)
            for (row, reason), segment in zip(reasons.items(), segments, strict=True)
        ]
        self._leave(list(reasons))
        return sorted(events, key=lambda e: (e.group_id, e.answer))

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

    def _mask(self, logits: Tensor) -> Tensor:
        """Leave out ids that no tokenizer knows, and book the probability they had."""
        valid = logits[:, : self._vocab]
        lost = 1 - (valid.logsumexp(-1) - logits.logsumexp(-1)).exp()
        self._masked += float(lost.clamp_min(0).sum())
        return valid

    def _event(
        self,
        answer: PendingAnswer,
        kind: Literal["finished", "aborted", "running"],
        segment: Segment,
        reason: FinishReason,
    ) -> CompletionEvent:
        group, index = answer.group.group_id, answer.request.index
        return CompletionEvent(group, index, kind, segment, reason, self._tick)

    def _leave(self, rows: Sequence[int]) -> None:
        """Free rows, and let the cache follow those that move into the holes."""
        if rows and (moved := self._slots.leave(rows)):
            self._cache.move(*moved)
