"""The policy's part of a step: old log-probs if they are needed, then updates on mini-batches.

`PolicyObjective` is the loss of an update: policy loss, KL and entropy terms, and their figures,
which go by the names of `winnow.observe.metrics`. `Policy` holds the strategy that minimizes it;
the strategy knows the model.

Shapes: `T` packed tokens, `B` samples. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from winnow.algorithms.aggregation import aggregate
from winnow.algorithms.correction import (
    OLDEST_AGE,
    correct,
    max_delta,
    mismatch_figures,
    mismatch_sums,
)
from winnow.algorithms.covariance import keyed_draws
from winnow.algorithms.kl import token_kl
from winnow.algorithms.losses import LossTokens, PolicyLoss
from winnow.learning.advantage import record_correction
from winnow.learning.batch import Batch, MicroBatch, gather_tokens
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossFn, LossResult, Stats, Strategy, run_pass
from winnow.observe.metrics import Metrics

OldSource = Literal["pass", "reuse", "current", "behav"]
_MISMATCH, _CORRECTION = "mismatch/", "correction/"


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
    KL term, `selected` for a loss that selects tokens; `weight` and `age` are taken where they are.
    """

    outputs: ClassVar[frozenset[Output]] = frozenset({"logprob", "entropy"})
    """The outputs that the strategy must compute."""
    loss: PolicyLoss
    options: Mapping[str, Any]
    """The loss's own, by keyword."""
    aggregation: str
    """One of `AGGREGATIONS`."""
    norm_tokens: float | None = None
    """The constant length of seq-mean-token-sum-norm."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which is aggregated as the loss is."""
    kl: KlTerm | None = None
    """KL in the loss."""
    old: OldSource = "pass"
    """The source of `old`: a pass before the updates; the sampler for groups that have no token of
    older weights, and a pass for the others (reuse); this very forward pass (exact where a step
    has one update); or the sampler (bypass)."""
    correction: Mapping[str, Any] | None = None
    """Options of `correct` for the current policy against the sampler's: fused and bypass mode.
    Rejected tokens add nothing to a mean and still count in it."""
    reports_mismatch: bool = True
    """True if the figures say how far the sampler was, where no pass has: for a step's first
    update, since the later ones' policy has moved by itself."""

    @property
    def selects(self) -> bool:
        """True if tokens are chosen once an update."""
        return self.draws and self.options["selection"] == "update"

    @property
    def draws(self) -> bool:
        """True if the loss needs a random number a token."""
        return self.loss.select is not None

    def __call__(self, micro: MicroBatch, outputs: Outputs) -> LossResult:
        """Return the micro-batch's share of the update's loss, with figures.

        `policy_loss` and `kl_loss` among the sums are shares of aggregated losses, the others
        sums over tokens; names with a slash are not the actor's.
        """
        logp, entropy = outputs["logprob"], outputs["entropy"]
        now = logp.detach()
        old = now if self.old == "current" else micro.columns["old"]
        sums, maxima = self._mismatch(now, micro)
        mask, weight = micro.loss_mask, micro.columns.get("weight")
        if self.correction is not None:
            correction = correct(
                now, micro.behav, micro.gen_mask, mask, micro.offsets, **self.correction
            )
            mask, weight = correction.loss_mask, correction.weights
            sums |= {f"{_CORRECTION}{name}": total for name, total in correction.sums.items()}
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
            figures = {n: total for n, total in figures.items() if n not in self.loss.distances}
        if weight is not None:
            loss_T = loss_T * weight
        policy_loss = loss = self._mean(loss_T, mask, micro)
        if self.kl is not None:
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
        """Compare sampler and current policy, where no pass has done so before."""
        if self.old == "pass" or not self.reports_mismatch:
            return {}, {}
        pair = (now, micro.behav, micro.gen_mask)
        mismatch = mismatch_sums(*pair, micro.columns.get("age"))
        sums = {f"{_MISMATCH}{name}": total for name, total in mismatch.items()}
        return sums, {f"{_MISMATCH}max_delta": max_delta(*pair)}

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
        counts=micro.counts,
        norm_tokens=norm_tokens,
    )


