"""Correction: weights and rejection by hand, against loops, for any split into micro-batches."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from winnow.algorithms import correction
from winnow.algorithms.correction import REJECTIONS, WEIGHTS, Corrected, divided_by_mean
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
places = st.sampled_from(
    [{"level": "token"}, *({"level": "sample", "over": over} for over in ("sum", "mean", "max"))]
)


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
            filled = section(**arguments.get(f"{kind}_options", {}))
            arguments[f"{kind}_options"] = filled.model_dump(exclude={"name", "normalize"})
    return correction.correct(**arguments)


def values(found: Corrected) -> list[float]:
    assert found.weights is not None
    return found.weights.tolist()


# By hand.


def test_truncated_weights_by_hand() -> None:
    found = correct(**ratios(3.0, 1.5, 0.25), weight="truncated", weight_options={"cap": 2.0})
    assert values(found) == pytest.approx([2.0, 1.5, 0.25])
    assert {n: float(v) for n, v in found.sums.items()} == pytest.approx(
        {"rejected_tokens": 0, "rejected_samples": 0, "weight": 3.75, "weight_bound": 1}
    )


def test_masked_weights_are_zero_outside_their_range() -> None:
    found = correct(**ratios(6.0, 5.0 - 1e-9, 1.0, 0.4), weight="masked")
    assert values(found) == pytest.approx([0.0, 5.0, 1.0, 0.0])
    assert float(found.sums["weight_bound"]) == 2
    assert found.loss_mask.all()  # a weight of 0 still counts below the line


def test_a_sequence_has_one_weight_the_product_of_its_tokens() -> None:
    two = packed(
        [
            [(math.log(w) - 1, -1.0, gen, gen) for w, gen in ((1.5, True), (9.0, False), (0.8, 1))],
            [(math.log(3.0) - 1, -1.0, True, True)],
        ]
    )
    found = correct(**two, weight="truncated", weight_options={"level": "sequence", "cap": 2.0})
    assert values(found) == pytest.approx([1.2, 1.0, 1.2, 2.0])


def test_the_product_is_over_all_that_was_written_not_over_what_learns() -> None:
    half = packed([[(math.log(1.5) - 1, -1.0, True, False), (math.log(0.8) - 1, -1.0, True, True)]])
    found = correct(**half, weight="truncated", weight_options={"level": "sequence"})
    assert values(found) == pytest.approx([1.0, 1.2])


@pytest.mark.parametrize(
    ("rejection", "bounds", "kept"),
    [
        # behav / old is 1, 1/1.8, 1/3, 2.5 and 1/0.6.
        ("k1", {"low": 0.5, "high": 2.0}, [True, True, False, False, True]),
        ("k1", {"low": 0.3, "high": 1.2}, [True, True, True, False, False]),
        ("k2", {"bound": math.log(1.8) ** 2 / 2 + 1e-9}, [True, True, False, False, True]),
        ("k3", {"bound": 0.8 - math.log(1.8) + 1e-9}, [True, True, False, False, True]),
        ("k3", {"bound": 0.4 - 1 - math.log(0.4) + 1e-9}, [True, True, False, True, True]),
    ],
)
def test_tokens_are_rejected_by_hand(
    rejection: str, bounds: dict[str, float], kept: list[bool]
) -> None:
    found = correct(
        **ratios(1.0, 1.8, 3.0, 0.4, 0.6), rejection=rejection, rejection_options=bounds
    )
    assert found.loss_mask.tolist() == kept
    assert found.weights is None
    assert float(found.sums["rejected_tokens"]) == 5 - sum(kept)
    assert float(found.sums["rejected_samples"]) == 0


@pytest.mark.parametrize(
    ("over", "high", "stays"),
    [
        ("sum", 1 / 0.36 + 1e-6, True),  # behav / old of the sequence is 1 / (1.2 * 0.3)
        ("sum", 1 / 0.36 - 1e-6, False),
        ("mean", 1 / 0.6 + 1e-6, True),  # its geometric mean
        ("mean", 1 / 0.6 - 1e-6, False),
        ("max", 1 / 0.3 + 1e-6, True),  # its largest
        ("max", 1 / 0.3 - 1e-6, False),
    ],
)
def test_samples_are_rejected_by_hand(over: str, high: float, stays: bool) -> None:
    place = {"level": "sample", "over": over, "low": 0.5, "high": high}
    found = correct(**ratios(1.2, 0.3), rejection="k1", rejection_options=place)
    assert found.loss_mask.tolist() == [stays, stays]
    assert float(found.sums["rejected_samples"]) == (not stays)


def test_the_max_of_k1_looks_at_both_ends_of_the_range() -> None:
    place = {"level": "sample", "over": "max", "low": 0.5, "high": 2.0}
    for w, stays in ((2.1, False), (1.9, True), (0.49, False)):
        found = correct(**ratios(1.0, w), rejection="k1", rejection_options=place)
        assert bool(found.loss_mask.all()) is stays


def test_weights_over_their_mean_have_the_mean_one() -> None:
    found = correct(**ratios(3.0, 1.5, 0.25), weight="truncated", normalize=True)
    assert values(found) == pytest.approx([2.0 / 1.25, 1.5 / 1.25, 0.25 / 1.25])
    nothing, span = torch.zeros(2), torch.tensor([0, 2])
    assert divided_by_mean(nothing, nothing == 0, span, "token").equal(nothing)
    assert divided_by_mean(nothing + 2, nothing == 1, span, "token").tolist() == [2, 2]


def test_the_mean_is_over_what_rejection_has_left() -> None:
    chosen = {"rejection": "k1", "rejection_options": {"low": 0.2}}
    found = correct(**ratios(1.5, 8.0, 0.6), weight="truncated", normalize=True, **chosen)
    assert found.loss_mask.tolist() == [True, False, True]
    assert values(found) == pytest.approx([1.5 / 1.05, 1 / 1.05, 0.6 / 1.05])


def test_the_mean_of_sequence_weights_counts_a_sample_once() -> None:
    two = packed([[(-1.0, -1.0, True, True)] * 3, [(math.log(2) - 1, -1.0, True, True)]])
    options = {"weight": "truncated", "weight_options": {"level": "sequence"}}
    found = correct(**two, normalize=True, **options)
    assert values(found) == pytest.approx([1 / 1.5] * 3 + [2 / 1.5])


def test_no_weight_and_no_rejection_leave_everything() -> None:
    given_ = ratios(3.0, 0.1)
    found = correct(**given_)
    assert found.weights is None
    assert found.loss_mask.equal(given_["loss_mask"])


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


@examples(25)
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


@given(batches, weights, rejections, levels, places, st.randoms(use_true_random=False))
def test_micro_batches_of_whole_samples_in_any_order_give_the_batchs_results(
    samples: list[Sample], weight: Any, rejection: Any, level: str, place: dict[str, str], rng: Any
) -> None:
    chosen = options(weight, rejection, level, place)
    whole = correct(**packed(samples), **chosen)
    offsets = packed(samples)["offsets"].tolist()
    order = rng.sample(range(len(samples)), len(samples))
    cut = rng.randint(0, len(samples))
    sums = dict.fromkeys(whole.sums, 0.0)
    for part in (order[:cut], order[cut:]):
        found = correct(**packed([samples[b] for b in part]), **chosen)
        at = [t for b in part for t in range(offsets[b], offsets[b + 1])]
        assert found.loss_mask.tolist() == whole.loss_mask[at].tolist()
        if whole.weights is not None:
            assert values(found) == pytest.approx(whole.weights[at].tolist(), rel=1e-12)
        for name, total in found.sums.items():
            sums[name] += float(total)
    assert sums == pytest.approx({name: float(total) for name, total in whole.sums.items()})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight", list(WEIGHTS))
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("old", [-1000.0, -math.inf, 0.0])
@pytest.mark.parametrize("behav", [-1000.0, -math.inf, 0.0])
def test_weights_are_finite_however_far_apart_the_policies_are(
    dtype: torch.dtype, weight: str, level: str, old: float, behav: float
) -> None:
    batch = packed([[(old, behav, True, True), (-1.0, -1.0, True, True)]], dtype)
    found = correct(**batch, weight=weight, weight_options={"level": level})
    assert found.weights is not None
    assert found.weights.dtype == dtype
    assert torch.isfinite(found.weights).all()
    if old == behav:
        assert values(found) == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rejection", list(REJECTIONS))
@pytest.mark.parametrize(
    "place",
    [{"level": "token"}, *({"level": "sample", "over": over} for over in ("sum", "mean", "max"))],
)
@pytest.mark.parametrize(
    "pair", [(-1000.0, 0.0), (0.0, -1000.0), (-math.inf, 0.0), (0.0, -math.inf)]
)
def test_a_token_that_is_infinitely_far_off_is_rejected(
    dtype: torch.dtype, rejection: str, place: dict[str, str], pair: tuple[float, float]
) -> None:
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
