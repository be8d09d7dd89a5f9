"""How the policy is held near the reference policy: in the reward, or in the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section

RewardEstimator = Literal["k1", "abs", "k2", "k3"]
LossEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]


class NoKl(Section):
    """No KL term here."""

    name: Literal["none"] = "none"


class FixedRewardKl(Section):
    """The reward of each token falls by coef * kl."""

    name: Literal["fixed"] = "fixed"
    coef: float = Field(0.001, ge=0)
    """Weight beta of the KL."""
    estimator: RewardEstimator = "k1"
    """How a token's KL is estimated."""


class AdaptiveRewardKl(Section):
    """As fixed, and after each step the weight moves so that the KL nears a target."""

    name: Literal["adaptive"] = "adaptive"
    coef: float = Field(0.001, gt=0)
    """Weight beta of the first step."""
    estimator: RewardEstimator = "k1"
    """How a token's KL is estimated."""
    target: float = Field(0.1, gt=0)
    """KL aimed at, nats a token: the mean over samples of their means."""
    horizon_samples: int = Field(10_000, ge=1)
    """Samples over which a KL 20 % or more off the target moves beta by about 20 %."""


class LossKl(Section):
    """The loss grows by coef * the aggregated kl."""

    name: Literal["fixed"] = "fixed"
    coef: float = Field(0.001, ge=0)
    """Weight beta of the KL."""
    estimator: LossEstimator = "k3+"
    """How a token's KL is estimated; a + takes the gradient of k2. k1 alone has no gradient in
    expectation, that of k3 is biased: prefer k2 or k3+, or set importance_weight."""
    importance_weight: bool = False
    """Weigh each token by its ratio to the old policy, for updates after a step's first."""


RewardKl = Annotated[NoKl | FixedRewardKl | AdaptiveRewardKl, Field(discriminator="name")]
LossKlChoice = Annotated[NoKl | LossKl, Field(discriminator="name")]


class KlConfig(Section):
    """KL to the reference policy, the frozen model that the run started from."""

    reward: RewardKl = NoKl()
    """KL taken off the rewards of tokens."""
    loss: LossKlChoice = NoKl()
    """KL as a term of the loss."""
