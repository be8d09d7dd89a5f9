"""The rows of the embedded engine: an answer each, with its tokens, settings, keys and values.

Live rows are always [0, R): a tick works on slices, and a row that leaves is replaced by the
last one. A tick feeds one token a row; prefill runs whole prompts, padded to one length, and leaves
their keys and values in a block from which any number of rows can be filled.

Shapes: `R` rows of a tick, `S` longest context and answer of a row in tokens (of the cache: its
length), `P` prompts of a prefill, `L` their padded length, `N` query heads, `K` key/value heads,
`D` head width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from winnow.models.packed_attention import match_heads
from winnow.models.vision import PlacedImages, place_spans, position_shift
from winnow.rollout.embedded.cache_room import GROWTH
from winnow.rollout.engine import SamplingParams
from winnow.rollout.tick_engine import PendingAnswer
from winnow.types import IntArray, Segment

_CHUNK_ROWS = 8
"""Rows that always attend together."""
_CHUNK_COST = 1 << 15
"""Cost of attending in one more chunk, in elements of padded keys (estimated)."""


Layers = list[tuple[Tensor, ...]]
"""Keys and values of each layer; behind them, where routes are recorded, a tensor of these, which
has the layers that are mixtures in the place of heads and the experts chosen in that of widths."""


@dataclass(frozen=True, eq=False)
class PromptBlock:
    """Keys and values of prompts prefilled together, [P, K, L, D] each."""

    layers: Layers


class PrefillLayout:
    """An `AttentionLayout`: causal over P sequences; keeps their keys and values, right-padded.

    All other layers of the model see the tokens themselves, `T` in all, without padding.

    Args:
        lengths: [P] tokens of each sequence, each at least 1.
    """

    def __init__(self, lengths: IntArray, device: torch.device) -> None:
        self.prompts, self.length = len(lengths), int(lengths.max())
        places = np.flatnonzero(np.arange(self.length) < lengths[:, None])
        self._places = torch.from_numpy(places).to(device)
        """[T] of the tokens in a table [P * L]."""
        self.positions = self._places % self.length
        """[T] of the tokens in their sequences."""
        self.layers: Layers = []

    def add_routes(self, routes: Tensor) -> None:
        """Keep the routes of the tokens, [T, layers, k], behind all layers."""
        self.layers.append((self._padded(routes).transpose(1, 2),))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        # Padding lies behind every real token: it needs no mask.
        assert layer == len(self.layers)
        q, k, v = (self._padded(x).transpose(1, 2) for x in (q, k, v))
        self.layers.append((k, v))
        k, v = match_heads(q, k, v, q.device.type)
        length, enable_gqa = self.length, q.shape[1] != k.shape[1]
        mask = None
        if window is not None and window < length:
            distance = torch.arange(length, device=q.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        rows = out.transpose(1, 2).flatten(0, 1)
        return rows if len(rows) == len(self._places) else rows[self._places]

    def _padded(self, x: Tensor) -> Tensor:
        """Return [P, L, heads, D] of [T, heads, D]."""
        rows = self.prompts * self.length
        if len(x) < rows:
            x = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, self._places, x)
        return x.view(self.prompts, self.length, *x.shape[1:])


class SlotCache:
    """Keys and values of up to `slots` rows; rows and lengths grow as answers need them.

    Args:
        longest: length beyond which no answer will need it, if that is known.
    """

    def __init__(
        self, slots: int, dtype: torch.dtype, device: torch.device, longest: int | None = None
    ) -> None:
        self.slots, self.dtype, self.device, self.longest = slots, dtype, device, longest
        self.rows = self.length = 0
        self.layers: Layers = []
        self.bias = torch.zeros(0, 0, dtype=dtype, device=device)
        """[rows, S]: 0 where a row has a key, -inf elsewhere."""

    def reserve(self, length: int, rows: int) -> None:
        """Make room for positions below `length` in the first `rows` rows.

        Each of both grows at least by half; lengths in steps of 64.
        """
        if length > self.length:
            ahead = self.length * 3 // 2
            length = max(length, ahead if self.longest is None else min(ahead, self.longest))
            length = -(-length // GROWTH) * GROWTH
        if rows > self.rows:
            rows = max(rows, min(self.rows * 3 // 2, self.slots))
        length, rows = max(length, self.length), max(rows, self.rows)
        if (length, rows) == (self.length, self.rows):
            return
        bias = torch.full((rows, length), -torch.inf, dtype=self.dtype, device=self.device)
        bias[: self.rows, : self.length] = self.bias
        self.bias = bias
        for index, layer in enumerate(self.layers):  # the old one of a layer is given back at once
            self.layers[index] = tuple(self._grown(each, length, rows) for each in layer)
        self.length, self.rows = length, rows

    def _grown(self, old: Tensor, length: int, rows: int) -> Tensor:
        # Zeros, not garbage: masked keys still enter a product with weight 0.
        new = old.new_empty(rows, old.shape[1], length, old.shape[3])
        new[: self.rows, :, : self.length] = old
        new[: self.rows, :, self.length :] = 0.0
        new[self.rows :] = 0.0
        return new

    def fill(
        self, block: PromptBlock, places: Sequence[int], rows: slice, lengths: IntArray
    ) -> None:
        """Copy prompts of a block into rows.

        Args:
            places: of each row's prompt in the block.
            lengths: [rows] real tokens of each; the rest is padding.
        """
        longest = int(lengths.max())
        self.reserve(longest + 2, rows.stop)
        prompts = torch.tensor(places, device=self.device)
        if not self.layers:
            self.layers = [
                tuple(x.new_zeros(self.rows, x.shape[1], self.length, x.shape[3]) for x in layer)
                for layer in block.layers
            ]
        for own, layer in zip(self.layers, block.layers, strict=True):
            for cache, x in zip(own, layer, strict=True):
                cache[rows, :, :longest] = x[:, :, :longest].index_select(0, prompts)
        self.show(rows, lengths)

    def show(self, rows: slice, lengths: IntArray) -> None:
        """Let queries see the first keys of rows, and no others.

        Args:
            lengths: [rows]
        """
        ends = torch.from_numpy(lengths).to(self.device)
        visible = torch.arange(self.length, device=self.device) < ends[:, None]
        self.bias[rows] = torch.where(visible, 0.0, -torch.inf).to(self.dtype)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows `source` to rows `target`, up to position `length`; a row may be in both."""
        for layer in self.layers:
            for cache in layer:
                written = cache[:, :, :length]
                written.index_copy_(0, target, written.index_select(0, source))
        self.bias[target] = self.bias[source]


