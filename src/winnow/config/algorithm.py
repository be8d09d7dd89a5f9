"""Steps from rewards to gradients: advantage, policy loss, KL, correction for the sampler.

The formulas stand in `winnow.algorithms`; each variant owns its ranges, and `name` picks it. In
the policy losses r stands for the ratio exp(logp - old) of a token, A for its advantage. GSPO, SAPO
and GMPO are means over samples and need `aggregation: seq-mean-token-mean`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from winnow.config.base import Aggregation, Change, Section, UserCode

LOSSES_WITHOUT_RATIO = ("reinforce", "gpg")
"""Losses without a ratio of their own to the sampler."""


class GrpoAdvantage(Section):
    """Group-relative advantage (R - mean) / std over the answers of a prompt."""

    name: Literal["grpo"] = "grpo"
    std_normalization: Literal["group", "batch", "none"] = "group"
    """Divide by the group's std, the batch's std (Lite PPO), or not at all (Dr. GRPO)."""


class GrpoPasskAdvantage(Section):
    """Only the best answer of a prompt learns, by its lead over the second best."""

    name: Literal["grpo_passk"] = "grpo_passk"
    std_normalization: Literal["group", "none"] = "group"
    """Divide the lead by the group's std, or not."""


class RlooAdvantage(Section):
    """R minus the mean of the prompt's other answers (leave one out)."""

    name: Literal["rloo"] = "rloo"


class OpoAdvantage(Section):
    """R minus the group's mean weighted by length (optimal baseline under equal tokens)."""

    name: Literal["opo"] = "opo"


class ReinforcePlusPlusAdvantage(Section):
    """REINFORCE++: discounted reward-to-go of each token, whitened over the batch."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount for each written token."""


class ReinforcePlusPlusBaselineAdvantage(Section):
    """REINFORCE++ with the group's mean as baseline: R - mean, whitened over the batch."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Section):
    """Reward-to-go minus the reward of a greedy answer to the same prompt."""

    name: Literal["remax"] = "remax"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount for each written token."""


class GpgAdvantage(Section):
    """Group policy gradient: R - mean, scaled up for the samples that teach nothing."""

    name: Literal["gpg"] = "gpg"
    alpha: Literal["groups", "nonzero_reward"] = "groups"
    """Scale by samples over samples in groups that differ, or (verl) over rewards not 0."""


class GdpoAdvantage(Section):
    """GRPO of each reward component on its own, weighted sum, whitened over the batch."""

    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight by reward component; only those named count. Empty: all, each with weight 1."""


class OptimalTokenBaselineAdvantage(Section):
    """Reward-to-go minus a baseline for each token, weighted by gradient energy so far."""

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"


class GaeAdvantage(Section):
    """Generalised advantage estimation from a critic's values (PPO), whitened over the batch."""

    name: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount for each written token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Weight of longer looks ahead: 0 trusts the critic, 1 the rewards."""


class CustomAdvantage(UserCode):
    """A custom estimator, given by its import path; docs/algorithms.md shows its signature."""


Advantage = Annotated[
    GrpoAdvantage
    | GrpoPasskAdvantage
    | RlooAdvantage
    | OpoAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage
    | GpgAdvantage
    | GdpoAdvantage
    | OptimalTokenBaselineAdvantage
    | GaeAdvantage
    | CustomAdvantage,
    Field(discriminator="name"),
]

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]


class PolicyLossSection(Section):
    """Base of the policy losses."""

    aggregations: ClassVar[tuple[str, ...]] = ()
    """Aggregations that the loss may go with; empty stands for all."""


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
    """[low, high] clips the weight to [1 - low, 1 + high]; r_max then has no effect."""


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
    """Lowest covariance (exclusive) of the tokens that may be left out."""
    cov_high: float = 5.0
    """Highest covariance (exclusive) of the tokens that may be left out."""
    selection: Literal["update", "microbatch"] = "update"
    """Choose the tokens once per update, or (as verl does) in each micro-batch."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("algorithm.policy_loss", "cov_low", "cov_high")


class KlCovLoss(PolicyLossSection):
    """KL-Cov: -A*r, with a penalty on a few tokens whose log-prob and A covary most."""

    name: Literal["kl_cov"] = "kl_cov"
    coef: float = Field(1.0, ge=0)
    """Weight of the penalty |logp - old|."""
    share: Share = 2e-4
    """Share of the tokens that is penalised, at least one."""
    selection: Literal["update", "microbatch"] = "update"
    """Choose the tokens once per update, or (as verl does) in each micro-batch."""


