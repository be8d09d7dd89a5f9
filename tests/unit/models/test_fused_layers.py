"""Fused layers against those they replace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from winnow.models import fused_layers as fusing
from winnow.models.fused_layers import fuse_layers


class TinyRMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6
        self.offset = offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.offset + self.weight) * x.to(hidden_states.dtype)


class TinyMLP(nn.Module):
    """As transformers writes it."""

    def __init__(self, act: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(12, 20, bias=False)
        self.up_proj = nn.Linear(12, 20, bias=False)
        self.down_proj = nn.Linear(20, 12, bias=False)
        self.act_fn = act
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of input and parameters, under a fixed cotangent."""
    x = x.detach().requires_grad_()
    y = module(x)
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return [y, *torch.autograd.grad(y, (x, *module.parameters()), cotangent)]


@pytest.mark.parametrize("make", [lambda: TinyRMSNorm(12), lambda: TinyMLP(nn.SiLU())])
@pytest.mark.parametrize("shape", [(1, 7, 12), (1, 5, 3, 12), (1, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_a_fused_layer_gives_the_same_values_and_gradients(
    make: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fusing, "_CHUNK_TOKENS", 4)
    plain = make().to(dtype)
    fused = copy.deepcopy(plain)
    assert fuse_layers(fused) == 1
    assert list(fused.state_dict()) == list(plain.state_dict())
    x = torch.randn(shape, dtype=dtype)
    for mine, theirs in zip(results(fused, x), results(plain, x), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "module",
    [
        TinyRMSNorm(12, offset=1.0),
        TinyMLP(nn.GELU()),
        TinyMLP(nn.SiLU(), factor=2.0),
        nn.LayerNorm(12),
    ],
)
def test_a_layer_of_another_form_keeps_its_own_code(module: nn.Module) -> None:
    before = type(module)
    assert fuse_layers(module) == 0
    assert type(module) is before


@pytest.mark.bits
def test_bf16_keeps_the_layers_own_rounding() -> None:
    plain = nn.Sequential(TinyRMSNorm(12), TinyMLP(nn.SiLU())).bfloat16()
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    x = torch.randn(5, 12).bfloat16()
    assert torch.equal(fused(x), plain(x))


@pytest.mark.bits
def test_without_gradient_the_bits_are_the_same() -> None:
    model = nn.Sequential(TinyRMSNorm(12), TinyMLP(nn.SiLU()))
    fuse_layers(model)
    x = torch.randn(9, 12)
    trained = model(x)
    with torch.no_grad():
        assert torch.equal(model(x), trained)