class ExtendLayout(PrefillLayout):
    """An `AttentionLayout`: further tokens of P consecutive rows, behind the keys of each.

    Args:
        first: first of the rows.
        starts: [P] keys of each; the cache has room for the others.
        stops: [P] keys of each with the new ones.
    """

    def __init__(self, slots: Slots, first: int, starts: IntArray, stops: IntArray) -> None:
        super().__init__(stops - starts, slots.device)
        self._cache, self._rows = slots.cache, slice(first, first + len(starts))
        queries = torch.arange(self.length, device=slots.device)
        queries = torch.from_numpy(starts).to(slots.device)[:, None] + queries
        self.token_rows = first + self._places // self.length
        """[T]"""
        self.targets = queries.flatten()[self._places]
        """[T] places of the tokens in their rows."""
        self.positions = self.targets - slots.shift[self.token_rows]
        self._keys = torch.arange(int(stops.max()), device=slots.device)
        self._queries = queries[:, None, :, None]
        self._mask = self._keys <= self._queries
        """[P, 1, L, S]"""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values = self._cache.layers[layer]
        keys[self.token_rows, :, self.targets] = k
        values[self.token_rows, :, self.targets] = v
        q = self._padded(q).transpose(1, 2)
        k, v = (each[self._rows, :, : len(self._keys)] for each in (keys, values))
        k, v = match_heads(q, k, v, q.device.type)
        mask = self._mask
        if window is not None:
            mask = mask & (self._keys > self._queries - window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)[self._places]


