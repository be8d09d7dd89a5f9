"""The loss of a policy's update: policy loss, KL and entropy terms, and their figures.

Shapes: `T` packed tokens of a micro-batch, `B` its samples. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from winnow.algorithms.aggregation import aggregate
from winnow.algorithms.correction import correct, max_delta, mismatch_sums
from winnow.algorithms.losses import DISTANCE_FIGURES, LossTokens, PolicyLoss
from winnow.learning.batch import MicroBatch
from winnow.learning.strategy import LossResult, Output, Outputs

OldSource = Literal["pass", "current", "behav"]
MISMATCH = "mismatch/"


@dataclass(frozen=True)
class KlTerm:
    """coef times the aggregated KL to the reference, whose log-probs are the column `ref`."""

    coef: float
    estimator: str
    """A key of `KL_ESTIMATORS`."""
    importance_weight: bool = False
    """Weigh each token by its ratio to `old`."""


@dataclass(frozen=True)
class PolicyObjective:
    """A loss function for a strategy.

    Micro-batches must bring the columns `advantages`, `old` unless it is "current", `ref` for a
    KL term, `selected` for a loss that selects tokens; `weight` is taken where it is.
    """

    loss: PolicyLoss
    options: Mapping[str, Any]
    """The loss's own, by keyword."""
    aggregation: str
    """A key of `AGGREGATIONS`."""
    norm_tokens: float | None = None
    """The constant length of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which is aggregated as the loss is."""
    kl: KlTerm | None = None
    """KL in the loss."""
    old: OldSource = "pass"
    """The source of `old`: a pass before the updates, this very forward pass (exact where a
    step has one update), or the sampler (bypass)."""
    correction: Mapping[str, Any] | None = None
    """Options of `correct` for the current policy against the sampler's: fused and bypass mode.
    Rejected tokens add nothing to a mean and still count in it."""
    tells_mismatch: bool = True
    """True if the figures say how far the sampler was, where no pass has: for a step's first
    update, since the later ones' policy has moved by itself."""

    @property
    def selects(self) -> bool:
        """True if tokens are chosen once an update."""
        return self.draws and self.options["selection"] == "update"

    @property
    def draws(self) -> bool:
        """True if the loss asks for a random number a token."""
        return self.loss.select is not None

    @property
    def outputs(self) -> frozenset[Output]:
        """The outputs that the strategy must compute."""
        return frozenset({"logprob", "entropy"})

    def __call__(self, micro: MicroBatch, outputs: Outputs) -> LossResult:
        """Return the micro-batch's share of the update's loss, with figures beside it.

        `policy_loss` and `kl_loss` among the sums are shares of aggregated losses, the others
        sums over tokens; names with a slash are not the actor's.
        """
        logp, entropy = outputs["logprob"], outputs["entropy"]
        now = logp.detach()
        old = now if self.old == "current" else micro.columns["old"]
        sums, maxima = self._mismatch(now, micro)
        mask, weight = micro.loss_mask, micro.columns.get("weight")
        if self.correction is not None:
            found = correct(
                now, micro.behav, micro.gen_mask, mask, micro.offsets, **self.correction
            )
            mask, weight = found.loss_mask, found.weights
            sums |= {f"correction/{name}": total for name, total in found.sums.items()}
        columns = micro.columns
        tokens = LossTokens(
            mask,
            micro.sample_index,
            len(micro.lengths),
            selected=columns.get("selected"),
            draws=columns.get("draws"),
        )
        loss_T, figures = self.loss(logp, old, columns["advantages"], tokens, self.options)
        if self.old == "current":  # which is never far from itself
            figures = {n: total for n, total in figures.items() if n not in DISTANCE_FIGURES}
        if weight is not None:
            loss_T = loss_T * weight
        policy_loss = loss = self._mean(loss_T, mask, micro)
        if self.kl is not None:
            from winnow.algorithms.kl import token_kl

            # What stands outside the mask may be far off, and 0 times that would be NaN.
            kl_T = token_kl(
                self.kl.estimator,
                torch.where(mask, logp, 0.0),
                torch.where(mask, columns["ref"], 0.0),
                torch.where(mask, old, 0.0) if self.kl.importance_weight else None,
            )
            kl_loss = self._mean(kl_T, mask, micro)
            loss = loss + self.kl.coef * kl_loss
            sums["kl_loss"] = kl_loss.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * self._mean(entropy, mask, micro)
        with torch.no_grad():
            sums |= {
                "policy_loss": policy_loss,
                "entropy": torch.where(micro.loss_mask, entropy, 0.0).sum(),
                "mean_prob": torch.where(micro.loss_mask, logp.exp(), 0.0).sum(),
                **figures,
            }
        return LossResult(loss, sums, maxima)

    def _mismatch(
        self, now: Tensor, micro: MicroBatch
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Compare sampler and current policy, where no pass has told it before."""
        if self.old == "pass" or not self.tells_mismatch:
            return {}, {}
        pair = (now, micro.behav, micro.gen_mask)
        sums = {f"{MISMATCH}{name}": total for name, total in mismatch_sums(*pair).items()}
        return sums, {f"{MISMATCH}max_delta": max_delta(*pair)}

    def _mean(self, values: Tensor, mask: Tensor, micro: MicroBatch) -> Tensor:
        values = torch.where(mask, values, 0.0)
        return aggregate_share(values, micro, self.aggregation, self.norm_tokens)


def aggregate_share(
    values: Tensor, micro: MicroBatch, aggregation: str, norm_tokens: float | None
) -> Tensor:
    """Return the micro-batch's share of the update's aggregate of `values` [T] over loss_mask."""
    return aggregate(
        values,
        micro.loss_mask,
        micro.sample_index,
        aggregation,
        group_tokens=micro.group_tokens,
        tokens=micro.counts.tokens,
        samples=micro.counts.samples,
        groups=micro.counts.groups,
        norm_tokens=norm_tokens,
    )
