"""Losses and estimators by their names in a recipe, with the defaults of their sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from winnow.algorithms.advantages import ESTIMATORS, AdvantageInputs, Advantages, estimate
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.config.algorithm import Advantage, PolicyLoss, PolicyLossSection
from winnow.learning.advantage import AdvantageStage, KlPenalty
from winnow.learning.policy import PolicyObjective

LOSS_SECTIONS: dict[str, type[PolicyLossSection]] = {
    section.model_fields["name"].default: section for section in get_args(get_args(PolicyLoss)[0])
}
ADVANTAGE_SECTIONS: dict[str, Any] = {
    section.model_fields["name"].default: section for section in get_args(get_args(Advantage)[0])
}


def loss_options(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a loss gets where a recipe says nothing but `options`."""
    return LOSS_SECTIONS[name](**(options or {})).model_dump(exclude={"name"})


def legal_aggregation(name: str) -> str:
    """An aggregation that the loss may go with."""
    return (*LOSS_SECTIONS[name].aggregations, "token-mean")[0]


def policy_objective(
    name: str, options: Mapping[str, Any] | None = None, **fields: Any
) -> PolicyObjective:
    fields = {"aggregation": legal_aggregation(name), **fields}
    return PolicyObjective(POLICY_LOSSES[name], loss_options(name, options), **fields)


def advantage_options(name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What an estimator gets where a recipe says nothing but `options`."""
    found: dict[str, Any] = ADVANTAGE_SECTIONS[name](**(options or {})).model_dump(exclude={"name"})
    return found


def advantage_stage(
    name: str, options: Mapping[str, Any] | None = None, penalty: KlPenalty | None = None
) -> AdvantageStage:
    return AdvantageStage(ESTIMATORS[name], advantage_options(name, options), penalty)


def advantages(
    name: str, inputs: AdvantageInputs, options: Mapping[str, Any] | None = None
) -> Advantages:
    return estimate(ESTIMATORS[name], inputs, advantage_options(name, options))
