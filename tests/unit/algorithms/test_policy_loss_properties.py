"""What no policy loss may depend on: tokens that do not count, order, the split, the packing."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.objectives import LOSS_SECTIONS, loss_options
from torch import Tensor

from winnow.algorithms.aggregation import AGGREGATIONS, aggregate
from winnow.algorithms.covariance import keyed_draws
from winnow.algorithms.losses import POLICY_LOSSES, LossTokens

OPTIONS: dict[str, dict[str, Any]] = {
    # So that every few tokens are selected, and bounds are met at the scales below.
    "clip_cov": {"share": 0.2, "cov_low": 0.05},
    "kl_cov": {"share": 0.2},
    "gspo": {"clip_low": 0.05, "clip_high": 0.1},
}


def options_of(name: str) -> dict[str, Any]:
    return loss_options(name, OPTIONS.get(name))


PAIRS = [
    (name, aggregation)
    for name in POLICY_LOSSES
    for aggregation in LOSS_SECTIONS[name].aggregations or AGGREGATIONS
]
RAGGED = {
    "seed": st.integers(0, 2**31),
    "lengths": st.lists(st.integers(1, 7), min_size=1, max_size=6),
    "scale": st.sampled_from([0.05, 1.0, 30.0]),
}


@dataclass
class Update:
    """The samples of one update, packed; columns are [T], `key` and `group` are [B]."""

    logp: Tensor
    old: Tensor
    advantage: Tensor
    mask: Tensor
    position: Tensor
    lengths: list[int]
    key: Tensor
    group: Tensor

    @property
    def sample_index(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def where(self, samples: list[int]) -> Tensor:
        """The tokens of these samples, in their order."""
        spans = torch.arange(sum(self.lengths)).split(self.lengths)
        return torch.cat([spans[b] for b in samples])

    def of(self, samples: list[int]) -> Update:
        """These samples alone."""
        at = self.where(samples)
        columns = (self.logp, self.old, self.advantage, self.mask, self.position)
        lengths = [self.lengths[b] for b in samples]
        return Update(*(c[at] for c in columns), lengths, self.key[samples], self.group[samples])


def update_of(seed: int, lengths: list[int], scale: float) -> Update:
    made = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    old = -4 * torch.rand(n, generator=made, dtype=torch.float64)
    logp = old + scale * (2 * torch.rand(n, generator=made, dtype=torch.float64) - 1)
    advantage = torch.randn(len(lengths), generator=made, dtype=torch.float64)
    return Update(
        logp,
        old,
        advantage.repeat_interleave(torch.tensor(lengths)),
        torch.rand(n, generator=made) > 0.25,
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
        torch.arange(100, 100 + len(lengths)),
        torch.arange(len(lengths)) // 2,
    )


def selected(name: str, update: Update) -> Tensor | None:
    """What the loss selects for the update."""
    select = POLICY_LOSSES[name].select
    if select is None:
        return None
    draws = keyed_draws(7, update.key[update.sample_index], update.position)
    return select(update.old, update.advantage, update.mask, draws, **options_of(name))


def per_token(
    name: str, update: Update, chosen: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor], LossTokens]:
    """The loss [T], the leaf it came from, the diagnostics, and what was passed."""
    tokens = LossTokens(update.mask, update.sample_index, len(update.lengths), chosen)
    leaf = update.logp.clone().requires_grad_()
    loss, sums = POLICY_LOSSES[name](leaf, update.old, update.advantage, tokens, options_of(name))
    return loss, leaf, sums, tokens


def share(
    name: str, aggregation: str, part: Update, chosen: Tensor | None, counts: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A part's share of the aggregate, its gradient [T], and its diagnostics."""
    loss, leaf, sums, tokens = per_token(name, part, chosen)
    totals = {**counts, "group_tokens": counts["group_tokens"][part.group]}
    total = aggregate(loss, tokens.mask, tokens.sample_index, aggregation, **totals)
    return total.detach(), torch.autograd.grad(total, leaf)[0], sums