class DppoTvLoss(PolicyLossSection):
    """DPPO: -min(r, r_max)*A*logp, without tokens whose probability has moved too far along A."""

    name: Literal["dppo_tv"] = "dppo_tv"
    divergence_low: float = Field(0.15, gt=0, lt=1)
    """Largest fall of the probability where A < 0."""
    divergence_high: float = Field(0.15, gt=0, lt=1)
    """Largest rise of the probability where A > 0."""
    r_max: float = Field(20.0, gt=0)
    """The largest weight."""


class DppoKlLoss(PolicyLossSection):
    """DPPO, measured by the KL between "this token" and "any other"."""

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


class CustomPolicyLoss(UserCode, PolicyLossSection):
    """A custom policy loss, given by its import path; docs/algorithms.md shows its signature."""


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
    """Estimator of a token's KL."""


class AdaptiveRewardKl(Section):
    """As fixed, and after each step the weight moves so that the KL nears a target."""

    name: Literal["adaptive"] = "adaptive"
    coef: float = Field(0.001, gt=0)
    """Weight beta of the first step."""
    estimator: RewardEstimator = "k1"
    """Estimator of a token's KL."""
    target: float = Field(0.1, gt=0)
    """Target KL in nats per token: the mean over samples of their means."""
    horizon_samples: int = Field(10_000, ge=1)
    """Samples over which a KL 20 % or more off the target moves beta by about 20 %."""


class LossKl(Section):
    """The loss grows by coef * the aggregated kl."""

    name: Literal["fixed"] = "fixed"
    coef: float = Field(0.001, ge=0)
    """Weight beta of the KL."""
    estimator: LossEstimator = "k3+"
    """Estimator of a token's KL; a + takes the gradient of k2. k1 alone has no gradient in
    expectation, that of k3 is biased: prefer k2 or k3+, or set importance_weight."""
    importance_weight: bool = False
    """Weigh each token by its ratio to the old policy, for updates after a step's first."""


class KlConfig(Section):
    """KL to the reference policy, the frozen model that the run started from."""

    reward: Annotated[NoKl | FixedRewardKl | AdaptiveRewardKl, Field(discriminator="name")] = NoKl()
    """KL subtracted from token rewards."""
    loss: Annotated[NoKl | LossKl, Field(discriminator="name")] = NoKl()
    """KL as a term of the loss."""


class NoWeight(Section):
    """The loss is not weighted."""

    name: Literal["none"] = "none"


class TruncatedWeight(Section):
    """The loss of a token is weighted by min(w, cap): truncated importance sampling (TIS)."""

    name: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """One w a token, or one a sequence, the product of its tokens'."""
    cap: float = Field(2.0, gt=0)
    """Largest weight."""
    normalize: bool = False
    """Divide the weights by their mean over the step; with mode=recompute only."""


class MaskedWeight(Section):
    """The loss of a token is weighted by w, and by 0 where w leaves [low, high] (IcePop)."""

    name: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"
    """One w a token, or one a sequence, the product of its tokens'."""
    low: float = Field(0.5, ge=0)
    """Smallest w that counts."""
    high: float = Field(5.0, gt=0)
    """Largest w that counts."""
    normalize: bool = False
    """Divide the weights by their mean over the step; with mode=recompute only."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("algorithm.correction.weight", "low", "high")


class NoRejection(Section):
    """No token is rejected."""

    name: Literal["none"] = "none"


class _Rejection(Section):
    name: str
    level: Literal["token", "sample"] = "token"
    """Drop single tokens, or whole samples."""


class K1Rejection(_Rejection):
    """Drops where behav / old, the inverse of w, leaves [low, high]."""

    name: Literal["k1"] = "k1"
    over: Literal["sum", "mean", "max"] = "mean"
    """Ratio of a sample: the product of its tokens' ratios, their geometric mean, or each of
    them."""
    low: float = Field(0.5, gt=0)
    """Smallest ratio behav / old that is kept."""
    high: float = Field(2.0, gt=0)
    """Largest ratio behav / old that is kept."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("algorithm.correction.rejection", "low", "high")


class _DivergenceRejection(_Rejection):
    over: Literal["sum", "mean", "max"] = "mean"
    """Sum, mean or maximum over a sample's tokens that is held against the bound."""


class K2Rejection(_DivergenceRejection):
    """Drops where k2 = (log w)^2 / 2 exceeds a bound."""

    name: Literal["k2"] = "k2"
    bound: float = Field(0.25, gt=0)
    """Largest k2 that is kept; 0.25 is reached at w = 2.03 and w = 0.49."""


class K3Rejection(_DivergenceRejection):
    """Drops where k3 = w - 1 - log w exceeds a bound."""

    name: Literal["k3"] = "k3"
    bound: float = Field(0.3, gt=0)
    """Largest k3 that is kept; 0.3 is reached at w = 1.99 and w = 0.41."""


Weight = Annotated[NoWeight | TruncatedWeight | MaskedWeight, Field(discriminator="name")]
Rejection = Annotated[
    NoRejection | K1Rejection | K2Rejection | K3Rejection, Field(discriminator="name")
]


