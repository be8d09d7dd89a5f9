"""Attention over packed sequences, each of which sees itself alone.

On the CPU (and in fp32 on CUDA) sequences of like length are gathered into padded blocks, one
causal attention call each, and scattered back. Padding stands to the right, where causality hides
it from every real query, so no mask is needed and no rounding depends on it. In half precision
on CUDA, variable-length attention takes the packed tokens as they are, if heads have a multiple of
8 channels.

A sequence may continue another one, its prefix, which several continue and which is there once. On
the CPU each token attends to its sequence as if there were no prefix, and all tokens that continue
a prefix attend to that in another call; both are joined by the sums of their exponentials (as in
ring attention, arXiv 2310.01889). Variable-length attention gets copies of a prefix's keys and
values.

Shapes: `T` packed tokens, `B` sequences, `N` query heads, `K` key/value heads, `D` head,
`R` rows of all padded blocks together, `M` tokens that continue a prefix of `P` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
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

    def split(self, rows: Tensor) -> list[Tensor]:
        """Cut rows [R, N, D] into blocks [sequences, N, length, D]."""
        parts = torch.split(rows, [n * length for n, length in self.shapes])
        pairs = zip(parts, self.shapes, strict=True)
        return [cast(Any, part).unflatten(0, shape).transpose(1, 2) for part, shape in pairs]


@dataclass(frozen=True, eq=False)
class _Prefixes:
    """Sequences that others continue, and the tokens of these, prefix after prefix."""

    tokens: Tensor
    """[sum of P] the packed tokens of the prefixes."""
    continued: Tensor
    """[sum of M] the packed tokens of what continues them."""
    places: Tensor
    """[sum of M] their places, counted from the prefix's first token."""
    sizes: tuple[tuple[int, int], ...]
    """M and P of each prefix."""

    def inputs(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> Iterator[Any]:
        """Yield each prefix's part of tensors [T, N, D], as [1, N, M, D] or [1, K, P, D]."""
        counts = [list(each) for each in zip(*self.sizes, strict=True)]
        parts = [torch.split(x.index_select(0, self.continued), counts[0]) for x in of_queries]
        parts += [torch.split(x.index_select(0, self.tokens), counts[1]) for x in of_keys]
        return (tuple(x.transpose(0, 1)[None] for x in each) for each in zip(*parts, strict=True))

    def window_masks(self, window: int | None) -> Iterator[Tensor | None]:
        """Yield [M, P] of each prefix, true where a token sees one of it; None where all do."""
        parts = torch.split(self.places, [m for m, _ in self.sizes])
        for places, (_, P) in zip(parts, self.sizes, strict=True):
            if window is None or int(places.max()) < window:
                yield None
            else:
                yield places[:, None] - torch.arange(P, device=places.device) < window


def can_share_prefixes(kernels: str, dtype: torch.dtype, channels: int) -> bool:
    """Return whether sequences may continue a prefix in a model's attention.

    Args:
        kernels: type of device whose kernels attend.
        channels: of a head (D).
    """
    return kernels == "cpu" or _takes_packed(kernels, dtype, channels)


def _takes_packed(kernels: str, dtype: torch.dtype, channels: int) -> bool:
    """Return whether variable-length attention has a kernel."""
    return kernels == "cuda" and dtype in _HALF and channels % 8 == 0


class PackedLayout:
    """A `winnow.models.causal_lm.AttentionLayout` for whole sequences that lie end to end.

    Args:
        lengths: [B] tokens of each sequence, each at least 1.
        device: where queries, keys and values will be.
        kernels: type of device whose kernels attend, for a plan; None is that of `device`.
        prefixes: [B] the sequence that each one continues, -1 for none; a prefix has none itself.
            Where `can_share_prefixes` is false there must be none.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        kernels: str | None = None,
        prefixes: Sequence[int] = (),
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.device = device
        self._kernels = kernels or device.type
        self._prefix_of = np.asarray(prefixes or [-1] * len(lengths), dtype=np.int64)
        self._has_prefixes = bool((self._prefix_of >= 0).any())
        self._blocks: dict[int, _Blocks] = {}
        self._bands: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend causally within each sequence: q [T, N, D], k and v [T, K, D] to [T, N, D]."""
        if len(q) == 0:
            return q
        if _takes_packed(self._kernels, q.dtype, q.shape[-1]):
            return self._variable_length(q, k, v, scale, window)
        if self._has_prefixes:
            assert self._kernels == "cpu", "no kernel returns sums of exponentials"
            return cast(Tensor, cast(Any, _PrefixAttention).apply(q, k, v, self, scale, window))
        T, N, D = q.shape
        width = N * D
        blocks = self.blocks(width)
        to_rows, rows = cast(Any, _ToRows).apply, (blocks.token_of_row, blocks.row_of_token)
        parts = [
            blocks.split(to_rows(x.reshape(T, -1), *rows).view(-1, x.shape[1], D))
            for x in (q, k, v)
        ]
        outs = []
        for (n, length), q_b, k_b, v_b in zip(blocks.shapes, *parts, strict=True):
            k_b, v_b = match_heads(q_b, k_b, v_b, self._kernels)
            band = self.window_mask(window, length)
            options: Any = {"scale": scale, "enable_gqa": k_b.shape[1] != N}
            out = F.scaled_dot_product_attention(
                q_b, k_b, v_b, attn_mask=band, is_causal=band is None, **options
            )
            outs.append(out.transpose(1, 2).reshape(n * length, width))
        packed = cast(Any, _ToTokens).apply(torch.cat(outs), blocks.row_of_token)
        return cast(Tensor, packed).view(T, N, D)

    def blocks(self, width: int) -> _Blocks:
        """Return the padded blocks of all sequences for queries of N * D channels."""
        if width not in self._blocks:
            self._blocks[width] = _plan_blocks(self.lengths, width, self.device)
        return self._blocks[width]

    def window_mask(self, window: int | None, length: int) -> Tensor | None:
        """Return [length, length], true where a query sees a key; None if causality is enough."""
        if window is None or window >= length:
            return None
        if (window, length) not in self._bands:
            seen = torch.ones(length, length, dtype=torch.bool, device=self.device)
            self._bands[window, length] = seen.tril_().triu_(1 - window)
        return self._bands[window, length]

    @cached_property
    def prefixes(self) -> _Prefixes:
        """The sequences that others continue."""
        starts, lengths = np.cumsum(self.lengths) - self.lengths, self.lengths
        tokens, continued, places, sizes = list[IntArray](), list[IntArray](), list[IntArray](), []
        for prefix in np.unique(self._prefix_of[self._prefix_of >= 0]).tolist():
            tokens.append(starts[prefix] + np.arange(lengths[prefix]))
            members = np.flatnonzero(self._prefix_of == prefix)
            offsets = [np.arange(n) for n in lengths[members].tolist()]
            continued += [
                first + each for first, each in zip(starts[members], offsets, strict=True)
            ]
            places += [lengths[prefix] + each for each in offsets]
            sizes.append((int(lengths[members].sum()), int(lengths[prefix])))
        first, second, third = (
            _to_device(np.concatenate(x), self.device) for x in (tokens, continued, places)
        )
        return _Prefixes(first, second, third, tuple(sizes))

    @cached_property
    def _packed_keys(self) -> tuple[Tensor, Tensor, int]:
        """The packed tokens that all sequences attend to, their offsets and the longest."""
        starts, parts = np.cumsum(self.lengths) - self.lengths, list[IntArray]()
        for i, prefix in enumerate(self._prefix_of.tolist()):
            each = [prefix, i] if prefix >= 0 else [i]
            parts.append(np.concatenate([starts[s] + np.arange(self.lengths[s]) for s in each]))
        lengths = [*map(len, parts)]
        tokens = _to_device(np.concatenate(parts), self.device)
        return tokens, _offsets(lengths, self.device), max(lengths)

    @cached_property
    def _query_offsets(self) -> Tensor:
        return _offsets(self.lengths, self.device)

    def _variable_length(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest = longest_keys = int(self.lengths.max())
        offsets = key_offsets = self._query_offsets
        if self._has_prefixes:
            tokens, key_offsets, longest_keys = self._packed_keys
            k, v = (copy_tokens(x, tokens) for x in (k, v))
        options: Any = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
        if _takes_enable_gqa(varlen_attn):
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        bounds = offsets, key_offsets, longest, longest_keys
        return cast(Tensor, varlen_attn(q, k, v, *bounds, **options))


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


class _PrefixAttention(torch.autograd.Function):
    """Attention on the CPU where some sequences continue a prefix.

    The kernel's backward pass takes the output and the logarithm of the exponentials' sum; with
    those over all keys of a query it returns the gradients of the part that it is called with.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        scale: float,
        window: int | None,
    ) -> Tensor:
        blocks, outs, sums = layout.blocks(q[0].numel()), [], []
        parts = [blocks.split(x.index_select(0, blocks.token_of_row)) for x in (q, k, v)]
        for (_, length), *qkv in zip(blocks.shapes, *parts, strict=True):
            bias = _bias(layout.window_mask(window, length), q)
            part, lse = _FLASH(*qkv, 0.0, bias is None, attn_mask=bias, scale=scale)
            outs.append(part.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        out, lse = (torch.cat(x).index_select(0, blocks.row_of_token) for x in (outs, sums))
        prefixes, at = layout.prefixes, layout.prefixes.continued
        outs, sums = [], []
        inputs = prefixes.inputs([q], [k, v])
        for qkv, seen in zip(inputs, prefixes.window_masks(window), strict=True):
            part, part_lse = _FLASH(*qkv, attn_mask=_bias(seen, q), scale=scale)
            outs.append(part[0].transpose(0, 1))
            sums.append(part_lse[0].T)
        pair = torch.stack([lse[at], torch.cat(sums)])
        lse[at] = pair.logsumexp(0)
        weight, prefix_weight = pair.softmax(0)[..., None]
        out[at] = (weight * out[at] + prefix_weight * torch.cat(outs)).to(out.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = layout, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale, window = ctx.options
        blocks = layout.blocks(q[0].numel())
        rows = [x.index_select(0, blocks.token_of_row) for x in (q, k, v, out, lse[..., None])]
        # Padding must bring no gradient.
        grad_rows = torch.zeros_like(rows[0]).index_copy_(0, blocks.row_of_token, grad)
        of_blocks = []
        parts = map(blocks.split, (grad_rows, *rows))
        for (_, length), *tensors, lse_b in zip(blocks.shapes, *parts, strict=True):
            bias = _bias(layout.window_mask(window, length), q)
            options = {"attn_mask": bias, "scale": scale}
            grads = _FLASH_BACKWARD(*tensors, lse_b[..., 0], 0.0, bias is None, **options)
            of_blocks.append([x.transpose(1, 2).flatten(0, 1) for x in grads])
        dq, dk, dv = (
            torch.cat(x).index_select(0, blocks.row_of_token) for x in zip(*of_blocks, strict=True)
        )
        prefixes, of_prefixes = layout.prefixes, []
        inputs = prefixes.inputs([grad, q, out, lse[..., None]], [k, v])
        for each, seen in zip(inputs, prefixes.window_masks(window), strict=True):
            grad_p, q_p, out_p, lse_p, k_p, v_p = each
            tensors = [grad_p, q_p, k_p, v_p, out_p, lse_p[..., 0]]
            grads = _FLASH_BACKWARD(*tensors, 0.0, False, attn_mask=_bias(seen, q), scale=scale)
            of_prefixes.append([x[0].transpose(0, 1) for x in grads])
        more_q, more_k, more_v = (torch.cat(x) for x in zip(*of_prefixes, strict=True))
        dq.index_add_(0, prefixes.continued, more_q)
        dk.index_add_(0, prefixes.tokens, more_k)
        dv.index_add_(0, prefixes.tokens, more_v)
        return dq, dk, dv, None, None, None


_FLASH: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _bias(seen: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what is added to scores so that only those that are seen count.

    It is finite: of a query that sees no key of a part, that part's weight is 0 and not NaN.
    """
    if seen is None:
        return None
    return like.new_zeros(seen.shape).masked_fill_(~seen, torch.finfo(like.dtype).min / 2)


class _CopyTokens(torch.autograd.Function):
    """Copy tokens [T, …] as often as they are named; gradients are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, named: Tensor) -> Tensor:
        ctx.save_for_backward(named)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, named)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (named,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros(ctx.tokens, *grad.shape[1:], dtype=exact)
        return sums.index_add_(0, named, grad.to(exact)).to(grad.dtype), None


def copy_tokens(tokens: Tensor, named: Tensor) -> Tensor:
    """Return tokens [T, …] as often as `named` names them; their gradients are summed in fp32."""
    return cast(Tensor, cast(Any, _CopyTokens).apply(tokens, named))


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


def _offsets(lengths: Sequence[int] | IntArray, device: torch.device) -> Tensor:
    """Return where sequences that lie end to end begin, and the end of the last."""
    return _to_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


def _to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    # A blocking copy would wait for all that a GPU has yet to do.
    return torch.from_numpy(numbers).to(device, non_blocking=True)
