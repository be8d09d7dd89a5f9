"""How rewards become gradients. Each variant owns its ranges; `name` picks it."""

from __future__ import annotations

from pydantic import Field

from winnow.config.advantage import Advantage, GrpoAdvantage
from winnow.config.aggregation import Aggregation
from winnow.config.base import Section
from winnow.config.correction import CorrectionConfig
from winnow.config.kl import KlConfig
from winnow.config.policy_loss import PolicyLoss, PpoClipLoss


class AlgorithmConfig(Section):
    """Advantage, policy loss, aggregation, and what leaves the loss."""

    advantage: Advantage = GrpoAdvantage()
    """How rewards of a group become advantages."""
    policy_loss: PolicyLoss = PpoClipLoss()
    """Per-token policy loss."""
    aggregation: Aggregation = "token-mean"
    """What "mean" means in the loss."""
    aggregation_norm_tokens: int | None = Field(None, ge=1)
    """Constant length of seq-mean-token-sum-norm; null takes the response limit."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig = KlConfig()
    """KL to the reference policy, in the reward or in the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """What makes up for a sampler that is not the policy before the update."""
    overlong_filtering: bool = False
    """Take truncated answers out of the loss; they stay in their group's statistics."""
