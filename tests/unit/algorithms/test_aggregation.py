"""Aggregations against their definitions in loops, whole and split into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.algorithms.aggregation import AGGREGATIONS, aggregate

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
        """What the function makes of `part` as a micro-batch."""
        flat = [(v, m, b) for b, (_, tokens) in enumerate(part) for v, m in tokens]
        values = torch.tensor([v for v, _, _ in flat], dtype=torch.float64)
        result = aggregate(
            values,
            torch.tensor([m for _, m, _ in flat], dtype=torch.bool),
            torch.tensor([b for _, _, b in flat], dtype=torch.int64),
            name,
            group_tokens=torch.tensor([self.group_tokens[g] for g, _ in part], dtype=torch.int64),
            tokens=self.tokens,
            samples=self.n_samples,
            groups=self.n_groups,
            norm_tokens=NORM,
        )
        return float(result)

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


def test_an_update_worked_by_hand() -> None:
    # Group 0: sample a counts 1, 2, 3; sample b counts 6. Group 1: c counts 4, 8. d counts none.
    update = Update(
        [
            (0, [(1.0, True), (2.0, True), (3.0, True)]),
            (0, [(99.0, False), (6.0, True)]),
            (1, [(4.0, True), (8.0, True)]),
            (2, [(99.0, False)]),
        ]
    )
    expected = {
        "token-mean": 24 / 6,
        "seq-mean-token-mean": (2 + 6 + 6) / 3,
        "seq-mean-token-sum": 24 / 3,
        "token-sum": 24,
        "seq-mean-token-sum-norm": 24 / 3 / 7,
        "prompt-mean-token-mean": (12 / 4 + 12 / 2) / 2,
    }
    got = {name: update.aggregate(name, update.samples) for name in AGGREGATIONS}
    assert got == pytest.approx(expected)


@given(update=UPDATES, cuts=st.lists(st.integers(0, 8), max_size=3))
def test_micro_batches_add_up_to_the_definition(update: Update, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(update.samples)]
    for name in AGGREGATIONS:
        parts = [update.samples[a:b] for a, b in pairwise(bounds)]
        got = sum(update.aggregate(name, part) for part in parts)
        assert got == pytest.approx(update.defined(name), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_nothing_outside_the_mask_is_read(name: str) -> None:
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    total = aggregate(
        values,
        mask,
        torch.tensor([0, 0, 1]),
        name,
        group_tokens=torch.tensor([1, 0]),
        tokens=1,
        samples=1,
        groups=1,
        norm_tokens=1.0,
    )
    total.backward()
    assert float(total.detach()) == 1.0
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_an_update_without_a_counted_token_is_zero(name: str) -> None:
    assert Update([(0, [(3.0, False)])]).aggregate(name, [(0, [(3.0, False)])]) == 0.0
    assert Update([]).aggregate(name, []) == 0.0
