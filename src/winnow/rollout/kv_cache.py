"""The static key/value cache of the embedded engine, and how decoding and prefill read it.

Rows are answers being written. A tick feeds one token a row; prefill runs whole prompts,
padded to one length, and leaves their keys and values in a block from which any number of
rows can be filled.

Shapes: `R` rows of a tick, `S` cache length, `P` prompts of a prefill, `L` their padded
length, `N` query heads, `K` key/value heads, `D` head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_GROWTH = 64


@dataclass(frozen=True, eq=False)
class PromptBlock:
    """Keys and values of prompts prefilled together: per layer a pair of [P, K, L, D]."""

    layers: list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class PrefillLayout:
    """Causal attention over P right-padded sequences of one length; keeps keys and values."""

    prompts: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `models.AttentionLayout`. Padding lies behind every real token: no mask needed."""
        assert layer == len(self.layers)
        q, k, v = (x.view(self.prompts, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        self.layers.append((k, v))
        length, enable_gqa = q.shape[2], q.shape[1] != k.shape[1]
        mask = None
        if window is not None and window < length:
            distance = torch.arange(length, device=q.device)
            distance = distance[:, None] - distance[None, :]
            mask = (distance >= 0) & (distance < window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2).flatten(0, 1)


class SlotCache:
    """Keys and values of `slots` rows, growing in length as answers need it."""

    def __init__(self, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.dtype, self.device = slots, dtype, device
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.bias = torch.zeros(slots, 0, dtype=dtype, device=device)
        """[slots, S]: 0 where a row has a key, -inf elsewhere."""

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`; grows at least by half, in steps of 64."""
        if length <= self.length:
            return
        length = max(length, self.length * 3 // 2)
        length = -(-length // _GROWTH) * _GROWTH
        bias = torch.full((self.slots, length), -torch.inf, dtype=self.dtype, device=self.device)
        bias[:, : self.length] = self.bias
        self.bias = bias
        self.layers = [(self._grown(k, length), self._grown(v, length)) for k, v in self.layers]
        self.length = length

    def _grown(self, old: Tensor, length: int) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], length, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def fill(
        self, block: PromptBlock, prompts: Tensor, rows: slice, lengths: Tensor, longest: int
    ) -> None:
        """Put prompts `prompts` of a block into rows `rows`; `lengths` of them are real.

        Nothing at or beyond `longest` is: the rest of the block is padding of these rows.
        """
        if not self.layers:
            # Zeros, not garbage: masked keys still enter a product with weight 0.
            self.layers = [
                (
                    k.new_zeros(self.slots, k.shape[1], self.length, k.shape[3]),
                    v.new_zeros(self.slots, v.shape[1], self.length, v.shape[3]),
                )
                for k, v in block.layers
            ]
        for (cache_k, cache_v), (k, v) in zip(self.layers, block.layers, strict=True):
            cache_k[rows, :, :longest] = k[:, :, :longest].index_select(0, prompts)
            cache_v[rows, :, :longest] = v[:, :, :longest].index_select(0, prompts)
        visible = torch.arange(self.length, device=self.device) < lengths[:, None]
        self.bias[rows] = torch.where(visible, 0.0, -torch.inf).to(self.dtype)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy rows `source` to rows `target`, up to position `length`."""
        for layer in self.layers:
            for cache in layer:
                written = cache[:, :, :length]
                written.index_copy_(0, target, written.index_select(0, source))
        self.bias[target] = self.bias[source]


@dataclass(frozen=True, eq=False)
class DecodeLayout:
    """One query a row against that row's keys; writes the new key and value first."""

    cache: SlotCache
    rows: Tensor
    """[R] 0..R-1"""
    positions: Tensor
    """[R] where the new keys go"""
    length: int
    """No row has a key at or behind it."""

    @cached_property
    def _places(self) -> Tensor:
        """[R * K] where the new keys go in a layer seen as [slots * K * S, D]."""
        heads, length = self.cache.layers[0][0].shape[1:3]
        rows_RK = self.rows[:, None] * heads + torch.arange(heads, device=self.rows.device)
        return (rows_RK * length + self.positions[:, None]).flatten()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `models.AttentionLayout`."""
        cache_k, cache_v = self.cache.layers[layer]
        rows, heads, width = q.shape
        # On a flat view: indexing around the axis of heads takes twice as long.
        cache_k.view(-1, width).index_copy_(0, self._places, k.reshape(-1, width))
        cache_v.view(-1, v.shape[2]).index_copy_(0, self._places, v.reshape(-1, v.shape[2]))
        kv_heads = k.shape[1]
        keys = cache_k[:rows, :, : self.length]
        values = cache_v[:rows, :, : self.length]
        bias = self.cache.bias[:rows, : self.length]
        if window is not None and window < self.length:
            oldest = self.positions[:, None] - window
            places = torch.arange(self.length, device=q.device)
            bias = bias.masked_fill(places <= oldest, -torch.inf)
        query = (q * scale).view(rows, kv_heads, heads // kv_heads, width)
        scores = torch.matmul(query, keys.transpose(2, 3)).add_(bias[:, None, None])
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.matmul(weights, values).view(rows, heads, width)
