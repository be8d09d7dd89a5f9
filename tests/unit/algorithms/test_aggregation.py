"""Aggregations against their definitions in loops, whole and split into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from winnow.algorithms.aggregation import AGGREGATIONS, UpdateCounts, aggregate

NORM = 7.0
Sample = tuple[int, list[tuple[float, bool]]]
"""Group, and value and mask of each token."""


@dataclass
class Update:
    """The samples of an update and its counts, counted in loops."""

    samples: list[Sample]

    def __post_init__(self) -> None:
        self.group_tokens: dict[int, int] = {}
        for group, tokens in self.samples:
            counted = sum(mask for _, mask in tokens)
            self.group_tokens[group] = self.group_tokens.get(group, 0) + counted
        self.tokens = sum(self.group_tokens.values())
        self.n_samples = sum(any(mask for _, mask in tokens) for _, tokens in self.samples)
        self.n_groups = sum(n > 0 for n in self.group_tokens.values())

    def aggregate(self, name: str, part: list[Sample]) -> float:
        """What the function makes of `part` as a micro-batch; it reads nothing off the mask."""
        flat = [(v, m, b) for b, (_, tokens) in enumerate(part) for v, m in tokens]
        mask = torch.tensor([m for _, m, _ in flat], dtype=torch.bool)
        values = torch.tensor([v if m else math.nan for v, m, _ in flat], dtype=torch.float64)
        result = aggregate(
            values.requires_grad_(),
            mask,
            torch.tensor([b for _, _, b in flat], dtype=torch.int64),
            name,
            group_tokens=torch.tensor([self.group_tokens[g] for g, _ in part], dtype=torch.int64),
            counts=UpdateCounts(self.tokens, self.n_samples, self.n_groups),
            norm_tokens=NORM,
        )
        (gradient,) = torch.autograd.grad(result, values)
        assert not gradient[~mask].any()
        total = float(result.detach())
        by_gradient = (gradient * values.detach())[mask].sum()  # as each aggregation is linear
        assert float(by_gradient) == pytest.approx(total, rel=1e-10, abs=1e-12)
        return total

    def defined(self, name: str) -> float:
        """The definition."""
        kept = [(g, [v for v, m in tokens if m]) for g, tokens in self.samples]
        kept = [(g, values) for g, values in kept if values]
        if not kept:
            return 0.0
        sums = [sum(values) for _, values in kept]
        if name == "token-sum":
            return sum(sums)
        if name == "token-mean":
            return sum(sums) / sum(len(values) for _, values in kept)
        if name == "seq-mean-token-mean":
            return sum(sum(values) / len(values) for _, values in kept) / len(kept)
        if name == "seq-mean-token-sum":
            return sum(sums) / len(kept)
        if name == "seq-mean-token-sum-norm":
            return sum(sums) / len(kept) / NORM
        assert name == "prompt-mean-token-mean"
        by_group: dict[int, list[float]] = {}
        for group, values in kept:
            by_group.setdefault(group, []).extend(values)
        return sum(sum(v) / len(v) for v in by_group.values()) / len(by_group)


TOKENS = st.lists(st.tuples(st.integers(-9, 9).map(float), st.booleans()), max_size=6)
UPDATES = st.lists(st.tuples(st.integers(0, 3), TOKENS), max_size=8).map(Update)


@example(update=Update([]), cuts=[])
@example(update=Update([(0, [(3.0, False)])]), cuts=[])
@given(update=UPDATES, cuts=st.lists(st.integers(0, 8), max_size=3))
def test_micro_batches_add_up_to_the_definition(update: Update, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(update.samples)]
    for name in AGGREGATIONS:
        parts = [update.samples[a:b] for a, b in pairwise(bounds)]
        got = sum(update.aggregate(name, part) for part in parts)
        assert got == pytest.approx(update.defined(name), rel=1e-10, abs=1e-12)
