"""KL estimators: values by hand, second-order agreement, and whose gradient they take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from winnow.algorithms.kl import KL_ESTIMATORS, adapted_coef, token_kl

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


@given(st.floats(-1000, 1000))
def test_k3_is_never_negative_and_bounded(d: float) -> None:
    assert -1e-12 <= at("k3", d) <= 10


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


# Exact expectations: a categorical of 7 ids, every id weighed by its probability.


def three_policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the current policy, log-probs of an older one and of the reference."""
    g = torch.Generator().manual_seed(seed)
    theta, old, ref = 0.4 * torch.randn(3, 7, dtype=torch.float64, generator=g)
    return theta.requires_grad_(), old.log_softmax(0), ref.log_softmax(0)


def true_kl(theta: Tensor, ref: Tensor) -> tuple[float, Tensor]:
    """KL(policy || ref) and its gradient in the logits, by a loop: p_i (d_i - KL)."""
    z = [math.exp(float(x)) for x in theta]
    p = [x / sum(z) for x in z]
    d = [math.log(a) - float(b) for a, b in zip(p, ref, strict=True)]
    kl = sum(a * b for a, b in zip(p, d, strict=True))
    grad = [a * (b - kl) for a, b in zip(p, d, strict=True)]
    return kl, torch.tensor(grad, dtype=torch.float64)


def mean_under(
    p: Tensor, name: str, theta: Tensor, ref: Tensor, old: Tensor | None = None
) -> tuple[float, Tensor]:
    """The estimate's mean over ids drawn from p, and the mean of its gradient."""
    mean = (p.detach() * token_kl(name, theta.log_softmax(0), ref, old)).sum()
    return float(mean.detach()), torch.autograd.grad(mean, theta)[0]


@pytest.mark.parametrize("name", ["k2", "k1+", "abs+", "k2+", "k3+"])
def test_k2_and_plus_have_the_kls_own_gradient_in_expectation(name: str) -> None:
    theta, _, ref = three_policies(1)
    _, grad = mean_under(theta.softmax(0), name, theta, ref)
    torch.testing.assert_close(grad, true_kl(theta, ref)[1])


@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n != "abs"])
def test_with_importance_tokens_of_an_older_policy_give_the_kls_own_gradient(name: str) -> None:
    theta, old, ref = three_policies(1)
    kl, wanted = true_kl(theta, ref)
    value, grad = mean_under(old.exp(), name, theta, ref, old)
    torch.testing.assert_close(grad, wanted)
    if name in ("k1", "k3", "k1+", "k3+"):
        assert value == pytest.approx(kl)
    _, unweighted = mean_under(old.exp(), name, theta, ref)
    assert float((unweighted - wanted).norm()) > 0.1 * float(wanted.norm())


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
def test_importance_multiplies_the_value_by_the_ratio_to_old(name: str) -> None:
    logp, ref, old = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.7, -1.4))
    plain = KL_ESTIMATORS[name](logp, ref)
    torch.testing.assert_close(token_kl(name, logp, ref), plain)
    torch.testing.assert_close(token_kl(name, logp, ref, old), plain * math.exp(0.4))


@pytest.mark.parametrize("name", list(KL_ESTIMATORS))
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_importance_stays_finite_when_far_from_old(name: str, gap: float) -> None:
    logp = torch.zeros(1, requires_grad=True)
    value = token_kl(name, logp, torch.full((1,), gap), torch.full((1,), -gap))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()


def test_no_gradient_flows_into_the_other_policies() -> None:
    logp, ref, old = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.7, -1.4))
    for name in KL_ESTIMATORS:
        token_kl(name, logp, ref, old).sum().backward()
    assert ref.grad is None
    assert old.grad is None


# The adaptive weight.


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (0.1, 0.5),  # on target
        (0.11, 0.5 * (1 + 0.1 * 0.0512)),
        (0.09, 0.5 * (1 - 0.1 * 0.0512)),
        (5.0, 0.5 * (1 + 0.2 * 0.0512)),  # the error is held within +-0.2
        (math.inf, 0.5 * (1 + 0.2 * 0.0512)),
        (0.0, 0.5 * (1 - 0.2 * 0.0512)),
        (-5.0, 0.5 * (1 - 0.2 * 0.0512)),
    ],
)
def test_the_weight_moves_against_the_error_by_samples_over_horizon(
    kl: float, wanted: float
) -> None:
    assert adapted_coef(0.5, kl, target=0.1, n=512, horizon=10_000) == pytest.approx(wanted)
