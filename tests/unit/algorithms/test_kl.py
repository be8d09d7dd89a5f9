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


@given(st.floats(-0.05, 0.05))
def test_k2_and_k3_agree_to_second_order(d: float) -> None:
    assert abs(at("k2", d) - at("k3", d)) <= 0.2 * abs(d) ** 3 + 1e-15


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["k2", "k1+", "abs+", "k2+", "k3+"])
def test_k2_and_plus_have_the_kls_own_gradient_in_expectation(name: str, seed: int) -> None:
    theta, _, ref = three_policies(seed)
    _, grad = mean_under(theta.softmax(0), name, theta, ref)
    torch.testing.assert_close(grad, true_kl(theta, ref)[1])


@pytest.mark.parametrize("seed", range(3))
def test_k1_has_no_gradient_in_expectation_and_that_of_k3_is_biased(seed: int) -> None:
    theta, _, ref = three_policies(seed)
    _, grad = mean_under(theta.softmax(0), "k1", theta, ref)
    torch.testing.assert_close(grad, torch.zeros_like(grad))
    kl, wanted = true_kl(theta, ref)
    value, grad = mean_under(theta.softmax(0), "k3", theta, ref)
    assert value == pytest.approx(kl)
    # What k3 follows instead is KL(ref || policy): its gradient in the logits is p - ref.
    torch.testing.assert_close(grad, (theta.softmax(0) - ref.exp()).detach())
    assert float((grad - wanted).norm()) > 0.1 * float(wanted.norm())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [n for n in KL_ESTIMATORS if n != "abs"])
def test_with_importance_tokens_of_an_older_policy_give_the_kls_own_gradient(
    name: str, seed: int
) -> None:
    theta, old, ref = three_policies(seed)
    kl, wanted = true_kl(theta, ref)
    value, grad = mean_under(old.exp(), name, theta, ref, old)
    torch.testing.assert_close(grad, wanted)
    if name in ("k1", "k3", "k1+", "k3+"):
        assert value == pytest.approx(kl)
    _, unweighted = mean_under(old.exp(), name, theta, ref)
    assert float((unweighted - wanted).norm()) > 0.1 * float(wanted.norm())


def test_with_importance_abs_has_its_own_mean_and_that_means_gradient() -> None:
    theta, old, ref = three_policies(0)
    mean = (theta.softmax(0) * (theta.log_softmax(0) - ref).abs()).sum()
    value, grad = mean_under(old.exp(), "abs", theta, ref, old)
    assert value == pytest.approx(float(mean.detach()))
    torch.testing.assert_close(grad, torch.autograd.grad(mean, theta)[0])


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


@given(kl=st.floats(-10, 10), n=st.integers(0, 5000), coef=st.floats(1e-6, 10))
def test_the_weight_stays_above_zero_and_moves_by_a_fifth_of_the_horizon_at_most(
    kl: float, n: int, coef: float
) -> None:
    moved = adapted_coef(coef, kl, target=0.05, n=n, horizon=1001)
    assert moved > 0
    assert abs(moved / coef - 1) <= 0.2 * n / 1001 + 1e-12
