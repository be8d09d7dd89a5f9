"""KL to the reference policy, taken off the rewards of tokens.

Shapes: `T` packed tokens, `B` samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.kl import KL_ESTIMATORS, adapted_coef
from winnow.errors import TrainingError
from winnow.learning.batch import Batch
from winnow.observe.metrics import Metrics


@dataclass(frozen=True)
class Adaptation:
    """The aim of an adaptive weight."""

    target: float
    """nats a token"""
    horizon_samples: int


class KlPenalty:
    """beta * kl_t for each written token, beta fixed or moved after each step.

    Args:
        coef: beta, of the first step if it adapts.
        estimator: a key of `KL_ESTIMATORS`.
    """

    def __init__(self, coef: float, estimator: str, adaptation: Adaptation | None = None) -> None:
        self.coef = coef
        self._estimate, self._adaptation = KL_ESTIMATORS[estimator], adaptation

    def __call__(self, batch: Batch, metrics: Metrics) -> Tensor:
        """Return the step's penalties [T] in float64, 0 off gen_mask; from `old` and `ref`.

        Books `reward/kl`, the mean over samples of their mean, and `reward/kl_coef`; the weight
        moves afterwards, so the next step has the new one.

        Raises:
            TrainingError: the KL is not finite.
        """
        old, ref = batch.columns["old"].double(), batch.columns["ref"].double()
        kl_T = torch.where(batch.gen_mask, self._estimate(old, ref), 0.0)
        mean = float((sum_samples(kl_T, batch) / written(batch).clamp(min=1)).mean())
        if not math.isfinite(mean):
            raise TrainingError(
                f"algorithm.kl.reward: the KL to the reference is {mean}; look for NaN weights in "
                "model.path and reference.path, or lower optim.lr"
            )
        metrics.mean("reward/kl", mean)
        metrics.last("reward/kl_coef", self.coef)
        penalty_T = self.coef * kl_T
        if self._adaptation is not None:
            aim = self._adaptation
            self.coef = adapted_coef(
                self.coef,
                kl=mean,
                target=aim.target,
                n=batch.n_samples,
                horizon=aim.horizon_samples,
            )
        return penalty_T

    def state_dict(self) -> dict[str, Any]:
        """Return the weight as it stands."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.coef = state["coef"]


def sum_samples(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum [B] of values [T] over each sample's tokens."""
    lengths = batch.offsets.diff()
    index = torch.repeat_interleave(torch.arange(batch.n_samples), lengths)
    return torch.zeros(batch.n_samples, dtype=values.dtype).index_add_(0, index, values)


def written(batch: Batch) -> Tensor:
    """Return how many tokens the policy wrote in each sample, [B] int64."""
    return sum_samples(batch.gen_mask.long(), batch)
