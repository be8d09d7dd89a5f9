"""Correction and mismatch: by hand, against loops, and nothing that is NaN."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from winnow.algorithms import correction
from winnow.algorithms.correction import (
    OLDEST_AGE,
    REJECTIONS,
    WEIGHTS,
    Corrected,
    divided_by_mean,
    max_delta,
    mismatch_figures,
    mismatch_sums,
)
from winnow.config.algorithm import Rejection, Weight

Sample = list[tuple[float, float, bool, bool]]
"""Tokens: old, behav, in gen_mask, in loss_mask (which counts within gen_mask only)."""

nats = st.floats(-8, 0, width=32)
tokens = st.tuples(nats, nats, st.booleans(), st.booleans())
batches = st.lists(st.lists(tokens, max_size=6), min_size=1, max_size=5)
levels = st.sampled_from(["token", "sequence"])
weights = st.sampled_from([None, ("truncated", {"cap": 1.5}), ("masked", {"low": 0.5, "high": 3})])
rejections = st.sampled_from(
    [None, ("k1", {"low": 0.3, "high": 2.5}), ("k2", {"bound": 0.8}), ("k3", {"bound": 0.9})]
)
PLACES = [{"level": "token"}, *({"level": "sample", "over": o} for o in ("sum", "mean", "max"))]
places = st.sampled_from(PLACES)


def packed(samples: list[Sample], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The arguments of `correct`."""
    flat = [token for sample in samples for token in sample]
    gen = torch.tensor([token[2] for token in flat], dtype=torch.bool)
    lengths = torch.tensor([0, *map(len, samples)])
    return {
        "old": torch.tensor([token[0] for token in flat], dtype=dtype),
        "behav": torch.tensor([token[1] for token in flat], dtype=dtype),
        "gen_mask": gen,
        "loss_mask": gen & torch.tensor([token[3] for token in flat], dtype=torch.bool),
        "offsets": lengths.cumsum(0),
    }


