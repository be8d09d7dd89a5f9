"""Sequence parallelism: several ranks run one micro-batch, each a part of its tokens (Ulysses).

Everything but attention looks at one token at a time, so each of `N` ranks runs the model on
`n = ceil(T / N)` neighbouring tokens. Where a layer attends, the ranks trade: each gives away its
tokens of the other ranks' heads, and gets all tokens of its own heads, to which any layout of the
whole micro-batch applies; the outputs go back the same way (S. A. Jacobs et al., DeepSpeed Ulysses,
arXiv 2309.14509). Log-probs and values [T] come out whole on every rank, so losses over sequences
are computed as without it. A rank's backward pass reaches the tokens that it ran, and gradients are
summed over all ranks, as they are over ranks that share the samples.

Shapes: `T` packed tokens of the micro-batch, `N` ranks of a group, `n` tokens of a rank, the last
ones padding, `Q` query heads, `K` key/value heads, `D` head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from winnow.errors import ModelError
from winnow.learning.batch import MicroBatch
from winnow.learning.runner import ModelRunner
from winnow.models.causal_lm import AttentionLayout, hidden_states
from winnow.models.packed_attention import PackedLayout
from winnow.models.vision import refuse_vision
from winnow.types import IntArray

FIELD = "trainer.strategy.sequence"
_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers in which tokens meet in the layout alone."""
_WHOLE_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest position of a call."""


def sequence_group(size: int) -> dist.ProcessGroup | None:
    """Join this rank with its neighbours in groups of `size`; None where each is on its own.

    All processes of the default group call it, in the same order as whatever else makes groups.
    """
    if size == 1:
        return None
    group, _ = cast(Any, dist).new_subgroups(size)
    return cast(dist.ProcessGroup, group)


def check_model(model: nn.Module, size: int) -> None:
    """Refuse a model whose sequences cannot be shared by `size` ranks.

    Raises:
        ModelError: its heads do not divide, or its layers mix tokens outside of attention.
    """
    config, setting = cast(Any, model).config, f"{FIELD}={size}"
    if size == 1:
        return
    refuse_vision(config, setting, f"set {FIELD}=1")
    heads = config.num_attention_heads
    if heads % size:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ModelError(
            f"{setting} does not divide the {heads} attention heads of {config.name_or_path}; "
            f"set it to one of {fitting}"
        )
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    ropes = sorted(_WHOLE_ROPE.intersection(_rope_types(getattr(config, "rope_parameters", None))))
    for kinds, what in ((layers, "layers"), (ropes, "rotary embedding")):
        if kinds:
            raise ModelError(
                f"{setting} splits each sequence over ranks, and the {what} of "
                f"{config.name_or_path} ({', '.join(kinds)}) need all of it; set {FIELD}=1"
            )


def _rope_types(parameters: object) -> Iterator[str]:
    """Yield the kinds of a model's rotary embeddings, which may be given by kind of layer."""
    for key, value in parameters.items() if isinstance(parameters, Mapping) else ():
        if key == "rope_type":
            yield value
        yield from _rope_types(value)


class SequenceRunner(ModelRunner):
    """Run a model on this rank's tokens of a micro-batch that all ranks of a group have.

    Args:
        group: the ranks; each calls `forward` with the same micro-batch.
        readout: as `ModelRunner` takes it.
    """

    def __init__(self, model: nn.Module, *readout: Any, group: dist.ProcessGroup) -> None:
        check_model(model, group.size())
        super().__init__(model, *readout)
        self._group = group

    def _states(self, micro: MicroBatch, at: Tensor, shift: int) -> tuple[Tensor, Tensor]:
        T = len(micro.token_ids)
        ids, positions = (self.local_tokens(x)[0] for x in (micro.token_ids, micro.positions))
        n = len(ids)
        # They ascend, and the host knows them: nobody waits for the device.
        places = np.cumsum(micro.lengths) - 1 if self._gives_score else micro.host_positions
        mine = self._local_part(places - shift, n)
        packed = PackedLayout(micro.contexts, micro.token_ids.device, self._kernels)
        layout = UlyssesLayout(packed, self._group, tokens=T)
        hidden = hidden_states(self.model, ids, positions, layout)
        return hidden.index_select(0, at[mine] - shift - n * self._group.rank()), at[mine]

    def can_share_prompts(self, device: torch.device) -> bool:
        return False

    def local_tokens(self, values: Tensor, fill: int = 0) -> tuple[Tensor, int]:
        T, N = len(values), self._group.size()
        n = -(-T // N)
        first = n * self._group.rank()
        whole = F.pad(values, (0, 0) * (values.ndim - 1) + (0, n * N - T), value=fill)
        return whole[first : first + n], min(max(T - first, 0), n)

    def _local_part(self, places: IntArray, n: int) -> slice:
        """Return which of `places`, in ascending order, are among this rank's n tokens."""
        first = n * self._group.rank()
        return slice(*np.searchsorted(places, (first, first + n)).tolist())

    def _scatter(self, values: Tensor, at: Tensor, micro: MicroBatch) -> Tensor:
        # Of each token one rank has a number and the others 0, whose sum is exact.
        placed = super()._scatter(values, at, micro)
        return cast(Tensor, cast(Any, _AllReduce).apply(placed, self._group))


class UlyssesLayout:
    """A `winnow.models.causal_lm.AttentionLayout` for a rank's tokens of a micro-batch.

    Args:
        inner: of the whole micro-batch; it is called with a part of the heads.
        group: the ranks that have the other tokens.
        tokens: of the whole micro-batch (T), without padding.
    """

    def __init__(self, inner: AttentionLayout, group: dist.ProcessGroup, tokens: int) -> None:
        self._inner, self._group, self._tokens = inner, group, tokens

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attend with q [n, Q, D] to k and v [n, K, D] of all ranks; returns [n, Q, D]."""
        N, n = self._group.size(), len(q)
        # A rank's query heads need their key heads, which several ranks may share: each gets a
        # copy, and autograd adds up what comes back.
        copies = N // math.gcd(N, k.shape[1])
        if copies > 1:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        local_heads = [x.shape[1] // N for x in (q, k, v)]
        # Together, as messages cost time: [N, n, heads, D], a slice for each rank.
        slices = [cast(Any, x).unflatten(1, (N, -1)).transpose(0, 1) for x in (q, k, v)]
        whole = _all_to_all(torch.cat(slices, 2), self._group).flatten(0, 1)[: self._tokens]
        q, k, v = cast(Any, whole).split(local_heads, 1)
        out = self._inner.attend(layer, q, k, v, scale, window)
        out = F.pad(out, (0, 0, 0, 0, 0, N * n - self._tokens))
        back = _all_to_all(cast(Any, out).unflatten(0, (N, n)), self._group)
        return back.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """An exchange of slices; a slice's gradient goes the way back, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, slices: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(slices, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _AllReduce(torch.autograd.Function):
    """A sum over ranks that go on alike: each has the whole gradient, and takes it as its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_to_all(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice r of [N, …] to rank r, and return what each rank has sent here, [N, …]."""
    return cast(Tensor, cast(Any, _AllToAll).apply(slices, group))


def _exchanged(slices: Tensor, group: dist.ProcessGroup) -> Tensor:
    slices = slices.contiguous()
    received = torch.empty_like(slices)
    dist.all_to_all_single(received, slices, group=group)
    return received
