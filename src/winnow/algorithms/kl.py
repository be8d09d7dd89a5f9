"""Estimates of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - ref (Schulman, "Approximating KL divergence", 2020): k1 = d, unbiased; abs =
|d|; k2 = d^2/2; k3 = e^-d + d - 1, unbiased and never negative. A `+` behind a name keeps the
value and takes k2's gradient, which is the KL's own in expectation, while that of k1 is 0 and
that of k3 is biased. All of this holds for tokens of the current policy; for those of an older
one, `token_kl` weighs by the ratio of the two.

Shapes: `T` packed tokens. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 nats: exp stays finite, and beyond it the gradient is 0."""
K3_BOUND = 10.0
ADAPTIVE_CLIP = 0.2


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
    """e^-d + d - 1 [T], the exponent clamped to +-20 nats and the value to +-10."""
    d = logp - ref
    estimate = (-d).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp() + d - 1
    return estimate.clamp(-K3_BOUND, K3_BOUND)


def straight_through(value: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Make an estimator with `value`'s value and k2's gradient."""

    def estimate(logp: Tensor, ref: Tensor) -> Tensor:
        with_gradient = k2(logp, ref)
        return value(logp, ref).detach() + with_gradient - with_gradient.detach()

    return estimate


_PLAIN = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
KL_ESTIMATORS: Mapping[str, Callable[..., Tensor]] = {
    **_PLAIN,
    **{f"{name}+": straight_through(value) for name, value in _PLAIN.items()},
}


def token_kl(name: str, logp: Tensor, ref: Tensor, old: Tensor | None = None) -> Tensor:
    """Estimate by name, optionally times r = exp(clamp(logp - old, +-20)) for tokens of `old`.

    Where the gradient goes follows from what each name is for. k1, abs and k3 are estimates of a
    value: r carries its gradient, so that the mean over tokens of `old` is the value's mean under
    the current policy, and its gradient that mean's: for k1 and k3 the KL's own (for k3:
    DeepSeek-V3.2, arXiv 2512.02556, section 3.1). k2 and the names with `+` are there for k2's
    gradient d * grad logp: r is held constant, and the mean gradient is again the KL's own.

    Args:
        name: a key of `KL_ESTIMATORS`.
        logp: [T] the current policy; the only one through which a gradient flows.
        ref: [T] the reference policy.
        old: [T] the policy that the tokens are taken from; None for no weight.

    Returns:
        [T] in nats.
    """
    estimate = KL_ESTIMATORS[name](logp, ref.detach())
    if old is None:
        return estimate
    r = (logp - old.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return (r.detach() if name == "k2" or name.endswith("+") else r) * estimate


def adapted_coef(coef: float, kl: float, target: float, n: int, horizon: float) -> float:
    """Return the next step's weight, coef (1 + clip(kl / target - 1, +-0.2) n / horizon).

    The controller of Ziegler et al., arXiv 1909.08593, section 2.2.

    Args:
        coef: this step's weight.
        kl: this step's KL in nats, the mean over samples of the means over their tokens.
        target: the KL aimed at, nats, above 0.
        n: samples of this step.
        horizon: in samples, more than 0.2 n: else a small KL would turn the weight negative.
    """
    error = min(max(kl / target - 1, -ADAPTIVE_CLIP), ADAPTIVE_CLIP)
    return coef * (1 + error * n / horizon)