def ratios(*values: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One sample whose tokens have these old / behav."""
    return packed([[(math.log(w) - 1.0, -1.0, True, True) for w in values]], dtype)


def options(weight: Any, rejection: Any, level: str, place: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if weight is not None:
        found |= {"weight": weight[0], "weight_options": {"level": level, **weight[1]}}
    if rejection is not None:
        found |= {"rejection": rejection[0], "rejection_options": {**place, **rejection[1]}}
    return found


def correct(**arguments: Any) -> Corrected:
    """`correction.correct` with the defaults of a recipe's sections."""
    for kind, union in (("weight", Weight), ("rejection", Rejection)):
        if arguments.get(kind) is not None:
            sections = get_args(get_args(union)[0])
            name = arguments[kind]
            (section,) = (s for s in sections if s.model_fields["name"].default == name)
            filled = section(**arguments.pop(f"{kind}_options", {}))
            if kind == "weight":
                filled = filled.model_copy(update={"normalize": arguments.pop("normalize", False)})
            arguments[kind] = filled.model_dump()
    return correction.correct(**arguments)


def values(found: Corrected) -> list[float]:
    assert found.weights is not None
    return found.weights.tolist()


# By hand.


def test_weights_over_their_mean_have_the_mean_one() -> None:
    found = correct(**ratios(3.0, 1.5, 0.25), weight="truncated", normalize=True)
    assert values(found) == pytest.approx([2.0 / 1.25, 1.5 / 1.25, 0.25 / 1.25])
    nothing, span = torch.zeros(2), torch.tensor([0, 2])
    assert divided_by_mean(nothing, nothing == 0, span, "token").equal(nothing)
    assert divided_by_mean(nothing + 2, nothing == 1, span, "token").tolist() == [2, 2]


def test_nothing_carries_a_gradient() -> None:
    arguments = ratios(3.0, 1.5)
    arguments["old"].requires_grad_()
    found = correct(**arguments, weight="truncated", rejection="k2")
    assert found.weights is not None
    assert not found.weights.requires_grad
    assert not any(total.requires_grad for total in found.sums.values())


# Against loops.


def token_statistic(name: str, l: float) -> float:  # noqa: E741
    return {"k1": -l, "k2": l * l / 2, "k3": math.exp(l) - 1 - l}[name]


def is_far(name: str, statistics: list[float], over: str, bounds: dict[str, float]) -> bool:
    """Whether a sample (or a token: a list of one) is rejected."""
    if name == "k1":
        low, high = math.log(bounds["low"]), math.log(bounds["high"])
        looked_at = {
            "sum": [sum(statistics)],
            "mean": [sum(statistics) / max(len(statistics), 1)],
            "max": statistics,
        }[over]
        return any(not low <= x <= high for x in looked_at)
    folded = {
        "sum": sum(statistics),
        "mean": sum(statistics) / max(len(statistics), 1),
        "max": max(statistics, default=0.0),
    }[over]
    return folded > bounds["bound"]


def bounded_weight(name: str, w: float, bounds: dict[str, float]) -> float:
    if name == "truncated":
        return min(w, bounds["cap"])
    return w if bounds["low"] <= w <= bounds["high"] else 0.0


@examples(12)
@given(batches, weights, rejections, levels, places)
def test_loops_over_samples_and_tokens_agree(
    samples: list[Sample], weight: Any, rejection: Any, level: str, place: dict[str, str]
) -> None:
    chosen = options(weight, rejection, level, place)
    found = correct(**packed(samples), **chosen)
    masks, wanted, total, count, lost, bound = [], [], 0.0, 0, 0, 0
    for sample in samples:
        ls = [old - behav for old, behav, gen, _ in sample if gen]
        keeps = []
        for old, behav, gen, learns in sample:
            keep = gen and learns
            if keep and rejection is not None:
                looked_at = ls if place["level"] == "sample" else [old - behav]
                statistics = [token_statistic(rejection[0], x) for x in looked_at]
                keep = not is_far(rejection[0], statistics, place.get("over", "sum"), rejection[1])
            keeps.append(keep)
            if weight is not None:
                w = math.exp(sum(ls) if level == "sequence" else old - behav)
                raw, w = w, bounded_weight(weight[0], w, weight[1])
                wanted.append(w if keep else 1.0)
                bound += keep and w != raw
                if keep and (level == "token" or sum(keeps) == 1):
                    total, count = total + w, count + 1
        masks += keeps
        lost += any(gen and learns for _, _, gen, learns in sample) and not any(keeps)
    assert found.loss_mask.tolist() == masks
    assert float(found.sums["rejected_samples"]) == lost
    assert float(found.sums["rejected_tokens"]) == sum(
        gen and learns for sample in samples for _, _, gen, learns in sample
    ) - sum(masks)
    if weight is None:
        assert found.weights is None
    else:
        assert values(found) == pytest.approx(wanted, rel=1e-9)
        mean = total / count if total else 1.0
        over_mean = correct(**packed(samples), **chosen, normalize=True)
        assert values(over_mean) == pytest.approx([w / mean for w in wanted], rel=1e-9)
        assert float(found.sums["weight_bound"]) == bound
        kept = [w for w, keep in zip(wanted, masks, strict=True) if keep]
        assert float(found.sums["weight"]) == pytest.approx(sum(kept), rel=1e-9)


@given(batches, weights, rejections, levels, places, st.floats())
def test_what_stands_off_gen_mask_is_not_read(
    samples: list[Sample],
    weight: Any,
    rejection: Any,
    level: str,
    place: dict[str, str],
    other: float,
) -> None:
    disturbed = [[t if t[2] else (other, -other, False, t[3]) for t in s] for s in samples]
    chosen = options(weight, rejection, level, place)
    one, two = correct(**packed(samples), **chosen), correct(**packed(disturbed), **chosen)
    assert one.loss_mask.equal(two.loss_mask)
    if one.weights is not None:
        assert values(one) == values(two)


# Extremes.


FAR = -1000.0, -math.inf, 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", list(WEIGHTS))
def test_weights_are_finite_however_far_apart_the_policies_are(
    dtype: torch.dtype, weight: str
) -> None:
    for level, old, behav in itertools.product(("token", "sequence"), FAR, FAR):
        batch = packed([[(old, behav, True, True), (-1.0, -1.0, True, True)]], dtype)
        found = correct(**batch, weight=weight, weight_options={"level": level})
        assert found.weights is not None
        assert found.weights.dtype == dtype
        assert torch.isfinite(found.weights).all()
        if old == behav:
            assert values(found) == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rejection", list(REJECTIONS))
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_token_that_is_infinitely_far_off_is_rejected(
    dtype: torch.dtype, rejection: str, place: dict[str, str]
) -> None:
    for pair in ((-1000.0, 0.0), (0.0, -1000.0), (-math.inf, 0.0), (0.0, -math.inf)):
        batch = packed([[(*pair, True, True)], [(-1.0, -1.0, True, True)]], dtype)
        found = correct(**batch, rejection=rejection, rejection_options=place)
        assert found.loss_mask.tolist() == [False, True]


def test_what_is_nan_is_rejected_with_a_weight_that_harms_no_gradient() -> None:
    batch = packed([[(math.nan, -1.0, True, True), (-1.0, -1.0, True, True)]])
    found = correct(**batch, weight="truncated", rejection="k1")
    assert found.loss_mask.tolist() == [False, True]
    assert values(found) == [1.0, 1.0]


def test_opposite_infinities_in_a_sample_reject_it() -> None:
    far = [(-math.inf, 0.0, True, True), (0.0, -math.inf, True, True)]
    for name in REJECTIONS:
        for over in ("sum", "mean", "max"):
            found = correct(
                **packed([far]), rejection=name, rejection_options={"level": "sample", "over": over}
            )
            assert not found.loss_mask.any()


@pytest.mark.parametrize("samples", [[], [[]], [[], [(-1.0, -1.0, False, False)], []]])
def test_empty_batches_samples_and_masks_are_defined(samples: list[Sample]) -> None:
    for level, place in (("token", {"level": "token"}), ("sequence", {"level": "sample"})):
        for over in ("sum", "mean", "max"):
            chosen = options(("masked", {}), ("k1", {"over": over}), level, place)
            found = correct(**packed(samples), **chosen)
            assert values(found) == [1.0] * len(found.loss_mask)
            assert not found.loss_mask.any()
            assert all(float(total) == 0 for total in found.sums.values())


# Sampler against trainer: the figures of the mismatch.


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
    found = mismatch_sums(old, behav, mask, age)
    assert len(found) == len(mismatch_sums(old, behav, mask)) + 3 * (OLDEST_AGE + 1)
    for k in range(OLDEST_AGE + 1):
        of_age = mask & (age >= k if k == OLDEST_AGE else age == k)
        assert of_age.any()
        alone = mismatch_sums(old, behav, of_age)
        for name in ("tokens", "abs_delta", "k3"):
            assert float(found[f"age_{k}/{name}"]) == pytest.approx(float(alone[name]))
