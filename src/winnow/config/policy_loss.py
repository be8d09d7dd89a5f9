"""Policy losses: how far one update may move the policy, and what happens beyond.

r stands for the ratio exp(logp - old) of a token, A for its advantage. Each variant owns its
ranges; `name` picks it. GSPO, SAPO and GMPO are means over samples and need
`aggregation: seq-mean-token-mean`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from winnow.config.base import Options, Section, UserObject

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class PolicyLossSection(Section):
    """What the variants share."""

    aggregations: ClassVar[tuple[str, ...]] = ()
    """The aggregations that the loss may go with; empty stands for all."""


class PpoClipLoss(PolicyLossSection):
    """Clipped surrogate with its own bounds above and below, and dual clip."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratio may fall to 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Ratio may rise to 1 + clip_high; DAPO's clip-higher is 0.28."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound c on the loss of a negative advantage (-A*c); null leaves it out."""


class GspoLoss(PolicyLossSection):
    """GSPO: the clipped surrogate with one ratio a sample, the geometric mean of its tokens'."""

    aggregations = ("seq-mean-token-mean",)
    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The sample's ratio may fall to 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The sample's ratio may rise to 1 + clip_high."""


class CispoLoss(PolicyLossSection):
    """CISPO: -min(r, r_max)*A*logp, the weight without gradient; every token keeps learning."""

    name: Literal["cispo"] = "cispo"
    r_max: float = Field(5.0, gt=0)
    """The largest weight."""
    two_sided: tuple[Positive, Positive] | None = None
    """[low, high] holds the weight in [1 - low, 1 + high], and r_max does not apply."""


class SapoLoss(PolicyLossSection):
    """SAPO: a soft gate -A*(4/tau)*sigmoid(tau*(r - 1)) in place of a clip."""

    aggregations = ("seq-mean-token-mean",)
    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Sharpness of the gate where A > 0."""
    tau_negative: float = Field(1.05, gt=0)
    """Sharpness of the gate where A < 0."""


class GmpoLoss(PolicyLossSection):
    """GMPO: -A times one ratio a sample, the geometric mean of its tokens' clipped ratios."""

    aggregations = ("seq-mean-token-mean",)
    name: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0)
    """A token's log-ratio may fall to -clip_low nats."""
    clip_high: float = Field(0.4, gt=0)
    """A token's log-ratio may rise to clip_high nats."""


class ClipCovLoss(PolicyLossSection):
    """Clip-Cov: the clipped surrogate, without a few tokens whose log-prob and A covary."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratio may fall to 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """Ratio may rise to 1 + clip_high."""
    share: Share = 2e-4
    """Share of the tokens that is left out, at least one."""
    cov_low: float = 1.0
    """Tokens left out are drawn from those whose covariance exceeds this…"""
    cov_high: float = 5.0
    """…and stays below this."""
    selection: Literal["update", "microbatch"] = "update"
    """Choose the tokens once an update, or (as verl does) anew in each micro-batch."""

    @field_validator("cov_high")
    @classmethod
    def _is_above(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("cov_low")
        if low is not None and value <= low:
            raise ValueError(f"must exceed cov_low, which is {low:g}")
        return value


class KlCovLoss(PolicyLossSection):
    """KL-Cov: -A*r, with a penalty on a few tokens whose log-prob and A covary most."""

    name: Literal["kl_cov"] = "kl_cov"
    coef: float = Field(1.0, ge=0)
    """Weight of the penalty |logp - old|."""
    share: Share = 2e-4
    """Share of the tokens that is penalised, at least one."""
    selection: Literal["update", "microbatch"] = "update"
    """Choose the tokens once an update, or (as verl does) anew in each micro-batch."""


class DppoTvLoss(PolicyLossSection):
    """DPPO: -min(r, r_max)*A*logp, without tokens whose probability has moved too far along A."""

    name: Literal["dppo_tv"] = "dppo_tv"
    divergence_low: float = Field(0.15, gt=0, lt=1)
    """Where A < 0, the probability may fall by this."""
    divergence_high: float = Field(0.15, gt=0, lt=1)
    """Where A > 0, the probability may rise by this."""
    r_max: float = Field(20.0, gt=0)
    """The largest weight."""


class DppoKlLoss(PolicyLossSection):
    """DPPO with the KL between "this token" and "any other" as its measure."""

    name: Literal["dppo_kl"] = "dppo_kl"
    divergence_low: float = Field(0.05, gt=0)
    """Bound in nats where A < 0."""
    divergence_high: float = Field(0.05, gt=0)
    """Bound in nats where A > 0."""
    r_max: float = Field(20.0, gt=0)
    """The largest weight."""


class DroLoss(PolicyLossSection):
    """DRO: -(A*logp - beta/2*(logp - old)^2), a quadratic pull in place of a ratio."""

    name: Literal["dro"] = "dro"
    beta: float = Field(0.05, gt=0)
    """Strength of the pull towards the old policy."""


class GpgLoss(PolicyLossSection):
    """GPG's plain policy gradient -A*logp; the rest of GPG is its advantage."""

    name: Literal["gpg"] = "gpg"


class ReinforceLoss(PolicyLossSection):
    """Plain policy gradient -A*logp, without a ratio."""

    name: Literal["reinforce"] = "reinforce"


class CustomPolicyLoss(PolicyLossSection):
    """A policy loss of your own, given by its place; docs/algorithms.md shows its signature."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the function: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the function."""


PolicyLoss = Annotated[
    PpoClipLoss
    | GspoLoss
    | CispoLoss
    | SapoLoss
    | GmpoLoss
    | ClipCovLoss
    | KlCovLoss
    | DppoTvLoss
    | DppoKlLoss
    | DroLoss
    | GpgLoss
    | ReinforceLoss
    | CustomPolicyLoss,
    Field(discriminator="name"),
]