def counts_of(update: Update) -> dict[str, Any]:
    samples = torch.zeros(len(update.lengths), dtype=torch.int64)
    samples.index_add_(0, update.sample_index, update.mask.long())
    groups = torch.zeros(len(update.lengths), dtype=torch.int64).index_add_(
        0, update.group, samples
    )
    return {
        "group_tokens": groups,
        "tokens": int(update.mask.sum()),
        "samples": int((samples > 0).sum()),
        "groups": int((groups > 0).sum()),
        "norm_tokens": 9.0,
    }


@pytest.mark.parametrize("name", POLICY_LOSSES)
@examples(15)
@given(junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -3.0]), **RAGGED)
def test_tokens_that_do_not_count_change_nothing(
    name: str, junk: float, seed: int, lengths: list[int], scale: float
) -> None:
    update = update_of(seed, lengths, scale)
    chosen = selected(name, update)
    loss, leaf, sums, _ = per_token(name, update, chosen)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    off = ~update.mask
    assert not loss[off].any()
    assert not gradient[off].any()
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    for column in ("logp", "old", "advantage"):
        setattr(update, column, torch.where(off, junk, getattr(update, column)))
    again = selected(name, update)
    if chosen is not None and again is not None:
        assert torch.equal(chosen, again)
        again = again | off
    spoilt, leaf, spoilt_sums, _ = per_token(name, update, again)
    (spoilt_gradient,) = torch.autograd.grad(spoilt.sum(), leaf)
    assert torch.equal(loss, spoilt)
    assert torch.equal(gradient, spoilt_gradient)
    assert sums.keys() == spoilt_sums.keys()
    assert all(torch.equal(sums[key], spoilt_sums[key]) for key in sums)


@pytest.mark.parametrize(("name", "aggregation"), PAIRS)
@examples(12)
@given(data=st.data(), **RAGGED)
def test_order_and_split_change_neither_value_nor_gradient(
    name: str, aggregation: str, data: st.DataObject, seed: int, lengths: list[int], scale: float
) -> None:
    update = update_of(seed, lengths, scale)
    counts = counts_of(update)
    chosen = selected(name, update)
    whole, gradient, sums = share(name, aggregation, update, chosen, counts)

    order = data.draw(st.permutations(range(len(lengths))))
    cuts = data.draw(st.sets(st.integers(1, len(lengths)), max_size=len(lengths)))
    shuffled = update.of(order)
    chosen_there = selected(name, shuffled)
    edges = sorted({0, len(lengths), *cuts})
    total, pieces = torch.zeros((), dtype=torch.float64), torch.zeros_like(gradient)
    added = dict.fromkeys(sums, 0.0)
    for start, stop in itertools.pairwise(edges):
        samples = order[start:stop]
        part = update.of(samples)
        at = shuffled.where(list(range(start, stop)))
        value, piece, figures = share(
            name, aggregation, part, None if chosen_there is None else chosen_there[at], counts
        )
        total += value
        pieces[update.where(samples)] += piece
        added = {key: added[key] + float(figures[key]) for key in added}
    bound = 1e-10 * max(float(gradient.norm()), 1e-12)
    assert float((pieces - gradient).norm()) <= bound
    assert float(total) == pytest.approx(float(whole), rel=1e-10, abs=1e-12)
    assert added == pytest.approx({key: float(value) for key, value in sums.items()}, abs=1e-9)


def test_gmpo_aggregates_to_the_mean_over_samples_of_its_ratio() -> None:
    update = update_of(3, [4, 1, 6], 0.3)
    total, _, _ = share("gmpo", "seq-mean-token-mean", update, None, counts_of(update))
    expected = []
    for b in range(3):
        rows = [int(t) for t in update.where([b]) if update.mask[t]]
        if rows:
            a = float(update.advantage[rows[0]])
            log_ratios = [float(update.logp[t] - update.old[t]) for t in rows]
            held = [min(d, 0.4) if a > 0 else max(d, -0.4) for d in log_ratios]
            expected.append(-a * math.exp(math.fsum(held) / len(held)))
    assert len(expected) > 1
    assert float(total) == pytest.approx(math.fsum(expected) / len(expected), rel=1e-12)
