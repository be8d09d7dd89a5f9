"""Sampler against trainer: numbers by hand, sums that add up, and nothing that is NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from winnow.algorithms.correction import (
    OLDEST_AGE,
    max_delta,
    mismatch_figures,
    mismatch_sums,
    mismatch_sums_by_age,
)


def figures(old: Tensor, behav: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    mask = torch.ones(len(old), dtype=torch.bool) if mask is None else mask
    sums = {name: float(total) for name, total in mismatch_sums(old, behav, mask).items()}
    found = mismatch_figures(sums)
    return {**found, "max_delta": float(max_delta(old, behav, mask))} if found else {}


def test_figures_by_hand() -> None:
    old = torch.log(torch.tensor([0.45, 0.25, 0.9]))
    behav = torch.log(torch.tensor([0.25, 0.25, 0.3]))
    found = figures(old, behav)
    w = [1.8, 1.0, 3.0]
    logs = [math.log(x) for x in w]
    assert found["abs_delta"] == pytest.approx(sum(logs) / 3)
    assert found["max_delta"] == pytest.approx(math.log(3))
    assert found["k1"] == pytest.approx(-sum(logs) / 3)
    assert found["k3"] == pytest.approx(sum(x - 1 - math.log(x) for x in w) / 3)
    assert found["chi2"] == pytest.approx(sum(x * x for x in w) / 3 - 1)
    assert found["ess"] == pytest.approx(5.8**2 / (3 * sum(x * x for x in w)))
    assert found["outside"] == pytest.approx(1 / 3)
    assert found["ppl_old"] == pytest.approx((0.45 * 0.25 * 0.9) ** (-1 / 3))
    assert found["ppl_behav"] == pytest.approx((0.25 * 0.25 * 0.3) ** (-1 / 3))
    assert found["ppl_ratio"] == pytest.approx(5.4 ** (-1 / 3))
    wanted = np.corrcoef([0.45, 0.25, 0.9], [0.25, 0.25, 0.3])[0, 1]
    assert found["pearson"] == pytest.approx(wanted, rel=1e-5)


def test_mismatch_of_the_same_policy_is_none() -> None:
    old = torch.tensor([-0.5, -2.0, -0.1])
    found = figures(old, old.clone())
    zero = ("abs_delta", "max_delta", "k1", "k3", "chi2", "outside")
    assert all(found[f"{name}"] == pytest.approx(0, abs=1e-12) for name in zero)
    one = ("pearson", "ess", "ppl_ratio")
    assert all(found[f"{name}"] == pytest.approx(1) for name in one)


def test_mismatch_of_certain_tokens_and_of_no_tokens_is_defined() -> None:
    certain = torch.zeros(3)
    assert figures(certain, certain)["pearson"] == 1.0
    assert figures(torch.zeros(0), torch.zeros(0)) == {}
    far = figures(torch.tensor([-1000.0]), torch.tensor([0.0]))
    assert math.isfinite(far["k3"])


LOGS = st.floats(-20, 0)


@given(st.lists(st.tuples(LOGS, LOGS, st.booleans()), max_size=12), st.integers(0, 12))
def test_sums_of_parts_are_those_of_the_whole_and_the_rest_is_not_read(
    tokens: list[tuple[float, float, bool]], cut: int
) -> None:
    old, behav = (torch.tensor([t[i] for t in tokens], dtype=torch.float64) for i in (0, 1))
    mask = torch.tensor([t[2] for t in tokens], dtype=torch.bool)
    old[~mask], behav[~mask] = math.nan, math.inf
    whole = mismatch_sums(old, behav, mask)
    parts = [mismatch_sums(old[s], behav[s], mask[s]) for s in (slice(cut), slice(cut, None))]
    for name, total in whole.items():
        assert float(total) == pytest.approx(sum(float(part[name]) for part in parts))
    known = figures(old, behav, mask)
    assert bool(known) == bool(mask.any())
    assert all(math.isfinite(v) for name, v in known.items() if name != "pearson")
    if known:
        assert known["k3"] >= -1e-12
        assert known["ess"] <= 1 + 1e-12


def test_the_mismatch_by_age_is_that_of_the_tokens_of_that_age() -> None:
    generator = torch.Generator().manual_seed(3)
    old, behav = -torch.rand(2, 60, generator=generator, dtype=torch.float64)
    mask = torch.rand(60, generator=generator) < 0.8
    age = torch.randint(0, OLDEST_AGE + 4, (60,), generator=generator)
    found = mismatch_sums_by_age(old, behav, mask, age)
    assert len(found) == 3 * (OLDEST_AGE + 1)
    for k in range(OLDEST_AGE + 1):
        of_age = mask & (age >= k if k == OLDEST_AGE else age == k)
        assert of_age.any()
        alone = mismatch_sums(old, behav, of_age)
        for name in ("tokens", "abs_delta", "k3"):
            assert float(found[f"age_{k}/{name}"]) == pytest.approx(float(alone[name]))
