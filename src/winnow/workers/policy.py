"""The policy's part of a step: old log-probs once, then updates on mini-batches.

The role holds a strategy and knows names of columns and figures; the strategy knows the model.
Figures go by the names of `winnow.observe.names`.

Shapes: `T` packed tokens, `B` samples. Log-probs are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from winnow.algorithms.aggregation import aggregate
from winnow.algorithms.policy_loss import POLICY_DIAGNOSTICS, POLICY_LOSSES
from winnow.batching import Batch, MicroBatch, all_micro_batches, gather_tokens
from winnow.observe.metrics import Metrics
from winnow.workers.strategy import LossResult, Output, Outputs, Stats, Strategy
from winnow.workers.updating import run_update

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyObjective:
    """What an update of the policy minimizes; a loss function for a strategy.

    Micro-batches must bring the columns `old` and `advantages`.
    """

    policy_loss: str
    """A key of `POLICY_LOSSES`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The loss's own, by keyword."""
    aggregation: str = "token-mean"
    """A key of `AGGREGATIONS`."""
    norm_tokens: float | None = None
    """The constant length of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which is aggregated as the loss is."""

    def __post_init__(self) -> None:
        if self.policy_loss not in POLICY_LOSSES:
            known = ", ".join(POLICY_LOSSES)
            raise ValueError(f"policy_loss must be one of {known}, got {self.policy_loss!r}")

    @property
    def outputs(self) -> frozenset[Output]:
        """What the strategy must compute."""
        return frozenset({"logprob", "entropy"})

    def __call__(self, micro: MicroBatch, outputs: Outputs) -> LossResult:
        """The micro-batch's share of the update's loss, with sums over loss_mask beside it.

        `policy_loss` among the sums is a share of the aggregated loss, the others are sums over
        tokens.
        """
        logp, entropy = outputs["logprob"], outputs["entropy"]
        terms = (logp, micro.columns["old"], micro.columns["advantages"])
        loss_T = POLICY_LOSSES[self.policy_loss](*terms, **self.options)
        loss = policy_loss = self._aggregate(loss_T, micro)
        if self.entropy_coef:
            loss = policy_loss - self.entropy_coef * self._aggregate(entropy, micro)
        mask = micro.loss_mask
        diagnostics = POLICY_DIAGNOSTICS[self.policy_loss](*terms, mask, **self.options)
        with torch.no_grad():
            sums = {
                "policy_loss": policy_loss,
                "entropy": (entropy * mask).sum(),
                "mean_prob": (logp.exp() * mask).sum(),
                **diagnostics,
            }
        return LossResult(loss, sums)

    def _aggregate(self, values: Tensor, micro: MicroBatch) -> Tensor:
        counts = micro.counts
        return aggregate(
            values,
            micro.loss_mask,
            micro.sample_index,
            self.aggregation,
            group_tokens=micro.group_tokens,
            tokens=counts.tokens,
            samples=counts.samples,
            groups=counts.groups,
            norm_tokens=self.norm_tokens,
        )


class Policy:
    """The model being trained, in the role of the policy."""

    def __init__(self, strategy: Strategy, objective: PolicyObjective) -> None:
        self.strategy, self.objective = strategy, objective

    def old_logprobs(self, batch: Batch, microbatch_tokens: int) -> Metrics:
        """Fill `batch.columns["old"]` [T] and say how far the sampler was from it."""
        micro = all_micro_batches(batch, microbatch_tokens)
        found = self.strategy.forward(micro, frozenset({"logprob"}))
        old = gather_tokens(batch, micro, [values["logprob"] for values in found])
        batch.columns["old"] = old
        return mismatch(old[batch.gen_mask], batch.behav[batch.gen_mask])

    def update(self, microbatches: Sequence[MicroBatch], lr: float) -> Metrics:
        """One optimizer step on one mini-batch.

        Returns:
            `actor/…`. Of an update that was skipped only the counts, so that a NaN among its
            figures does not hide those of the others.
        """
        metrics, sums = run_update(self.strategy, self.objective, microbatches, lr, "actor")
        if sums is not None:
            _book(metrics, sums, microbatches[0].counts.tokens)
        return metrics


def mismatch(old: Tensor, behav: Tensor, bounds: tuple[float, float] = (0.5, 2.0)) -> Metrics:
    """How the trainer's log-probs differ from the sampler's, over all tokens together.

    With l = old - behav and w = exp(l), l held within +-20: `k1` = mean -l and `k3` = mean of
    w - 1 - l estimate KL(behav || old); `chi2` = mean w^2 - 1; `ess` = (sum w)^2 / (n sum w^2),
    the effective share of the tokens; `outside` the share of w beyond `bounds`; `pearson` the
    correlation of the two probabilities (1 where one of them does not vary and both agree).

    Args:
        old, behav: [T] nats, only tokens that the policy wrote.

    Returns:
        `mismatch/…`; nothing for no tokens.
    """
    metrics = Metrics()
    n = old.numel()
    if n == 0:
        return metrics
    old, behav = old.double(), behav.to(old.device).double()
    delta = old - behav
    log_w = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    w = log_w.exp()
    total, squares = w.sum(), w.square().sum()
    outside = ((w < bounds[0]) | (w > bounds[1])).sum()
    means: dict[str, Tensor | float] = {
        "abs_delta": delta.abs().mean(),
        "k1": -log_w.mean(),
        "k3": (w - 1 - log_w).mean(),
        "chi2": squares / n - 1,
        "ess": total.square() / (n * squares),
        "outside": outside / n,
        "pearson": _pearson(old.exp(), behav.exp()),
        "ppl_old": (-old.mean()).exp(),
        "ppl_behav": (-behav.mean()).exp(),
        "ppl_ratio": (-delta.mean()).exp(),
    }
    for name, value in means.items():
        metrics.mean(f"mismatch/{name}", float(value), n)
    metrics.max("mismatch/max_delta", float(delta.abs().max()))
    return metrics


def _pearson(x: Tensor, y: Tensor) -> float:
    x, y = x - x.mean(), y - y.mean()
    spread = math.sqrt(float(x.square().sum()) * float(y.square().sum()))
    if spread == 0.0:
        return 1.0 if torch.equal(x, y) else math.nan
    return float((x * y).sum()) / spread


def _book(metrics: Metrics, sums: Stats, tokens: int) -> None:
    sums = dict(sums)
    metrics.mean("actor/loss", sums.pop("loss"))
    metrics.mean("actor/policy_loss", sums.pop("policy_loss"))
    if "clip_share" in sums:
        high = sums.pop("clip_high_share")
        metrics.mean_of("actor/clip_high", high, tokens)
        metrics.mean_of("actor/clip_low", sums.pop("clip_share") - high, tokens)
    if "dual_clip_share" in sums:
        metrics.mean_of("actor/dual_clip", sums.pop("dual_clip_share"), tokens)
    for name, total in sums.items():
        metrics.mean_of(f"actor/{name}", total, tokens)
