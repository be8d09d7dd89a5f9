"""The embedded engine: any Hugging Face causal LM, continuous batching, no server.

    submit ──► queue (prefixes first, then by priority)
                 │ prefill: each distinct prompt once, in blocks
                 ▼
    slots [0, R) ── tick: one token a row ──► finished rows leave, queued answers take their place
                                              at once; without a queue the last rows move up
    slots behind ── retained for answers that may be continued, until others need them

Weights are the trainer's own tensors unless an update brings some; `tick_engine` has the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from winnow.models.causal_lm import AttentionLayout, head_logits, hidden_states, output_head
from winnow.models.folders import has_adapter
from winnow.models.lora import adapter_weights
from winnow.models.routing import routing_of
from winnow.models.vision import PlacedImages, encode_images, place_spans
from winnow.rollout.draw import RowParams, draw, token_logprobs, uniform
from winnow.rollout.embedded.cache_room import cache_room_gib, gpu_memory_gib, max_slots
from winnow.rollout.embedded.merged_forward import MergedForward, can_merge
from winnow.rollout.embedded.slots import (
    DecodeLayout,
    ExtendLayout,
    Layers,
    MixedLayout,
    PrefilledAnswer,
    PrefillLayout,
    PromptBlock,
    Slots,
)
from winnow.rollout.engine import CompletionEvent, GroupRequest, MemoryPart, check_may_sleep
from winnow.rollout.tick_engine import TickEngine
from winnow.rollout.weights import WeightReceiver, WeightUpdate, replace_weights
from winnow.types import PROMPT_ROUTES, ROUTES, FinishReason, FloatArray, Image, IntArray, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TorchEngine(TickEngine[PrefilledAnswer]):
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
        cache_gib: most GiB of keys and values; None is `cache_room_gib`.
        memory_share, reserved_gib: of `cache_room_gib`.
        sleep: the engine sleeps while others need a GPU's memory.
        staging_engines: as `can_stage` takes `engines`.
        routes: tell of each token the experts that it went to, among the extras of a finished
            answer that may be trained on.

    Raises:
        ConfigError: the cache holds not one answer.
        ModelError: routes are asked for, and the model has none.
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
        routes: bool = False,
        memory_share: float | None = None,
        reserved_gib: float | None = None,
        sleep: bool = False,
        staging_engines: int = 0,
    ) -> None:
        self._head = output_head(model)
        weight = self._head.weight
        if longest is not None:
            if cache_gib is None and weight.device.type == "cuda":
                memory = gpu_memory_gib(weight.device)
                cache_gib = cache_room_gib(*memory, memory_share, reserved_gib, sleep)
            slots = max_slots(model.config, weight.dtype, slots, longest, cache_gib)
        super().__init__(PrefilledAnswer, slots, decode, live_updates)
        self._model, self._device = model, weight.device
        self._staging, self._staging_device = staging_engines, weight.device
        self._routing = routing_of(model, replays=True) if routes else None
        self._merged = MergedForward(model) if can_merge(model) else None
        self._vocab = min(vocab_size or self._head.out_features, self._head.out_features)
        self._prefill_tokens, self._fp32_head = prefill_tokens, fp32_head
        self._empty_slots = partial(Slots, slots, weight.dtype, weight.device, longest)
        self._slots = self._empty_slots()
        self._is_stop = torch.zeros(self._vocab, dtype=torch.bool, device=self._device)
        self._stop_ids: tuple[int, ...] = ()

    @property
    def _running(self) -> Sequence[PrefilledAnswer]:
        return self._slots.answers

    def _check(self, group: GroupRequest) -> None:
        if (stop_ids := group.sampling.stop_token_ids) != self._stop_ids:
            if len(self._slots) or self._queue:
                raise ValueError("one engine decodes with one set of stop ids at a time")
            self._stop_ids = stop_ids
            self._is_stop.zero_()
            self._is_stop[[i for i in stop_ids if i < self._vocab]] = True
        super()._check(group)

    async def _load_tensors(self, update: WeightUpdate) -> None:
        own, staged = dict(self._model.named_parameters()), dict[str, Tensor]()
        is_staged = self._may_stage(sum(p.nbytes for p in own.values() if p.requires_grad))
        tensors = iter(update.tensors or ())
        following = partial(next, tensors, None)
        while entry := await self._tick_during(following) if is_staged else following():
            name, tensor = entry
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(f"weight update: {name} {tuple(tensor.shape)} does not fit")
            if is_staged:
                copied = partial(tensor.detach().to, own[name], copy=True)
                staged[name] = await self._tick_during(copied)
            else:
                own[name].detach().copy_(tensor)
        replace_weights(own, staged)

    def _make_receiver(self, version: int) -> WeightReceiver:
        # Beside an adapter the base stays.
        only = dict(adapter_weights(self._model)) if has_adapter(self._model) else None
        return WeightReceiver(self._model, version, only, self._may_stage)

    def _reset_caches(self) -> None:
        self._drop_copies()
        self._slots.retained.clear()
        for answer in self._queue:
            answer.block = None  # what has not begun begins with the new weights

    def _drop_copies(self) -> None:
        if self._merged is not None:
            self._merged.drop()

    async def abort(self, group_ids: Collection[int]) -> None:
        """Stop groups; rows retained for their answers are lost, as they are to a resumed run."""
        await super().abort(group_ids)
        ids, retained = set(group_ids), self._slots.retained
        self._slots.retained = {key: row for key, row in retained.items() if key[0] not in ids}

    async def logprobs_of(
        self,
        sequences: Sequence[IntArray],
        temperature: float,
        last: int,
        images: Sequence[tuple[Image, ...]] = (),
    ) -> list[FloatArray]:
        """Score the last tokens of sequences by the engine's own prefill and output layer."""
        found = []
        for place, ids in enumerate(sequences):
            with torch.inference_mode():
                hidden, _ = self._run_prefill([(ids, images[place] if images else ())])
                following = torch.tensor(ids[1:][-last:], device=self._device)
                states = hidden[-len(following) :]
                found.append(token_logprobs(self._logits, states, following, temperature))
            await asyncio.sleep(0)
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self._head, hidden, self._fp32_head)[:, : self._vocab]

    async def sleep(self) -> None:
        """Drop the cache, which grows again with the next answers, and copies of the weights.

        Raises:
            ValueError: answers are under way, of which the keys would be lost.
        """
        check_may_sleep(bool(len(self._slots) or self._queue))
        self._drop_copies()
        self._slots = self._empty_slots()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self, part: MemoryPart) -> None:
        """Do nothing: memory is taken as answers need it."""

    async def close(self) -> None:
        """Drop queue, rows, cache and copies of the weights."""
        await super().close()
        self._drop_copies()
        self._slots = self._empty_slots()

    # -- filling rows -------------------------------------------------------------------------

    def _fill_rows(self) -> None:
        """Put queued answers into free rows, a block of prefilled contexts at a time."""
        while self._queue and self._slots.free_count:
            if self._queue[0].block is None:
                self._prefill()
            block = self._queue[0].block
            assert block is not None
            batch: list[PrefilledAnswer] = []
            for answer in self._queue[: self._slots.free_count]:
                if answer.block is not block:
                    break
                batch.append(answer)
            del self._queue[: len(batch)]
            self._slots.fill_rows(batch, block)

    def _continue_rows(self) -> tuple[Tensor, ExtendLayout] | None:
        """Put queued answers into the rows retained for them.

        Returns:
            What the next tick has to run besides: ids [T] that these rows lack, and their layout.
        """
        slots, lacking = self._slots, None
        ready = [a for a in self._queue[: slots.free_count] if slots.can_continue(a)]
        while ready:
            batch, width = list[PrefilledAnswer](), 1
            for answer in ready:
                width = max(width, len(answer.context) - len(slots.retained[answer.key].ids))
                if batch and width * (len(batch) + 1) > self._prefill_tokens:
                    break
                batch.append(answer)
            del ready[: len(batch)]
            going = set(batch)
            self._queue = [answer for answer in self._queue if answer not in going]
            ids, layout, images = slots.continue_rows(batch)
            if ready or images is not None:
                self._run(ids, images or layout.positions, layout)
            else:
                lacking = ids, layout
        return lacking

    def _prefill(self) -> None:
        """Prefill the next contexts of the queue as one padded block.

        Answers of one group without a prefix share a row of it.
        """
        contexts: list[tuple[IntArray, tuple[Image, ...]]] = []
        shared: dict[int, int] = {}
        width = 1
        block = PromptBlock([])
        for answer in self._queue:
            if answer.block is not None or self._slots.can_continue(answer):
                continue
            key = id(answer.group) if answer.request.prefix is None else id(answer)
            if key not in shared:
                longest = max(width, len(answer.context) - 1)
                if contexts and longest * (len(contexts) + 1) > self._prefill_tokens:
                    break
                width = longest
                shared[key] = len(contexts)
                contexts.append((answer.context, answer.images))
            answer.block, answer.block_row = block, shared[key]
        _, block.layers[:] = self._run_prefill(contexts)
        if self._routing is not None:
            self._share_routes(block)

    def _share_routes(self, block: PromptBlock) -> None:
        """Give answers with one context the same array of their prompt's routes."""
        routes = block.layers[-1][0].transpose(1, 2).cpu().numpy()
        known: dict[int, NDArray[Any]] = {}
        for answer in self._queue:
            if answer.block is block and answer.request.trained:
                row, stop = answer.block_row, len(answer.group.prompt_ids) - 1
                if row not in known:
                    known[row] = routes[row, :stop].copy()
                answer.prompt_routes = known[row]

    def _run_prefill(
        self, contexts: Sequence[tuple[IntArray, tuple[Image, ...]]]
    ) -> tuple[Tensor, Layers]:
        """Return hidden states [T, H] of contexts without their last tokens, keys and values.

        The last token of a context is fed by the first tick, which draws the next one. A context of
        one token is given whole, as none can be empty; its row sees nothing of it.

        Args:
            contexts: token ids of each, and its images.
        """
        lengths = np.array([max(1, len(context) - 1) for context, _ in contexts])
        ids = np.concatenate([c[:n] for (c, _), n in zip(contexts, lengths, strict=True)])
        layout = PrefillLayout(lengths, self._device)
        tokens = torch.from_numpy(ids).to(self._device, torch.long)
        images = place_spans([shown for _, shown in contexts], 0 * lengths, lengths)
        hidden, routes = self._run(tokens, images or layout.positions, layout)
        if routes is not None:
            layout.add_routes(routes)
        return hidden, layout.layers

    def _run(
        self, ids: Tensor, positions: Tensor | PlacedImages, layout: AttentionLayout
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [T, H] and routes [T, layers, k] of tokens [T]; encodes images."""
        if isinstance(positions, PlacedImages):
            features = encode_images(self._model, positions.images)
            positions = replace(positions.to(self._device), features=features)
        if self._routing is None:
            return hidden_states(self._model, ids, positions, layout), None
        with self._routing.recording() as chosen:
            hidden = hidden_states(self._model, ids, positions, layout)
        return hidden, torch.stack(chosen, 1).to(self._routing.shape.dtype)

    # -- one tick -----------------------------------------------------------------------------

    def _advance(self) -> list[CompletionEvent]:
        with torch.inference_mode():
            lacking = self._continue_rows()
            self._fill_rows()
            return self._run_tick(lacking)

    def _run_tick(self, lacking: tuple[Tensor, ExtendLayout] | None) -> list[CompletionEvent]:
        """Draw one token in each row; returns what that finished, by group and answer.

        Args:
            lacking: as `_continue_rows` returns it.
        """
        slots, cache = self._slots, self._slots.cache
        count = len(slots)
        rows, at = slots.rows[:count], slots.at[:count]
        lengths = slots.lengths[:count]
        cache.reserve(int(lengths.max()), count)
        cache.bias[rows, at] = 0.0
        tokens, layout = slots.ids[rows, at], DecodeLayout(cache, rows, at, lengths)
        positions, routes = at - slots.shift[:count], None
        if lacking is None and self._merged is not None:
            logits = self._merged.logits(tokens, positions, layout)[:, : self._vocab]
        elif lacking is None:
            hidden, routes = self._run(tokens, positions, layout)
            logits = self._logits(hidden)
        else:
            ids, extension = lacking
            ids, positions = torch.cat([tokens, ids]), torch.cat([positions, extension.positions])
            hidden, routes = self._run(ids, positions, MixedLayout(layout, extension))
            logits = self._logits(hidden[:count])
        if routes is not None:
            slots.store_routes(routes)
        u = uniform(slots.seed[:count], at + 1 - slots.start[:count])
        params = RowParams(slots.kinds, slots.kind[:count])
        ids, logprobs = draw(logits, u, params)
        slots.append(ids, logprobs)
        self._tick += 1
        self._generated += count
        reasons = self._finish_reasons(ids)
        if not reasons:
            return []
        events = self._make_events(list(reasons), "finished", reasons)
        # A retained row has no routes of its prompt.
        retain = [
            row
            for row, reason in reasons.items()
            if slots.answers[row].request.retain_cache and reason == "stop" and not self._routing
        ]
        slots.free_rows(list(reasons), retain)
        return events

    def _finish_reasons(self, ids: Tensor) -> dict[int, FinishReason]:
        """Return rows whose newest token ended them, with the reason."""
        count = len(self._slots)
        stopped = self._is_stop[ids]
        ended = stopped | (self._slots.at[:count] >= self._slots.limit[:count])
        reasons: dict[int, FinishReason] = {}
        if bool(ended.any()):
            done = ended.nonzero().flatten()
            for row, stop in zip(done.tolist(), stopped[done].tolist(), strict=True):
                reasons[row] = "stop" if stop else "length"
        reasons |= dict.fromkeys(self._rows_at_stop(self._slots.with_stop_strings), "stop")
        return reasons

    def _segments(self, rows: Sequence[int]) -> list[Segment]:
        return self._slots.segments(rows, self._version)

    def _extras(self, row: int) -> Mapping[str, NDArray[Any]]:
        prompt = self._slots.answers[row].prompt_routes
        return {} if prompt is None else {PROMPT_ROUTES: prompt, ROUTES: self._slots.routes(row)}

    def _newest_ids(self, rows: Sequence[int], width: int) -> list[list[int]]:
        return self._slots.newest_ids(rows, width)

    def _free_rows(self, rows: Sequence[int]) -> None:
        with torch.inference_mode():  # in which the cache was made
            self._slots.free_rows(rows)