class Policy:
    """The model being trained, in the role of the policy."""

    def __init__(self, strategy: Strategy, objective: PolicyObjective) -> None:
        self.strategy, self.objective = strategy, objective

    @property
    def has_pass(self) -> bool:
        """True if a step begins with a separate pass for the old log-probs."""
        return self.objective.old == "pass"

    def fill_old_logprobs(
        self, batch: Batch, microbatch_tokens: int, with_squares: bool = False
    ) -> Metrics:
        """Fill the column `old` [T] as the objective wants it, with a pass if it takes one.

        A pass over all groups fills `entropy` [T], too. It also measures how far the sampler was
        from the trainer; else the first update does.

        Args:
            with_squares: fill `prob_square_sum` [T] too, which needs a pass.

        Returns:
            `actor/old_pass`, the share of tokens in a pass, and after one over all `mismatch/…`.
        """
        if self.objective.old == "reuse":
            return self._reuse_logprobs(batch, microbatch_tokens)
        metrics = Metrics()
        metrics.last("actor/old_pass", int(self.has_pass))
        if self.objective.old == "behav":
            batch.columns["old"] = batch.behav
        if not self.has_pass:
            return metrics
        outputs: frozenset[Output] = frozenset({"logprob", "entropy"})
        if with_squares:
            outputs |= {"prob_square_sum"}
        columns = run_pass(self.strategy, batch, outputs, microbatch_tokens)
        old = batch.columns["old"] = columns.pop("logprob")
        batch.columns.update({str(name): values for name, values in columns.items()})
        pair, dp = (old, batch.behav, batch.gen_mask), batch.dp
        totals = mismatch_sums(*pair, batch.columns.get("age"))
        sums = dp.reduce_figures({name: float(total) for name, total in totals.items()})
        _record_mismatch(metrics, sums, float(torch.tensor(dp.all_gather(max_delta(*pair))).max()))
        return metrics

    def _reuse_logprobs(self, batch: Batch, microbatch_tokens: int) -> Metrics:
        """Fill `old` [T] from the sampler, but for groups with a token of older weights."""
        metrics, mask, strategy = Metrics(), batch.gen_mask, self.strategy
        groups_T = batch.groups.repeat_interleave(batch.offsets.diff())
        older = sorted({*groups_T[batch.columns["age"] != 0].tolist()})
        is_older_T = torch.isin(groups_T, torch.tensor(older, dtype=torch.int64))
        micro = strategy.sharder.cut_update(batch, older, microbatch_tokens)
        passed = strategy.forward(micro, frozenset({"logprob"}))
        recomputed = gather_tokens(batch, micro, [each["logprob"] for each in passed])
        batch.columns["old"] = torch.where(is_older_T, recomputed, batch.behav)
        metrics.mean_of("actor/old_pass", int((is_older_T & mask).sum()), int(mask.sum()))
        return metrics

    def select_tokens(
        self, batch: Batch, groups: Sequence[int], sample_keys: Tensor, seed: int
    ) -> None:
        """Fill the columns of a loss that selects tokens, for the tokens of one update.

        Args:
            groups: ordinals of the update's groups.
            sample_keys: [B] int64, a name of each sample whatever its place in the batch.
            seed: of the draws; another one for each update.
        """
        objective = self.objective
        if not objective.draws:
            return
        lengths = batch.offsets.diff()
        in_update_B = torch.isin(batch.groups, torch.tensor(groups))
        mask_T = batch.loss_mask & in_update_B.repeat_interleave(lengths)
        places_T = torch.arange(len(mask_T)) - batch.offsets[:-1].repeat_interleave(lengths)
        draws_T = keyed_draws(seed, sample_keys.repeat_interleave(lengths), places_T)
        if not objective.selects:
            batch.columns["draws"] = draws_T
            return
        select = objective.loss.select
        assert select is not None
        # A token is chosen among all of the update: their numbers go to every rank.
        columns, dp = batch.columns, batch.dp
        numbers = (columns["old"], columns["advantages"], draws_T)
        parts = dp.all_gather(tuple(each[mask_T] for each in numbers))
        old, advantages, draws = (torch.cat(each) for each in zip(*parts, strict=True))
        chosen = select(old, advantages, torch.ones_like(old).bool(), draws, **objective.options)
        local = torch.split(chosen, [len(each) for each, _, _ in parts])[dp.share]
        columns["selected"] = torch.zeros_like(mask_T).masked_scatter_(mask_T, local)

    def update(
        self, microbatches: Sequence[MicroBatch], lr: float, has_moved: bool = False
    ) -> Metrics:
        """Make one optimizer step on one mini-batch.

        Args:
            has_moved: an update of this step has changed the weights, so that they no longer
                measure how far the sampler was.

        Returns:
            `actor/…`, and `mismatch/…` if no pass gave it. Of an update that was skipped only
            the counts, so that a NaN among its figures does not hide those of the others.
        """
        objective = replace(self.objective, reports_mismatch=not has_moved)
        outputs = objective.outputs
        metrics, sums = run_update(self.strategy, outputs, objective, microbatches, lr, "actor")
        if sums is not None:
            counts = microbatches[0].counts
            _record_update(metrics, sums, counts.tokens, counts.samples)
        return metrics


