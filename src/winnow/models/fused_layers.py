"""Faster norms and feed-forward layers for training on the CPU, with the same results.

transformers writes them in many small operations, each of which allocates, and autograd doubles
that. Here each is one autograd function whose backward pass is written by hand, and the
feed-forward layer runs in chunks of tokens that stay in the cache. A layer is replaced only
when it is of the known form *and* answers a probe alike, so a model with another norm keeps its
own code. Half precision keeps transformers' code too, with its rounding.

Shapes: `T` tokens, `H` width, `M` width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_CHUNK_TOKENS = 1024
_EXACT = (torch.float32, torch.float64)
_PROBE_TOLERANCE = 1e-5


def fuse_layers(model: nn.Module) -> int:
    """Replace RMS norms and gated SiLU layers in place; weights, names and results stay.

    Returns:
        How many layers were replaced.
    """
    replaced = 0
    for module in model.modules():
        if isinstance(module, _FusedNorm | _FusedGatedMLP):
            continue
        if is_norm(module):
            replaced += _swap(module, _FusedNorm, cast(Any, module).weight.shape[0])
        elif is_gated_mlp(module):
            replaced += _swap(module, _FusedGatedMLP, cast(Any, module).gate_proj.in_features)
    return replaced


class _FusedNorm(nn.Module):
    """A base of fused norms that stands before a Hugging Face RMSNorm in the method order."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype not in _EXACT:
            return cast(Tensor, super().forward(hidden_states))
        if not torch.is_grad_enabled():
            return _normed(hidden_states, self.variance_epsilon)[0].mul_(self.weight)
        return cast(Tensor, _apply(_RMSNorm, hidden_states, self.weight, self.variance_epsilon))


class _FusedGatedMLP(nn.Module):
    """A base of fused layers that stands before a Hugging Face gated MLP in the method order."""

    def forward(self, x: Tensor) -> Tensor:
        # Adapters may have taken the place of a linear layer since.
        if x.dtype not in _EXACT or not is_gated_mlp(self):
            return cast(Tensor, super().forward(x))
        mlp = cast(Any, self)
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        if not torch.is_grad_enabled():
            return _gated_mlp(x, *weights)
        return cast(Tensor, _apply(_GatedMLP, x, *weights))


class _RMSNorm(torch.autograd.Function):
    """Compute y = x / rms(x) * weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, eps)
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        size, product = len(weight), grad * normed
        rows = product.reshape(-1, size)
        along, grad_weight = torch.mv(rows, weight).div_(-size).view(scale.shape), rows.sum(0)
        # In the memory of the product: a fresh tensor of this size costs page faults.
        grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, along).mul_(scale)
        return grad_x, grad_weight, None


class _GatedMLP(torch.autograd.Function):
    """Compute y = (silu(x gate') * (x up')) down'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        between: list[Tensor] = []
        y = _gated_mlp(x, gate, up, down, between)
        ctx.save_for_backward(x.reshape(-1, x.shape[-1]), gate, up, down, *between)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, gate, up, down, *between = ctx.saved_tensors
        grad_TH = grad.reshape(-1, grad.shape[-1])
        grad_x_TH = torch.empty_like(x_TH)
        is_trained = any(ctx.needs_input_grad[1:])
        weights = (gate, up, down) if is_trained else ()
        grads = [torch.zeros_like(weight) for weight in weights]
        chunks = (_chunks(grad_TH), _chunks(x_TH), _chunks(grad_x_TH))
        for grad_c, x_c, out_c, gate_c, up_c in zip(
            *chunks, between[::2], between[1::2], strict=True
        ):
            active_c = F.silu(gate_c)
            grad_product_c = torch.mm(grad_c, down)
            grad_gate_c = torch.ops.aten.silu_backward(grad_product_c * up_c, gate_c)
            grad_up_c = grad_product_c.mul_(active_c)
            if is_trained:
                grads[0].addmm_(grad_gate_c.T, x_c)
                grads[1].addmm_(grad_up_c.T, x_c)
                grads[2].addmm_(grad_c.T, active_c.mul_(up_c))
            torch.mm(grad_gate_c, gate, out=out_c).addmm_(grad_up_c, up)
        return grad_x_TH.view(grad.shape), *(grads or (None, None, None))


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x), and 1 / rms(x)."""
    scale: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * scale, scale


def _gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, between: list[Tensor] | None = None
) -> Tensor:
    """Compute the layer's output; `between` takes each chunk's `gate` and `up` values [C, M]."""
    x_TH = x.reshape(-1, x.shape[-1])
    y_TH = torch.empty_like(x_TH)
    for x_c, y_c in zip(_chunks(x_TH), _chunks(y_TH), strict=True):
        gate_c, up_c = x_c @ gate.T, x_c @ up.T
        torch.mm(F.silu(gate_c).mul_(up_c), down.T, out=y_c)
        if between is not None:
            between += [gate_c, up_c]
    return y_TH.view(x.shape)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    return cast(Sequence[Tensor], cast(Any, tensor).split(_CHUNK_TOKENS))


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face RMS norm."""
    norm = cast(Any, module)
    return (
        type(module).__name__.endswith("RMSNorm")
        and isinstance(getattr(norm, "variance_epsilon", None), float)
        and isinstance(getattr(norm, "weight", None), nn.Parameter)
    )


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module is a gated SiLU layer of three plain linear ones without biases."""
    mlp = cast(Any, module)
    layers = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(type(layer) is nn.Linear and layer.bias is None for layer in layers)
        and "silu" in type(getattr(mlp, "act_fn", None)).__name__.lower()
    )


def _swap(module: nn.Module, fused: type[nn.Module], width: int) -> bool:
    """Let the module answer by the fused code, unless a probe says that it would differ."""
    original = type(module)
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, width, generator=generator, dtype=torch.float32).to(weight)
    with torch.no_grad():
        expected = module(probe)
        module.__class__ = type(original.__name__, (fused, original), {})
        same = torch.allclose(module(probe), expected, rtol=0, atol=_PROBE_TOLERANCE)
    if not same:
        module.__class__ = original
    return same
