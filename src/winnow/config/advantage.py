"""How rewards become advantages: one section for each estimator; `name` picks it.

The formulas stand in `winnow.algorithms.advantages` and `.token_advantages`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Options, Section, UserObject


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


class CustomAdvantage(Section):
    """An estimator of your own, given by its place; docs/algorithms.md shows its signature."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the function: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the function."""


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
