"""What to do about the sampler's probabilities not being those of the policy that learns.

Three policies meet: `behav` sampled the tokens, `old` is the learner's before the first update
of a step, and the current one is being updated. w = exp(old - behav).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section

WeightLevel = Literal["token", "sequence"]


class NoWeight(Section):
    """The loss is not weighed."""

    name: Literal["none"] = "none"


class TruncatedWeight(Section):
    """The loss of a token is weighed by min(w, cap): truncated importance sampling (TIS)."""

    name: Literal["truncated"] = "truncated"
    level: WeightLevel = "token"
    """One w a token, or one a sequence, the product of its tokens'."""
    cap: float = Field(2.0, gt=0)
    """Most that a weight can be."""
    normalize: bool = False
    """Divide the weights by their mean over the step; with mode=recompute only."""


class MaskedWeight(Section):
    """The loss of a token is weighed by w, and by 0 where w leaves [low, high] (IcePop)."""

    name: Literal["masked"] = "masked"
    level: WeightLevel = "token"
    """One w a token, or one a sequence, the product of its tokens'."""
    low: float = Field(0.5, ge=0)
    """Smallest w that counts."""
    high: float = Field(5.0, gt=0)
    """Largest w that counts."""
    normalize: bool = False
    """Divide the weights by their mean over the step; with mode=recompute only."""


class NoRejection(Section):
    """Every token is learnt from."""

    name: Literal["none"] = "none"


class K1Rejection(Section):
    """Drops where behav / old, the inverse of w, leaves [low, high]."""

    name: Literal["k1"] = "k1"
    level: Literal["token", "sample"] = "token"
    """Drop single tokens, or whole samples."""
    over: Literal["sum", "mean", "max"] = "mean"
    """Of a sample: the product of its tokens' ratios, their geometric mean, or each of them."""
    low: float = Field(0.5, gt=0)
    """Smallest ratio behav / old that stays."""
    high: float = Field(2.0, gt=0)
    """Largest ratio behav / old that stays."""


class K2Rejection(Section):
    """Drops where k2 = (log w)^2 / 2 exceeds a bound."""

    name: Literal["k2"] = "k2"
    level: Literal["token", "sample"] = "token"
    """Drop single tokens, or whole samples."""
    over: Literal["sum", "mean", "max"] = "mean"
    """What of a sample's tokens is held against the bound."""
    bound: float = Field(0.25, gt=0)
    """Largest k2 that stays; 0.25 is reached at w = 2.03 and w = 0.49."""


class K3Rejection(Section):
    """Drops where k3 = w - 1 - log w exceeds a bound."""

    name: Literal["k3"] = "k3"
    level: Literal["token", "sample"] = "token"
    """Drop single tokens, or whole samples."""
    over: Literal["sum", "mean", "max"] = "mean"
    """What of a sample's tokens is held against the bound."""
    bound: float = Field(0.3, gt=0)
    """Largest k3 that stays; 0.3 is reached at w = 1.99 and w = 0.41."""


Weight = Annotated[NoWeight | TruncatedWeight | MaskedWeight, Field(discriminator="name")]
Rejection = Annotated[
    NoRejection | K1Rejection | K2Rejection | K3Rejection, Field(discriminator="name")
]


class CorrectionConfig(Section):
    """Correction for a behaviour policy that is not the old policy."""

    mode: Literal["recompute", "fused", "bypass"] = "recompute"
    """Where `old` comes from: a pass of its own before the updates; the update's own forward
    pass (fused: needs one update and one epoch a step); or the sampler (bypass: old is behav)."""
    weight: Weight = NoWeight()
    """What weighs the loss of a token."""
    rejection: Rejection = NoRejection()
    """Which tokens or samples are taken out of the loss."""
