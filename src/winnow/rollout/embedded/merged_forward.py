"""A decode tick without modules: Llama, Qwen2 and Qwen3 in fp32 on the CPU.

A tick runs one token a row through all layers. From copies of the weights that are merged for it (a
matrix for queries, keys and values, one for gate and up, each with the weight of the norm before it
folded in) that takes a third of the operations of Hugging Face's modules. Matrices large enough to
be read from memory in each tick are packed once in the order in which oneDNN's product reads them.

The copies take as much memory as the blocks and the output layer; they are made at the first tick
after weights have changed.

Shapes: `R` rows of a tick, `H` width, `N` query heads, `K` key/value heads, `D` head, `V` ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from winnow.models.causal_lm import AttentionLayout, output_head
from winnow.models.fused_layers import is_gated_mlp, is_norm

_MODELS = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_PACKED = 1 << 18
"""Elements from which packing a matrix gains more than the 40 microseconds that oneDNN takes for
each call (measured)."""
_MULTIPLY = "_linear_pointwise"
"""An operation of PyTorch's own compiler; where it is absent, no matrix is packed."""
_PACKED_ROWS = 64
"""Rows of a product for which matrices are packed; others are computed from the same bytes."""


def can_merge(model: nn.Module) -> bool:
    """Return whether `MergedForward` computes what the modules of a model compute."""
    config, body = cast(Any, model).config, cast(Any, model).base_model
    if type(model).__name__ not in _MODELS or not type(model).__module__.startswith("transformers"):
        return False
    return (
        "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        and all(_is_plain(p) for p in model.parameters())
        and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        and is_norm(body.norm)
        and output_head(model).bias is None
        and all(map(_is_known_layer, body.layers))
    )


def _is_plain(weight: Tensor) -> bool:
    is_known = weight.dtype == torch.float32 and weight.device.type == "cpu"
    is_whole = type(weight) is nn.Parameter and weight.is_contiguous()
    return is_known and is_whole and not weight.is_inference()  # which have no version


def _is_known_layer(layer: Any) -> bool:
    attention = layer.self_attn
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return (
        all(type(projection) is nn.Linear for projection in projections)  # an adapter's is not
        and attention.o_proj.bias is None
        and all(map(is_norm, norms))
        and is_gated_mlp(layer.mlp)
    )


class _Product:
    """A product with a copy of a weight [out, in]: x [R, in] to x W' + bias [R, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = weight.numel() >= _PACKED and hasattr(torch.ops.mkldnn, _MULTIPLY)
        if self._is_packed:
            pack = torch.ops.mkldnn._reorder_linear_weight
            self._weight = cast(Tensor, pack(weight, _PACKED_ROWS))
        else:
            self._weight = weight.T.contiguous()

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """Return the product, with `addend` [R, out] added if there is one."""
        if self._is_packed:
            multiply = getattr(torch.ops.mkldnn, _MULTIPLY).default
            y: Tensor = multiply(x, self._weight, self._bias, "none", [], "")
            return y if addend is None else y.add_(addend)
        addend = self._bias if addend is None else addend
        return x @ self._weight if addend is None else torch.addmm(addend, x, self._weight)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The merged weights of a block."""

    qkv: _Product
    qk_norm: Tensor | None
    """[N + K, D] of Qwen3."""
    out: _Product
    gate_up: _Product
    down: _Product


class MergedForward:
    """The forward pass of decode ticks from merged copies of a model's weights.

    The copies follow the weights: each tick compares the parameters' addresses and version
    counters, and a number of each, since fused optimizers and operations on `.data` leave the
    counters alone. Behind what changes a few numbers on `.data` call `drop`.

    Args:
        model: one that `can_merge`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._body = model, cast(Any, model).base_model
        config = cast(Any, model).config
        self._eps: float = config.rms_norm_eps
        attention = self._body.layers[0].self_attn
        self._width, self._scaling = attention.head_dim, attention.scaling
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._parameters = list(model.parameters())
        self.drop()

    def drop(self) -> None:
        """Free the copies; the next tick makes them anew."""
        self._layers: list[_Layer] = []
        self._head: _Product | None = None
        self._places: list[tuple[int, int]] = []
        self._samples: list[Tensor] = []
        self._values = torch.empty(0)

    def logits(self, ids: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """Return logits [R, V] of the newest tokens [R], whose keys and values `layout` takes."""
        self._refresh()
        assert self._head is not None
        x, heads = self._body.embed_tokens.weight[ids], self._heads + self._kv_heads
        cos, sin = (each[0][:, None] for each in self._body.rotary_emb(x, positions[None]))
        half = self._width // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x)).view(len(x), -1, self._width)
            qk, v = qkv[:, :heads], qkv[:, heads:]
            if layer.qk_norm is not None:
                qk = self._normed(qk).mul_(layer.qk_norm)
            qk = (qk * cos).addcmul_(qk.roll(half, -1), sin)
            q, k = qk[:, : self._heads], qk[:, self._heads :]
            attended = layout.attend(index, q, k, v, self._scaling, None)
            x = layer.out(attended.reshape(len(x), -1), x)
            gate, up = layer.gate_up(self._normed(x)).chunk(2, -1)
            x = layer.down(silu(gate).mul_(up), x)
        return self._head(self._normed(x))

    def _normed(self, x: Tensor) -> Tensor:
        """Return x / rms(x) over the last axis, without a weight."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * norm.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()

    def _refresh(self) -> None:
        """Merge the weights if they have changed."""
        places = [(each.data_ptr(), each._version) for each in self._parameters]
        if places == self._places and torch.equal(torch.cat(self._samples), self._values):
            return
        self.drop()
        self._layers.extend(map(self._merge, self._body.layers))
        self._head = _Product(output_head(self._model).weight * self._body.norm.weight)
        self._places = places
        self._samples = [each.detach().view(-1)[:1] for each in self._parameters]
        self._values = torch.cat(self._samples)

    def _merge(self, layer: Any) -> _Layer:
        attention, mlp, qk_norm, bias = layer.self_attn, layer.mlp, None, None
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        qkv = torch.cat([each.weight for each in projections])
        if attention.q_proj.bias is not None:
            bias = torch.cat([each.bias for each in projections])
        if hasattr(attention, "q_norm"):
            q_norm = attention.q_norm.weight.expand(self._heads, -1)
            qk_norm = torch.cat([q_norm, attention.k_norm.weight.expand(self._kv_heads, -1)])
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return _Layer(
            qkv=_Product(qkv.mul_(layer.input_layernorm.weight), bias),
            qk_norm=qk_norm,
            out=_Product(attention.o_proj.weight),
            gate_up=_Product(gate_up.mul_(layer.post_attention_layernorm.weight)),
            down=_Product(mlp.down_proj.weight),
        )
