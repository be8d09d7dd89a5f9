"""Attention over packed sequences, each of which sees itself alone.

On the CPU (and in fp32 on CUDA) sequences of like length are gathered into padded blocks, one
causal attention call each, and scattered back. Padding stands to the right, where causality hides
it from every real query, so no mask is needed and no rounding depends on it. In half precision
on CUDA, variable-length attention takes the packed tokens as they are, if heads have a multiple of
8 channels.

Shapes: `T` packed tokens, `B` sequences, `N` query heads, `K` key/value heads, `D` head,
`R` rows of all padded blocks together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from winnow.types import IntArray

_HALF = (torch.bfloat16, torch.float16)
_CALL_COST = 1 << 19
"""The cost of one more attention call, in padded query-key-channel products (measured)."""


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Sequences of like length side by side: rows of a padded table."""

    shapes: tuple[tuple[int, int], ...]
    """The sequences and the padded length of each block."""
    token_of_row: Tensor
    """[R] the packed token in each row; padding repeats its sequence's last token."""
    row_of_token: Tensor
    """[T] the row of each packed token."""


class PackedLayout:
    """A `winnow.models.causal_lm.AttentionLayout` for whole sequences that lie end to end.

    Args:
        lengths: [B] tokens of each sequence, each at least 1.
        device: where queries, keys and values will be.
        kernels: type of device whose kernels attend, for a plan; None is that of `device`.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, kernels: str | None = None
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.device = device
        self._kernels = kernels or device.type
        self._blocks: dict[int, _Blocks] = {}
        self._bands: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend causally within each sequence: q [T, N, D], k and v [T, K, D] to [T, N, D]."""
        if len(q) == 0:
            return q
        if self._kernels == "cuda" and q.dtype in _HALF and q.shape[-1] % 8 == 0:
            return self._variable_length(q, k, v, scale, window)
        T, N, D = q.shape
        width = N * D
        if width not in self._blocks:
            self._blocks[width] = _plan_blocks(self.lengths, width, self.device)
        blocks = self._blocks[width]
        sizes = [n * length for n, length in blocks.shapes]
        to_rows = cast(Any, _ToRows).apply
        parts = [
            to_rows(x.reshape(T, -1), blocks.token_of_row, blocks.row_of_token).split(sizes)
            for x in (q, k, v)
        ]
        outs = []
        for (n, length), *qkv in zip(blocks.shapes, *parts, strict=True):
            q_b, k_b, v_b = (x.view(n, length, -1, D).transpose(1, 2) for x in qkv)
            k_b, v_b = match_heads(q_b, k_b, v_b, self._kernels)
            band = self._window_mask(window, length)
            out = F.scaled_dot_product_attention(
                q_b,
                k_b,
                v_b,
                attn_mask=band,
                is_causal=band is None,
                scale=scale,
                enable_gqa=k_b.shape[1] != N,
            )
            outs.append(out.transpose(1, 2).reshape(n * length, width))
        packed = cast(Any, _ToTokens).apply(torch.cat(outs), blocks.row_of_token)
        return cast(Tensor, packed).view(T, N, D)

    def _window_mask(self, window: int | None, length: int) -> Tensor | None:
        """Return [length, length], true where a query sees a key; None if causality is enough."""
        if window is None or window >= length:
            return None
        if (window, length) not in self._bands:
            seen = torch.ones(length, length, dtype=torch.bool, device=self.device)
            self._bands[window, length] = seen.tril_().triu_(1 - window)
        return self._bands[window, length]

    @cached_property
    def _offsets(self) -> Tensor:
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        return _to_device(offsets.astype(np.int32), self.device)

    def _variable_length(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest = int(self.lengths.max())
        is_grouped = q.shape[1] != k.shape[1]
        options: Any = {"enable_gqa": is_grouped} if _takes_enable_gqa(varlen_attn) else {}
        out = varlen_attn(
            q,
            k,
            v,
            self._offsets,
            self._offsets,
            longest,
            longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )
        return cast(Tensor, out)


def attention_operations() -> list[Any]:
    """Return PyTorch's operations that attend here: a checkpoint can keep their outputs."""
    from torch.nn.attention import varlen  # noqa: F401  registers its operation

    return [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]


@cache
def _takes_enable_gqa(varlen_attn: Callable[..., Any]) -> bool:
    """Return whether the function has the argument; PyTorch 2.11's groups heads without it."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def match_heads(q: Tensor, k: Tensor, v: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Repeat the heads of k and v [B, K, T, D] where no kernel takes fewer of them than q has.

    In fp32 CUDA's memory-efficient kernel wants equal numbers; without it PyTorch computes all
    scores [N, T, T], and keeps them for the backward pass.

    Args:
        kernels: type of device whose kernels attend.
    """
    copies = q.shape[1] // k.shape[1]
    if copies == 1 or kernels != "cuda" or q.dtype in _HALF:
        return k, v
    return k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)


class _ToRows(torch.autograd.Function):
    """Copy packed tokens [T, C] to padded rows [R, C].

    Backward reads rows instead of adding them up: a padded row's gradient is zero, because its
    output goes nowhere and no real query sees its key.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token_of_row: Tensor, row_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_token)
        return tokens.index_select(0, token_of_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_of_token,) = ctx.saved_tensors
        return grad.index_select(0, row_of_token), None, None


class _ToTokens(torch.autograd.Function):
    """Copy padded rows [R, C] to packed tokens [T, C]; padding drops out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_token)
        ctx.rows = len(rows)
        return rows.index_select(0, row_of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (row_of_token,) = ctx.saved_tensors
        rows = grad.new_zeros(ctx.rows, grad.shape[1])
        return rows.index_copy_(0, row_of_token, grad), None


def _plan_blocks(lengths: IntArray, width: int, device: torch.device) -> _Blocks:
    """Cut the sequences, sorted by length, into blocks whose padding costs less than a call."""
    order = np.argsort(lengths, kind="stable")
    members: list[list[int]] = [[]]
    waste = 0
    for i in order.tolist():
        length, block = int(lengths[i]), members[-1]
        if block:
            shorter = int(lengths[block[-1]])
            waste += len(block) * (length * length - shorter * shorter)
            if waste * width > _CALL_COST:
                block, waste = [], 0
                members.append(block)
        block.append(i)
    starts = np.cumsum(lengths) - lengths
    token_of_row, shapes = [], []
    row_of_token = np.empty(int(lengths.sum()), dtype=np.int64)
    first = 0
    for block in members:
        sizes = lengths[block][:, None]
        column = np.arange(sizes.max())[None]
        tokens = starts[block][:, None] + np.minimum(column, sizes - 1)
        rows = first + np.arange(tokens.size).reshape(tokens.shape)
        real = column < sizes
        row_of_token[tokens[real]] = rows[real]
        token_of_row.append(tokens.ravel())
        shapes.append(tokens.shape)
        first += tokens.size
    return _Blocks(
        tuple((n, length) for n, length in shapes),
        _to_device(np.concatenate(token_of_row), device),
        _to_device(row_of_token, device),
    )


def _to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    # A blocking copy would wait for all that a GPU has yet to do.
    return torch.from_numpy(numbers).to(device, non_blocking=True)
