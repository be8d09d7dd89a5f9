"""KL estimators: values by hand, second-order agreement, and whose gradient they take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow.algorithms.kl import KL_ESTIMATORS

PLAIN = ["k1", "abs", "k2", "k3"]


def at(name: str, d: float) -> float:
    """The estimator's value at logp - ref = d."""
    logp = torch.tensor([d - 2.0], dtype=torch.float64)
    return float(KL_ESTIMATORS[name](logp, torch.tensor([-2.0], dtype=torch.float64)))


def test_values_worked_by_hand() -> None:
    d = -0.5
    assert at("k1", d) == pytest.approx(-0.5)
    assert at("abs", d) == pytest.approx(0.5)
    assert at("k2", d) == pytest.approx(0.125)
    assert at("k3", d) == pytest.approx(math.exp(0.5) - 1.5)


@settings(deadline=None)
@given(st.floats(-0.05, 0.05))
def test_k2_and_k3_agree_to_second_order(d: float) -> None:
    assert abs(at("k2", d) - at("k3", d)) <= 0.2 * abs(d) ** 3 + 1e-15


@settings(deadline=None)
@given(st.floats(-1000, 1000))
def test_k3_is_never_negative_and_bounded(d: float) -> None:
    assert -1e-12 <= at("k3", d) <= 10


def test_k1_and_k3_have_the_kl_as_their_mean() -> None:
    p, q = torch.rand(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p, q = p / p.sum(), q / q.sum()
    kl = sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))
    for name in ("k1", "k3"):
        assert float((p * KL_ESTIMATORS[name](p.log(), q.log())).sum()) == pytest.approx(kl)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name: str) -> None:
    ref = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logp = torch.zeros_like(ref).requires_grad_()
    value = KL_ESTIMATORS[f"{name}+"](logp, ref)
    torch.testing.assert_close(value, KL_ESTIMATORS[name](logp, ref))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), logp)[0], (logp - ref).detach())


@pytest.mark.parametrize("name", PLAIN)
def test_gradient_equals_finite_differences(name: str) -> None:
    ref = torch.tensor([0.3, -0.4, 1.5], dtype=torch.float64)
    logp = torch.zeros_like(ref).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, ref), (logp,))


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_extreme_differences_stay_finite(name: str, d: float) -> None:
    logp = torch.tensor([d], requires_grad=True)
    value = KL_ESTIMATORS[name](logp, torch.zeros(1))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
