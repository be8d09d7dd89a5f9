"""Losses by hand, at the ends of the number line, and against their sections of a recipe."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.objectives import LOSS_SECTIONS, loss_options
from torch import Tensor

from winnow.algorithms.aggregation import AGGREGATIONS
from winnow.algorithms.losses import POLICY_LOSSES, LossTokens, explained_variance, value_loss

LOSSES = pytest.mark.parametrize("name", POLICY_LOSSES)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def all_counted(lengths: list[int], selected: list[int] | None = None) -> LossTokens:
    """Samples of these lengths, every token counted, some selected."""
    n = sum(lengths)
    index = torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)
    )
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[selected or []] = True
    return LossTokens(torch.ones(n, dtype=torch.bool), index, len(lengths), chosen)


def called(
    name: str, logp: Tensor, old: Tensor, a: Tensor, tokens: LossTokens, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its figures, where a recipe says nothing but `options`."""
    return POLICY_LOSSES[name](logp, old, a, tokens, loss_options(name, options))


LN2 = math.log(2)
RATIOS = f64(0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 5.0).log()
SIGNS = f64(2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0)
PPO = {"clip_share": 2, "clip_high_share": 1, "approx_kl": -math.log(5)}
CISPO = f64(8.0, 0.5).log(), f64(-1 - 3 * LN2, -2 + LN2), f64(2.0, -1.0)
ALL_CLIPPED = {"clip_share": 2, "clip_high_share": 1, "approx_kl": -2 * LN2}
GMPO = f64(0.6, -0.1, 0.6, -0.1, -0.6), f64(0, 0, 0, 0, 0), f64(1, 1, -2, -2, -1)
UP, DOWN = -math.exp(0.15), 2 * math.exp(0.25)
DPPO_LOGP, DPPO_OLD = f64(0.7, 0.6, 0.3, 0.3, 0.7).log(), f64(0.5, 0.5, 0.5, 0.5, 0.5).log()
DPPO = DPPO_LOGP - DPPO_OLD, DPPO_OLD, f64(1, 1, -1, 1, -1)
DPPO_LOSS = [0.0, -1.2 * math.log(0.6), 0.0, -0.6 * math.log(0.3), 1.4 * math.log(0.7)]
STOPPED = {"clip_share": 2, "clip_high_share": 1, "approx_kl": float(-DPPO[0].sum())}
Terms = tuple[Tensor, Tensor, Tensor]
"""Log-ratios, old log-probs, advantages."""
BY_HAND: dict[str, tuple[dict[str, Any], Terms, LossTokens, list[float], dict[str, float]]] = {
    "ppo_clip": (
        {"clip_high": 0.28, "dual_clip": 3.0},
        (RATIOS, 0 * RATIOS, SIGNS),
        all_counted([7]),
        [-1.0, -2.0, -2.56, 1.6, 2.0, 4.0, 6.0],
        {**PPO, "dual_clip_share": 1},
    ),
    "ppo_clip alone": (
        {"clip_high": 0.28, "dual_clip": None},
        (RATIOS, 0 * RATIOS, SIGNS),
        all_counted([7]),
        [-1.0, -2.0, -2.56, 1.6, 2.0, 4.0, 10.0],
        PPO,
    ),
    "gspo": (
        {},
        (f64(1e-3, -5e-4, 1e-2, -1e-2), f64(-1, -2, -3, -4), f64(2, 2, 1, -1)),
        all_counted([2, 1, 1]),
        [-2 * math.exp(2.5e-4), -2 * math.exp(2.5e-4), -1.0004, 0.9997],
        {"clip_share": 2, "clip_high_share": 1, "approx_kl": -5e-4},
    ),
    "cispo": ({}, CISPO, all_counted([2]), [10.0, -1.0], {**ALL_CLIPPED, "clip_share": 1}),
    "cispo on both sides": (
        {"two_sided": (0.2, 0.28)},
        CISPO,
        all_counted([2]),
        [2.56, -1.6],
        ALL_CLIPPED,
    ),
    "sapo": (
        {},
        (f64(1.0, 1.0, 3.0).log(), f64(0, 0, 0), f64(1.0, -1.0, 1.0)),
        all_counted([3]),
        [-2.0, 2 / 1.05, -4 / (1 + math.exp(-2.0))],
        {"approx_kl": -math.log(3)},
    ),
    "gmpo": (
        {},
        GMPO,
        all_counted([2, 2, 1]),
        [UP, UP, DOWN, DOWN, math.exp(-0.4)],
        {"clip_share": 2, "clip_high_share": 1, "approx_kl": -0.4},
    ),
    "clip_cov": (
        {},
        (f64(2.0, 2.0, 5.0).log(), f64(0, 0, 0), f64(1, 1, -1)),
        all_counted([3], [1]),
        [-1.2, 0.0, 5.0],
        {"clip_share": 2, "clip_high_share": 2, "selected_share": 1, "approx_kl": -math.log(20)},
    ),
    "kl_cov": (
        {"coef": 0.5},
        (f64(2.0, 2.0, 0.5).log(), f64(0, 0, 0), f64(1, 1, -1)),
        all_counted([3], [1, 2]),
        [-2.0, -2 + LN2 / 2, 0.5 + LN2 / 2],
        {"selected_share": 2, "approx_kl": -LN2},
    ),
    "dppo_tv": ({}, DPPO, all_counted([5]), DPPO_LOSS, STOPPED),
    "dppo_kl": ({}, DPPO, all_counted([5]), DPPO_LOSS, STOPPED),
    "dro": (
        {"beta": 0.5},
        (f64(0.5), f64(-1.5), f64(2.0)),
        all_counted([1]),
        [2.0625],
        {"approx_kl": -0.5},
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_losses_and_figures_worked_by_hand(case: str) -> None:
    options, (d, old, a), tokens, expected, sums = BY_HAND[case]
    logp = (old + d).requires_grad_()
    loss, figures = called(case.split()[0], logp, old, a, tokens, **options)
    assert loss.tolist() == pytest.approx(expected, rel=1e-9)
    assert {key: float(value) for key, value in figures.items()} == pytest.approx(sums)
    assert all(value.shape == () and not value.requires_grad for value in figures.values())


@LOSSES
def test_only_losses_that_say_so_do_without_old(name: str) -> None:
    logp, a, tokens = f64(-1.0, -2.0), f64(1.0, -1.0), all_counted([1, 1], [0])
    losses = [called(name, logp, logp - shift, a, tokens)[0] for shift in (0.1, 0.11)]
    assert torch.equal(*losses) is not POLICY_LOSSES[name].uses_old


FAR = [(-1000.0, 0.0), (0.0, -1000.0), (1000.0, 0.0), (0.0, -math.inf), (-1.0, math.inf)]
"""Log-probs now and before."""


@LOSSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_extreme_ratio_makes_a_nan(name: str, dtype: torch.dtype) -> None:
    tokens = all_counted([1, 1], [0])
    for (logp, old), advantage in itertools.product([*FAR, (1e-7, 0.0)], (1.0, -1.0, 0.0)):
        x = torch.tensor([logp, -1.0], dtype=dtype, requires_grad=True)
        before, a = torch.tensor([[old, -1.0], [advantage, 1.0]], dtype=dtype)
        loss, sums = called(name, x, before, a, tokens)
        assert loss.dtype == dtype
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert not loss.isnan().any()
        assert not gradient.isnan().any()
        # A penalty without bound is infinite where old is; nothing else may be.
        if name not in ("dro", "kl_cov") or math.isfinite(old):
            assert loss.isfinite().all()
            assert gradient.isfinite().all()
        assert not any(value.isnan() for value in sums.values())


@LOSSES
def test_infinities_within_the_mask_of_a_neighbour_change_nothing(name: str) -> None:
    a, tokens = f64(1.0, -1.0), all_counted([1, 1], [])
    alone, beside = (
        called(name, f64(-1.0, -2.0), f64(-1.1, other), a, tokens)[0] for other in (-2.1, -math.inf)
    )
    assert alone[0] == beside[0]


@LOSSES
@pytest.mark.parametrize("lengths", [[], [1, 2]])
def test_nothing_counted_is_zero(name: str, lengths: list[int]) -> None:
    n = sum(lengths)
    tokens = all_counted(lengths)
    nothing = LossTokens(
        torch.zeros(n, dtype=torch.bool), tokens.sample_index, len(lengths), tokens.selected
    )
    x = torch.full((n,), math.nan, requires_grad=True)
    loss, sums = called(name, x, x.detach(), x.detach(), nothing)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss.tolist() == [0.0] * n
    assert gradient.tolist() == [0.0] * n
    assert all(float(value) == 0 for value in sums.values())


def test_the_recipe_knows_every_loss_and_its_legal_aggregations() -> None:
    assert {*POLICY_LOSSES, "custom"} == LOSS_SECTIONS.keys()
    bound = {name: s.aggregations for name, s in LOSS_SECTIONS.items() if s.aggregations}
    assert bound == dict.fromkeys(("gspo", "sapo", "gmpo"), ("seq-mean-token-mean",))
    assert "seq-mean-token-mean" in AGGREGATIONS


# The loss of values.

numbers = st.floats(-1000, 1000, width=32)
rows = st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), min_size=1, max_size=12)


def tensors(*columns: list[float]) -> list[Tensor]:
    return [torch.tensor(column, dtype=torch.float64) for column in columns]


def every(values: Tensor) -> Tensor:
    return torch.ones(len(values), dtype=torch.bool)


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
