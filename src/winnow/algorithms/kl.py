"""Estimates of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref (Schulman, "Approximating KL divergence", 2020): k1 = d, unbiased; abs =
|d|; k2 = d^2/2; k3 = e^-d + d - 1, unbiased and never negative. A `+` behind a name keeps the
value and takes k2's gradient, which is the KL's own in expectation, while that of k1 is 0 and
that of k3 is biased.

Shapes: `T` packed tokens. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

LOG_RATIO_BOUND = 20.0
K3_BOUND = 10.0


def k1(logp: Tensor, ref: Tensor) -> Tensor:
    """logp - ref [T]."""
    return logp - ref


def absolute(logp: Tensor, ref: Tensor) -> Tensor:
    """|logp - ref| [T]."""
    return (logp - ref).abs()


def k2(logp: Tensor, ref: Tensor) -> Tensor:
    """(logp - ref)^2 / 2 [T]."""
    return (logp - ref).square() / 2


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """e^-d + d - 1 [T], the exponent held within +-20 nats and the value within +-10."""
    d = logp - ref
    estimate = (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() + d - 1
    return estimate.clamp(-K3_BOUND, K3_BOUND)


def straight_through(value: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The estimator with `value`'s value and k2's gradient."""

    def estimate(logp: Tensor, ref: Tensor) -> Tensor:
        with_gradient = k2(logp, ref)
        return value(logp, ref).detach() + with_gradient - with_gradient.detach()

    return estimate


_PLAIN = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
KL_ESTIMATORS: Mapping[str, Callable[..., Tensor]] = {
    **_PLAIN,
    **{f"{name}+": straight_through(value) for name, value in _PLAIN.items()},
}
