"""The static key/value cache of the embedded engine, and the attention of decoding and prefill.

Rows are answers being written. A tick feeds one token a row; prefill runs whole prompts,
padded to one length, and leaves their keys and values in a block from which any number of
rows can be filled.

Shapes: `R` rows of a tick, `S` cache length, `P` prompts of a prefill, `L` their padded
length, `N` query heads, `K` key/value heads, `D` head width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from winnow.errors import ConfigError

log = logging.getLogger(__name__)

_GROWTH = 64


def slots_that_fit(
    config: Any, dtype: torch.dtype, slots: int, longest: int, gib: float | None
) -> int:
    """Return how many rows of the longest context the cache can hold in `gib`, at most `slots`.

    Args:
        config: of a Hugging Face model.
        longest: most tokens of a prompt and its answer.

    Raises:
        ConfigError: not one fits.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token = 2 * config.num_hidden_layers * kv_heads * width * dtype.itemsize
    longest = min(longest, getattr(config, "max_position_embeddings", None) or longest)
    row_gib = -(-longest // _GROWTH) * _GROWTH * token / 2**30
    log.info(
        "the KV cache takes up to %.3g GiB: %d slots of %d tokens, %.3g KiB a token",
        *(slots * row_gib, slots, longest, token / 1024),
    )
    if gib is None:
        return slots
    fit = min(slots, int(gib / row_gib))
    if fit < 1:
        raise ConfigError(
            f"rollout.engine.cache_gib {gib:g} holds not one answer: {longest:,} tokens take "
            f"{row_gib:.3g} GiB; raise it, or lower rollout.max_response_tokens"
        )
    if fit < slots:
        log.warning(
            "rollout.engine.slots %d is reduced to %d, as many as rollout.engine.cache_gib %g "
            "holds; raise that, or lower the slots or rollout.max_response_tokens",
            *(slots, fit, gib),
        )
    return fit


@dataclass(frozen=True, eq=False)
class PromptBlock:
    """Keys and values of prompts prefilled together: per layer a pair of [P, K, L, D]."""

    layers: list[tuple[Tensor, Tensor]]


@dataclass(eq=False)
class PrefillLayout:
    """An `AttentionLayout`: causal over P right-padded sequences; keeps keys and values."""

    prompts: int
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        # Padding lies behind every real token: it needs no mask.
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
    """Keys and values of `slots` rows, growing in length as answers need it.

    Args:
        longest: length beyond which no answer will need it, if that is known.
    """

    def __init__(
        self, slots: int, dtype: torch.dtype, device: torch.device, longest: int | None = None
    ) -> None:
        self.slots, self.dtype, self.device, self.longest = slots, dtype, device, longest
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.bias = torch.zeros(slots, 0, dtype=dtype, device=device)
        """[slots, S]: 0 where a row has a key, -inf elsewhere."""

    def reserve(self, length: int) -> None:
        """Make room for positions below `length`; grows at least by half, in steps of 64."""
        if length <= self.length:
            return
        ahead = self.length * 3 // 2
        length = max(length, ahead if self.longest is None else min(ahead, self.longest))
        length = -(-length // _GROWTH) * _GROWTH
        bias = torch.full((self.slots, length), -torch.inf, dtype=self.dtype, device=self.device)
        bias[:, : self.length] = self.bias
        self.bias = bias
        for index, (k, v) in enumerate(self.layers):  # the old one of a layer is given back at once
            self.layers[index] = self._grown(k, length), self._grown(v, length)
        self.length = length

    def _grown(self, old: Tensor, length: int) -> Tensor:
        new = old.new_zeros(old.shape[0], old.shape[1], length, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def fill(
        self, block: PromptBlock, prompts: Tensor, rows: slice, lengths: Tensor, longest: int
    ) -> None:
        """Copy prompts of a block into rows.

        Args:
            prompts: [rows] place of each row's prompt in the block.
            lengths: [rows] real tokens of each; the rest is padding.
            longest: the largest of `lengths`.
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
    """An `AttentionLayout`: a query a row against that row's keys, the new one included."""

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