class CorrectionConfig(Section):
    """Correction for a behaviour policy that is not the old policy.

    Three policies meet: `behav` sampled the tokens, `old` is the learner's before the first update
    of a step, and the current one is being updated. w = exp(old - behav).
    """

    mode: Literal["recompute", "auto", "reuse", "fused", "bypass"] = "recompute"
    """Source of `old`: a separate pass before the updates (recompute); the update's forward pass
    (fused: needs one update and one epoch a step); or the sampler (bypass: old is behav). reuse
    takes the sampler's for groups whose tokens were all sampled with the weights before the step,
    and makes a pass over the others; it needs the engine and the trainer in one process, with the
    same fp32 weights. auto is reuse where that is possible, else recompute."""
    weight: Weight = NoWeight()
    """Weight of the loss of a token."""
    rejection: Rejection = NoRejection()
    """Rule that takes tokens or samples out of the loss."""

    def conflicts(self) -> Iterator[str]:
        is_normalized = not isinstance(self.weight, NoWeight) and self.weight.normalize
        if is_normalized and self.mode not in ("recompute", "auto"):
            yield (
                "algorithm.correction.weight.normalize=true does not support "
                f"algorithm.correction.mode={self.mode}; set normalize=false, or mode=recompute"
            )


class AlgorithmConfig(Section):
    """Advantage, policy loss, aggregation, and what leaves the loss."""

    advantage: Annotated[Advantage, {"name": Change.BETWEEN_GROUPS}] = GrpoAdvantage()
    """Estimator that turns the rewards of a group into advantages."""
    policy_loss: PolicyLoss = PpoClipLoss()
    """Per-token policy loss."""
    aggregation: Aggregation = "token-mean"
    """Meaning of "mean" in the loss."""
    aggregation_norm_tokens: int | None = Field(None, ge=1)
    """Constant length of seq-mean-token-sum-norm; null takes the response limit."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig = KlConfig()
    """KL to the reference policy, in the reward or in the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Correction for a sampler that is not the policy before the update."""
    overlong_filtering: bool = False
    """Take truncated answers out of the loss; they stay in their group's statistics."""

    def conflicts(self) -> Iterator[str]:
        loss, aggregation, mode = self.policy_loss, self.aggregation, self.correction.mode
        if self.aggregation_norm_tokens is not None and aggregation != "seq-mean-token-sum-norm":
            yield (
                f"algorithm.aggregation_norm_tokens={self.aggregation_norm_tokens} is unused by "
                f"algorithm.aggregation={aggregation}; set it to null, or aggregation to "
                "seq-mean-token-sum-norm"
            )
        if loss.aggregations and aggregation not in loss.aggregations:
            needed = " or ".join(loss.aggregations)
            yield (
                f"algorithm/policy_loss={loss.name} does not support algorithm.aggregation="
                f"{aggregation}; set algorithm.aggregation={needed}"
            )
        if what := self._needs_pass_before_updates():
            yield (
                f"{what} before the first update, which algorithm.correction.mode={mode} does not "
                "compute; set algorithm.correction.mode=recompute"
            )
        # Each component is divided by its own spread, so a KL among them would lose its weight.
        kl, weight = self.kl.reward.name, self.correction.weight.name
        if isinstance(self.advantage, GdpoAdvantage) and kl != "none":
            yield (
                f"algorithm/advantage=gdpo does not support algorithm/kl/reward={kl}; set "
                "algorithm/kl/reward=none and algorithm/kl/loss=fixed"
            )
        # In bypass mode a loss with a ratio to `old` corrects by itself.
        if mode == "bypass" and weight != "none" and loss.name not in LOSSES_WITHOUT_RATIO:
            yield (
                f"algorithm/correction/weight={weight} with algorithm.correction.mode=bypass "
                f"corrects twice, as algorithm/policy_loss={loss.name} does; set "
                "algorithm/correction/weight=none, or policy_loss to "
                f"{' or '.join(LOSSES_WITHOUT_RATIO)}"
            )

    def _needs_pass_before_updates(self) -> str | None:
        """Name the part that needs what the pass of recompute mode alone computes in time."""
        mode = self.correction.mode
        has_pass = mode in ("recompute", "auto")
        if not has_pass and isinstance(self.advantage, OptimalTokenBaselineAdvantage):
            return f"algorithm/advantage={self.advantage.name} needs squared probabilities"
        if mode == "fused" and not isinstance(self.kl.reward, NoKl):
            return f"algorithm/kl/reward={self.kl.reward.name} needs the policy's log-probs"
        if mode == "fused" and isinstance(self.policy_loss, ClipCovLoss | KlCovLoss):
            return f"algorithm/policy_loss={self.policy_loss.name} chooses tokens by log-probs"
        return None
