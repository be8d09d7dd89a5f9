"""Policy losses by hand, against a scalar loop, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from winnow.algorithms.policy_loss import (
    POLICY_DIAGNOSTICS,
    POLICY_LOSSES,
    ppo_clip,
    ppo_clip_diagnostics,
    reinforce,
)

LO, HI, C = 0.2, 0.28, 3.0


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def looped(d: float, a: float, dual_clip: float | None = C) -> tuple[float, bool, bool]:
    """Loss of one token by cases, and whether clip and dual clip decide it."""
    r = math.exp(min(max(d, -20.0), 20.0))
    if a >= 0:
        clips = a > 0 and r > 1 + HI
        return -a * (1 + HI if clips else r), clips, False
    if r < 1 - LO:
        return -a * (1 - LO), True, False
    if dual_clip is not None and r > dual_clip:
        return -a * dual_clip, False, True
    return -a * r, False, False


def test_the_six_cases_worked_by_hand() -> None:
    ratios = f64(0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 5.0)
    advantage = f64(2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0)
    loss = ppo_clip(ratios.log(), f64(*[0.0] * 7), advantage, clip_low=LO, clip_high=HI)
    assert loss.tolist() == pytest.approx([-1.0, -2.0, -2.56, 1.6, 2.0, 4.0, 6.0])


def test_diagnostics_worked_by_hand() -> None:
    ratios = f64(0.5, 1.0, 2.0, 0.5, 1.0, 2.0, 5.0, 5.0)
    advantage = f64(2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0, -2.0)
    mask = torch.tensor([True] * 7 + [False])
    old = torch.zeros_like(ratios)
    sums = ppo_clip_diagnostics(ratios.log(), old, advantage, mask, clip_low=LO, clip_high=HI)
    assert {k: float(v) for k, v in sums.items()} == pytest.approx(
        {
            "clip_share": 2,
            "clip_high_share": 1,
            "dual_clip_share": 1,
            "approx_kl": -math.log(0.5 * 2 * 0.5 * 2 * 5),
        }
    )
    without = ppo_clip_diagnostics(ratios.log(), old, advantage, mask, dual_clip=None)
    assert "dual_clip_share" not in without


@settings(deadline=None)
@given(
    data=st.lists(st.tuples(st.floats(-30, 30), st.floats(-5, 5)), min_size=1, max_size=20),
    dual_clip=st.sampled_from([None, 3.0, 10.0]),
)
def test_loss_and_diagnostics_equal_the_loop(
    data: list[tuple[float, float]], dual_clip: float | None
) -> None:
    edges = [math.log(1 - LO), math.log(1 + HI), math.log(3.0), math.log(10.0)]
    assume(all(abs(d - edge) > 1e-9 for d, _ in data for edge in edges))
    assume(all(a == 0 or abs(a) > 1e-100 for _, a in data))
    d, a = (f64(*column) for column in zip(*data, strict=True))
    options = {"clip_low": LO, "clip_high": HI, "dual_clip": dual_clip}
    expected = [looped(x, y, dual_clip) for x, y in data]
    loss = ppo_clip(d, torch.zeros_like(d), a, **options)  # type: ignore[arg-type]
    assert loss.tolist() == pytest.approx([e[0] for e in expected], rel=1e-9, abs=1e-12)
    mask = torch.ones_like(d, dtype=torch.bool)
    sums = ppo_clip_diagnostics(d, torch.zeros_like(d), a, mask, **options)  # type: ignore[arg-type]
    assert int(sums["clip_share"]) == sum(e[1] for e in expected)
    assert int(sums.get("dual_clip_share", torch.tensor(0))) == sum(e[2] for e in expected)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("log_ratio", [-0.5, -0.1, 0.1, 0.5, 2.0, 25.0])
def test_gradient_equals_finite_differences(advantage: float, log_ratio: float) -> None:
    logp = f64(-1.0 + log_ratio).requires_grad_()
    old, a = f64(-1.0), f64(advantage)
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old, a, clip_low=LO, clip_high=HI), (logp,)
    )
    assert torch.autograd.gradcheck(lambda x: reinforce(x, old, a), (logp,))


def test_at_ratio_one_the_gradient_is_that_of_reinforce() -> None:
    a = f64(1.0, -2.0, 0.0)
    grads = []
    for loss in (ppo_clip, reinforce):
        logp = f64(-1.0, -2.0, -3.0).requires_grad_()
        grads.append(torch.autograd.grad(loss(logp, logp.detach(), a).sum(), logp)[0])
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(grads[0], -a)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [-1000.0, 1000.0])
def test_extreme_ratios_stay_finite(
    advantage: float, dual_clip: float | None, log_ratio: float
) -> None:
    logp = torch.tensor([log_ratio], requires_grad=True)
    loss = ppo_clip(logp, torch.zeros(1), torch.tensor([advantage]), dual_clip=dual_clip)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert logp.grad is not None
    assert logp.grad.tolist() == [0.0]


def test_an_empty_mask_sums_to_zero() -> None:
    x = torch.randn(3)
    sums = ppo_clip_diagnostics(x, x + 1, x, torch.zeros(3, dtype=torch.bool))
    assert all(float(value) == 0 for value in sums.values())


def test_diagnostics_do_not_read_outside_the_mask() -> None:
    logp = torch.tensor([0.0, torch.nan])
    mask = torch.tensor([True, False])
    zeros = torch.zeros(2)
    for diagnostics in POLICY_DIAGNOSTICS.values():
        for value in diagnostics(logp, zeros, zeros, mask).values():
            assert float(value) == 0


def test_every_loss_has_its_diagnostics() -> None:
    assert POLICY_LOSSES.keys() == POLICY_DIAGNOSTICS.keys()
