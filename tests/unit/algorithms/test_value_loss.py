"""The critic's loss: values by hand, a float64 loop, finite differences, and its figures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from winnow.algorithms.losses import explained_variance, value_loss

numbers = st.floats(-1000, 1000, width=32)
rows = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=12)


def tensors(*columns: list[float]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def every(values: Tensor) -> Tensor:
    return torch.ones(len(values), dtype=torch.bool)


def test_values_worked_by_hand() -> None:
    # Old value 1, return 3. At 1.2 within reach; at 2 clipped to 1.5; at 0 to 0.5, further away.
    values, old, returns = tensors([1.2, 2.0, 0.0], [1.0] * 3, [3.0] * 3)
    losses = value_loss(values, old, returns, every(values), clip=0.5)[0].tolist()
    assert losses == pytest.approx([0.5 * 1.8**2, 0.5 * 1.5**2, 0.5 * 3.0**2])
    unclipped = value_loss(values, old, returns, every(values), clip=None)[0].tolist()
    assert unclipped == pytest.approx([0.5 * 1.8**2, 0.5 * 1.0, 0.5 * 9.0])


def test_only_a_value_that_went_too_far_towards_its_return_has_no_gradient() -> None:
    values, old, returns = tensors([1.2, 2.0, 0.0], [1.0] * 3, [3.0] * 3)
    values.requires_grad_()
    loss, figures = value_loss(values, old, returns, every(values), clip=0.5)
    assert float(figures["clip_share"]) == 1
    (grad,) = torch.autograd.grad(loss.sum(), values)
    assert grad.tolist() == pytest.approx([1.2 - 3, 0.0, 0.0 - 3])


@given(rows=rows, clip=st.sampled_from([None, 0.1, 0.5, 20.0]))
def test_a_loop_over_tokens_agrees_and_nothing_is_nan(
    rows: list[tuple[float, float, float, bool]], clip: float | None
) -> None:
    values, old, returns = tensors(*(list(c) for c in list(zip(*rows, strict=True))[:3]))
    mask = torch.tensor([row[3] for row in rows])
    values.requires_grad_()
    loss, sums = value_loss(values, old, returns, mask, clip=clip)
    clipped = 0
    for i, (value, before, target, counted) in enumerate(rows):
        plain = (value - target) ** 2
        bounded = plain
        if clip is not None:
            bounded = (min(max(value, before - clip), before + clip) - target) ** 2
        assert float(loss[i]) == pytest.approx(max(plain, bounded) / 2)
        clipped += counted and bounded > plain
    assert float(sums["clip_share"]) == clipped
    (grad,) = torch.autograd.grad(loss.sum(), values)
    assert torch.isfinite(grad).all()
    assert math.isfinite(explained_variance(values.detach(), returns, mask))


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradient_equals_finite_differences(clip: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 40, dtype=torch.float64, generator=g).unbind()
    mask = every(values)
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, clip=clip)[0], (values,)
    )


def test_what_stands_outside_the_mask_is_not_read() -> None:
    values, old, returns = tensors(
        [1.0, 2.5, math.inf, 9.0], [1.0, 9.0, -math.inf, 0.0], [2.0, 3.0, math.nan, math.inf]
    )
    mask = torch.tensor([True, True, False, False])
    _, figures = value_loss(values, old, returns, mask, clip=0.5)
    assert float(figures["clip_share"]) == 1
    # Errors 1 and 0.5 have the variance 1/16; returns 2 and 3 have 1/4.
    assert explained_variance(values, returns, mask) == pytest.approx(1 - (1 / 16) / (1 / 4))


def test_explained_variance_by_hand_is_one_for_perfect_values_and_zero_for_a_constant() -> None:
    returns = [1.0, 2.0, 4.0, 5.0]  # mean 3, variance 2.5
    for values, wanted in (
        (returns, 1.0),
        ([r - 7.0 for r in returns], 1.0),  # an offset is not variance
        ([3.0] * 4, 0.0),
        ([1.0, 2.0, 3.0, 5.0], 1 - (0.25 - 0.0625) / 2.5),
        ([-r for r in returns], 1 - 4.0),
    ):
        v, r = tensors(values, returns)
        assert explained_variance(v, r, every(v)) == pytest.approx(wanted)


@pytest.mark.parametrize("level", [0.0, 0.1, -1000.3])
def test_explained_variance_is_defined_where_returns_do_not_vary(level: float) -> None:
    mask = torch.ones(7, dtype=torch.bool)
    returns = torch.full((7,), level)
    flat = returns + 3.0
    assert explained_variance(flat, returns, mask) == 1.0
    uneven = returns + torch.arange(7.0)
    assert explained_variance(uneven, returns, mask) == 0.0
    assert explained_variance(uneven, returns, ~mask) == 0.0
    assert explained_variance(uneven[:1], returns[:1], mask[:1]) == 1.0