def _record_update(metrics: Metrics, sums: Stats, tokens: int, samples: int) -> None:
    """Book the figures of an update from its sums."""
    sums = dict(sums)
    mismatch = _pop_prefix(sums, _MISMATCH)
    if mismatch:
        _record_mismatch(metrics, mismatch, mismatch.pop("max_delta"))
    correction = _pop_prefix(sums, _CORRECTION)
    if correction:
        record_correction(metrics, correction, tokens=tokens, samples=samples)
    metrics.mean("actor/loss", sums.pop("loss"))
    for name in ("policy_loss", "kl_loss"):
        if name in sums:
            metrics.mean(f"actor/{name}", sums.pop(name))
    if "clip_share" in sums:
        clipped = sums.pop("clip_share")
        if "clip_high_share" in sums:
            high = sums.pop("clip_high_share")
            metrics.mean_of("actor/clip_high", high, tokens)
            metrics.mean_of("actor/clip_low", clipped - high, tokens)
        else:
            metrics.mean_of("actor/clip", clipped, tokens)
    if "dual_clip_share" in sums:
        metrics.mean_of("actor/dual_clip", sums.pop("dual_clip_share"), tokens)
    for name, total in sums.items():
        metrics.mean_of(f"actor/{name}", total, tokens)


def _pop_prefix(sums: dict[str, float], prefix: str) -> dict[str, float]:
    """Take out the sums whose names begin with `prefix`, and drop the prefix."""
    names = [name for name in sums if name.startswith(prefix)]
    return {name.removeprefix(prefix): sums.pop(name) for name in names}


def _record_mismatch(metrics: Metrics, sums: Mapping[str, float], largest: float) -> None:
    figures = mismatch_figures(sums)
    for name, value in figures.items():
        metrics.mean(f"{_MISMATCH}{name}", value, sums["tokens"])
    if figures:
        metrics.max(f"{_MISMATCH}max_delta", largest)
    for age in (f"age_{k}/" for k in range(OLDEST_AGE + 1)):
        if tokens := sums.get(f"{age}tokens"):
            metrics.mean_of(f"{_MISMATCH}{age}share", tokens, sums["tokens"])
            for name in ("abs_delta", "k3"):
                metrics.mean_of(f"{_MISMATCH}{age}{name}", sums[age + name], tokens)


def run_update(
    strategy: Strategy,
    outputs: frozenset[Output],
    loss_fn: LossFn,
    microbatches: Sequence[MicroBatch],
    lr: float,
    role: str,
) -> tuple[Metrics, Stats | None]:
    """Make one optimizer step on one mini-batch.

    Returns:
        `role/updates`, `role/skipped_updates`, `role/lr` and `role/grad_norm`; and the summed
        loss and diagnostics, or None where nothing was learnt: without a counted token (then
        there are no figures either), or when the gradient was not finite, so that a NaN does not
        hide the figures of other updates.
    """
    metrics = Metrics()
    # Without a counted token the gradient is zero, and momentum and decay alone would step.
    if not microbatches or microbatches[0].counts.tokens == 0:
        return metrics, None
    sums = strategy.forward_backward(microbatches, outputs, loss_fn)
    step = strategy.optimizer_step(lr)
    metrics.sum(f"{role}/updates", 1)
    metrics.sum(f"{role}/skipped_updates", int(step["skipped"]))
    metrics.last(f"{role}/lr", lr)
    if step["skipped"]:
        return metrics, None
    metrics.mean(f"{role}/grad_norm", step["grad_norm"])
    return metrics, sums