@dataclass(frozen=True, eq=False)
class DecodeLayout:
    """An `AttentionLayout`: a query a row against that row's keys, the new one included.

    On a CPU rows attend in chunks of neighbours, as far as the longest row of each.
    """

    cache: SlotCache
    rows: Tensor
    """[R] 0..R-1"""
    positions: Tensor
    """[R] where the new keys go"""
    lengths: IntArray
    """[R] keys of each, the new one included"""

    @cached_property
    def _places(self) -> Tensor:
        """[R * K] where the new keys go in a layer seen as [slots * K * S, D]."""
        heads, length = self.cache.layers[0][0].shape[1:3]
        rows_RK = self.rows[:, None] * heads + torch.arange(heads, device=self.rows.device)
        return (rows_RK * length + self.positions[:, None]).flatten()

    @cached_property
    def _chunks(self) -> list[tuple[slice, int]]:
        """Rows that attend together, and their longest; padding costs less than one more call."""
        heads, width = (self.cache.layers[0][0].shape[each] for each in (1, 3))
        if self.rows.device.type != "cpu":
            return [(slice(0, len(self.lengths)), int(self.lengths.max()))]
        chunks, first, longest, needed = list[tuple[slice, int]](), 0, 0, 0
        starts = range(0, len(self.lengths), _CHUNK_ROWS)
        tops: list[int] = np.maximum.reduceat(self.lengths, starts).tolist()
        for start, top in zip(starts, tops, strict=True):
            padded = max(longest, top) * (start - first + _CHUNK_ROWS) - needed - top * _CHUNK_ROWS
            if start > first and padded * heads * width > _CHUNK_COST:
                chunks.append((slice(first, start), longest))
                first, longest, needed = start, 0, 0
            longest, needed = max(longest, top), needed + top * _CHUNK_ROWS
        chunks.append((slice(first, len(self.lengths)), longest))
        return chunks

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        cache_k, cache_v = self.cache.layers[layer]
        rows, heads, width = q.shape
        # On a flat view: indexing around the axis of heads takes twice as long.
        cache_k.view(-1, width).index_copy_(0, self._places, k.reshape(-1, width))
        cache_v.view(-1, v.shape[2]).index_copy_(0, self._places, v.reshape(-1, v.shape[2]))
        query = q.view(rows, k.shape[1], -1, width)
        outs = []
        for chunk, length in self._chunks:
            keys, values = cache_k[chunk, :, :length], cache_v[chunk, :, :length]
            bias = self.cache.bias[chunk, None, None, :length]
            if window is not None and window < length:
                oldest = self.positions[chunk, None, None, None] - window
                places = torch.arange(length, device=q.device)
                bias = bias.masked_fill(places <= oldest, -torch.inf)
            outs.append(_attend_to_rows(query[chunk], keys, values, bias, scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).view(rows, heads, -1)


def _attend_to_rows(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Attend with q [R, K, N / K, D] to keys and values [R, K, S, D]; bias is [R, 1, 1, S]."""
    if q.device.type == "cpu" and q.dtype.itemsize == 2:
        # A product of half precision copies all its keys; this call reads them where they are.
        # Queries that share a head's keys stand where others have a sequence.
        return scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)
    scores = torch.matmul(q * scale, keys.transpose(2, 3)).add_(bias)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values)


@dataclass(frozen=True, eq=False)
class MixedLayout:
    """An `AttentionLayout`: first the tokens of a tick, then those that some of its rows lack."""

    tick: DecodeLayout
    extension: ExtendLayout

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        count = len(self.tick.rows)
        # The tick's queries see the keys of the extension.
        behind = self.extension.attend(layer, q[count:], k[count:], v[count:], scale, window)
        first = self.tick.attend(layer, q[:count], k[:count], v[:count], scale, window)
        return torch.cat([first, behind])


@dataclass(eq=False)
class PrefilledAnswer(PendingAnswer):
    """A pending answer with the place of its prefilled context."""

    block: PromptBlock | None = None
    """The block in which its context was prefilled, until it has a row."""
    block_row: int = 0
    prompt_routes: NDArray[Any] | None = None
    """[P-1, layers, k] of the P tokens of its prompt but the last, where routes are recorded."""

    @cached_property
    def settings(self) -> SamplingParams:
        """Settings that a draw depends on: not the limit, which differs from turn to turn."""
        return replace(self.group.sampling_of(self.request), max_tokens=0)


@dataclass(frozen=True, eq=False)
class RetainedRow:
    """A row whose answer has ended and may be continued."""

    row: int
    """None of the live ones."""
    ids: IntArray
    """Context and answer; the last one has no keys yet."""


class Slots:
    """Token ids, log-probs, sampling parameters and cache of the rows, on the device.

    Args:
        longest: most tokens of a context and its answer, if that is known.
    """

    def __init__(
        self, count: int, dtype: torch.dtype, device: torch.device, longest: int | None = None
    ) -> None:
        self.count, self.device = count, device
        self.cache = SlotCache(count, dtype, device, longest)
        self.answers: list[PrefilledAnswer] = []
        self.ids = torch.zeros(count, 0, dtype=torch.long, device=device)
        """[count, S] context and answer."""
        self.logprobs = torch.zeros(count, 0, device=device)
        """[count, S] nats, of the answer's tokens alone."""
        self._numbers = torch.zeros(6, count, dtype=torch.long, device=device)
        self.at, self.limit, self.start, self.seed, self.shift, self.kind = self._numbers
        """[count] each: place of the newest token; the last place allowed; where the answer
        begins; key of its random numbers; what its position is less than its place, for images;
        place of its settings among `kinds`."""
        self.kinds: list[SamplingParams] = []
        """Settings of the answers here, and no others: what none asks for is not computed."""
        self.lengths = np.zeros(count, np.int64)
        """`at` + 1, known to the host without asking the device."""
        self.with_stop_strings: list[int] = []
        """Live rows whose answers stop strings may end."""
        self.retained: dict[tuple[int, int], RetainedRow] = {}
        """By the key of the answer, the oldest first."""
        self.rows = torch.arange(count, device=device)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def free_count(self) -> int:
        """Rows without an answer; some may be retained."""
        return self.count - len(self.answers)

    def fill_rows(self, answers: Sequence[PrefilledAnswer], block: PromptBlock) -> None:
        """Give answers the next rows; their contexts were prefilled in `block`."""
        self._make_room(len(answers))
        here, lengths = self._enter(answers)
        # The newest token of a context has no keys yet.
        self.cache.fill(block, [a.block_row for a in answers], here, lengths - 1)
        for answer in answers:
            answer.block = None

    def can_continue(self, answer: PrefilledAnswer) -> bool:
        """Return whether a row is retained that has the first part of an answer's context."""
        retained = self.retained.get(answer.key)
        if retained is None or len(answer.context) <= len(retained.ids):
            return False
        return np.array_equal(answer.context[: len(retained.ids)], retained.ids)

    def continue_rows(
        self, answers: Sequence[PrefilledAnswer]
    ) -> tuple[Tensor, ExtendLayout, PlacedImages | None]:
        """Give answers the next rows, with the keys of those retained for them.

        Returns:
            ids [T] of context tokens that have no keys yet, the layout to run them with, images.
        """
        by_row = {self.retained[answer.key].row: answer for answer in answers}
        known = {answer.key: len(self.retained.pop(answer.key).ids) - 1 for answer in answers}
        answers = [by_row[row] for row in self._make_room(len(answers), by_row)]
        here, lengths = self._enter(answers)
        self.cache.reserve(int(lengths.max()) + 1, here.stop)
        self.cache.show(here, lengths - 1)
        starts = np.array([known[answer.key] for answer in answers])
        layout = ExtendLayout(self, here.start, starts, lengths - 1)
        images = place_spans([answer.images for answer in answers], starts, lengths - 1)
        return self.ids[layout.token_rows, layout.targets], layout, images

    def _make_room(self, count: int, rows: Collection[int] = ()) -> list[int]:
        """Clear the next `count` rows; the oldest retained ones are lost where too few are left.

        Args:
            rows: not retained any more, but to become the cleared ones.

        Returns:
            `rows` in the order in which they are the cleared ones.
        """
        first, stop = len(self.answers), len(self.answers) + count
        while len(self.retained) > self.count - stop:
            del self.retained[next(iter(self.retained))]
        taken = {each.row for each in self.retained.values()}
        vacant = iter([row for row in range(stop, self.count) if row not in taken])
        behind = iter([row for row in rows if row >= stop])
        order = [row if row in rows else next(behind) for row in range(first, first + len(rows))]
        moves = {row: place for place, row in enumerate(order, first) if row != place}
        for key, each in self.retained.items():
            if each.row < stop:
                moves[each.row] = next(vacant)
                self.retained[key] = replace(each, row=moves[each.row])
        self._move_rows(moves)
        return order

    def _enter(self, answers: Sequence[PrefilledAnswer]) -> tuple[slice, IntArray]:
        """Give answers the next rows; return these, and the tokens of the contexts."""
        first, contexts = len(self.answers), [answer.context for answer in answers]
        here = slice(first, first + len(answers))
        lengths = np.array([len(context) for context in contexts])
        starts = np.array([len(a.group.prompt_ids) for a in answers])
        limits = starts + np.array([a.group.sampling.max_tokens for a in answers]) - 1
        if (grow := int(limits.max()) + 1 - self.ids.shape[1]) > 0:
            self.ids, self.logprobs = pad(self.ids, (0, grow)), pad(self.logprobs, (0, grow))
        for row, (answer, context) in enumerate(zip(answers, contexts, strict=True), first):
            self.ids[row, : len(context)] = torch.tensor(context)
            begun = slice(len(context) - len(answer.prefix), len(context))
            self.logprobs[row, begun] = torch.tensor(answer.prefix.logprobs)
        seeds = np.array([a.request.seed for a in answers], np.uint64).astype(np.int64)
        shifts = np.array([position_shift(answer.images) for answer in answers])
        numbers = np.stack([lengths - 1, limits, starts, seeds, shifts])
        self._numbers[:5, here] = torch.from_numpy(numbers).to(self.device)
        self.lengths[here] = lengths
        self.answers.extend(answers)
        self._index_settings(first)
        self._find_stop_strings()
        return here, lengths

    def _index_settings(self, first: int = 0) -> None:
        """Find the settings of rows from `first` on among `kinds`, in which others' are already."""
        settings = [answer.settings for answer in self.answers[first:]]
        self.kinds = list(dict.fromkeys([*(self.kinds if first else ()), *settings]))
        numbers = torch.tensor([self.kinds.index(each) for each in settings], dtype=torch.long)
        self.kind[first : first + len(settings)] = numbers.to(self.device)

    def _find_stop_strings(self) -> None:
        answers = enumerate(self.answers if any(each.stop for each in self.kinds) else ())
        self.with_stop_strings = [row for row, answer in answers if answer.settings.stop]

    def append(self, ids: Tensor, logprobs: Tensor) -> None:
        """Write one more token [R] and its log-prob [R] in each live row."""
        count = len(self.answers)
        rows, at = self.rows[:count], self.at[:count]
        at += 1
        self.lengths[:count] += 1
        self.ids[rows, at] = ids
        self.logprobs[rows, at] = logprobs

    def newest_ids(self, rows: Sequence[int], width: int) -> list[list[int]]:
        """The newest ids of rows, at most `width` of each and none of the prompt."""
        here = torch.tensor(rows, device=self.device)
        back = torch.arange(1 - width, 1, device=self.device)
        places = (self.at[here, None] + back).clamp_(min=0)
        ids = self.ids[here].gather(1, places).tolist()
        answers = [self._answer_length(row) for row in rows]
        return [row_ids[-min(n, width) :] for row_ids, n in zip(ids, answers, strict=True)]

    def _answer_length(self, row: int) -> int:
        return int(self.lengths[row]) - len(self.answers[row].group.prompt_ids)

    def segments(self, rows: Sequence[int], version: int) -> list[Segment]:
        """Return rows' answers so far, prefixes included; new tokens are `version`'s."""
        here = torch.tensor(rows, dtype=torch.long, device=self.device)
        ids, logprobs = self.ids[here].cpu().numpy(), self.logprobs[here].cpu().numpy()
        segments = []
        for place, row in enumerate(rows):
            end = int(self.lengths[row])
            part = place, slice(end - self._answer_length(row), end)
            # Copies: a view would keep the whole block alive.
            spans = self.answers[row].spans_to(self._answer_length(row), version)
            segments.append(Segment(ids[part].copy(), logprobs[part].copy(), spans))
        return segments

    def store_routes(self, routes: Tensor) -> None:
        """Keep the routes [R, layers, k] of the newest tokens of the live rows, just run."""
        count = len(self.answers)
        self.cache.layers[-1][0][self.rows[:count], :, self.at[:count]] = routes

    def routes(self, row: int) -> NDArray[Any]:
        """Return the routes [A, layers, k] of the tokens before each of an answer's A."""
        end = int(self.lengths[row]) - 1
        kept = self.cache.layers[-1][0][row, :, end - self._answer_length(row) : end]
        return kept.transpose(0, 1).contiguous().cpu().numpy()

    def free_rows(self, rows: Sequence[int], retain: Collection[int] = ()) -> None:
        """Free rows and move the last ones into the holes.

        Args:
            retain: rows of answers that may be continued.
        """
        gone, live = set(rows), len(self.answers) - len(rows)
        target = [row for row in sorted(gone) if row < live]
        source = [row for row in range(live, len(self.answers)) if row not in gone]
        moves = dict(zip(source, target, strict=True))
        swaps = {new: old for old, new in moves.items() if new in retain}
        for row in retain:
            key, ids = self.answers[row].key, self.ids[row, : int(self.lengths[row])]
            self.retained.pop(key, None)
            self.retained[key] = RetainedRow(swaps.get(row, row), ids.cpu().numpy().copy())
        self._move_rows(moves | swaps)
        for old, new in moves.items():
            self.answers[new] = self.answers[old]
        del self.answers[live:]
        if len(self.kinds) > 1:
            self._index_settings()
        self._find_stop_strings()

    def _move_rows(self, moves: Mapping[int, int]) -> None:
        """Copy rows to others; those may be copied at the same time."""
        if not moves:
            return
        source, target = list(moves), list(moves.values())
        here, there = (torch.tensor(each, device=self.device) for each in (source, target))
        self.cache.reserve(0, max(target) + 1)
        self.cache.move(here, there, int(self.lengths[source].max()))
        self.ids[there] = self.ids[here]
        self.logprobs[there] = self.logprobs[here]
        self._numbers[:, there] = self._numbers[:, here]
        self.lengths[target] = self.lengths[source]
