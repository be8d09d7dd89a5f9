"""Figures that reduce, and the stopwatch."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnow.observe.metrics import Figure, Metrics, Stopwatch, to_number


def test_what_has_no_weight_changes_no_mean_even_if_it_is_nan() -> None:
    metrics = Metrics()
    metrics.mean("x", 2.0)
    metrics.mean("x", math.nan, weight=0)
    assert metrics.record() == {"x": 2.0}
    assert math.isnan(Figure("mean", 0.0, 0.0).value)


def test_each_reduction_does_what_its_name_says_and_sums_of_integers_stay_integers() -> None:
    metrics = Metrics()
    for value in (3, 1, 2):
        metrics.sum("sum", value)
        metrics.max("max", value)
        metrics.min("min", value)
        metrics.last("last", value)
    record = metrics.record()
    assert record == {"sum": 6, "max": 3, "min": 1, "last": 2}
    assert type(record["sum"]) is int


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=1), st.randoms())
def test_the_record_does_not_depend_on_how_the_parts_are_split(
    values: list[tuple[int, int]], chance: random.Random
) -> None:
    whole, ranks = Metrics(), [Metrics() for _ in range(3)]
    for value, weight in values:
        for metrics in (whole, chance.choice(ranks)):
            metrics.mean("mean", value, weight)
            metrics.sum("sum", value)
            metrics.max("max", value)
            metrics.min("min", value)
    merged = Metrics()
    for rank in ranks:
        merged.merge(rank)
    assert merged.record() == whole.record()


def test_nan_is_seen_in_extremes_whatever_the_order() -> None:
    for first, second in ((math.nan, 1.0), (1.0, math.nan)):
        assert math.isnan(Figure("max", first).merge(Figure("max", second)).value)
        assert math.isnan(Figure("min", first).merge(Figure("min", second)).value)


def test_a_spread_gives_mean_max_and_min_and_merges_with_the_right_weight() -> None:
    one, other = Metrics(), Metrics()
    one.spread("length", [1, 2, 3])
    other.spread("length", np.array([10]))
    other.spread("length", [])
    one.merge(other)
    assert one.record() == {"length/mean": 4.0, "length/max": 10.0, "length/min": 1.0}


def test_scalars_of_numpy_and_torch_become_python_numbers() -> None:
    for value, kind in (
        (np.float32(0.5), float),
        (np.int64(3), int),
        (torch.tensor(0.5), float),
        (torch.tensor(3), int),
        (True, int),
        (np.bool_(True), int),
    ):
        assert type(to_number(value)) is kind


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.phase("generate"):
        clock.now += 2
        with watch.phase("score"):
            clock.now += 4
        clock.now += 8
    with watch.phase("score"):
        clock.now += 16
    assert watch.lap() == {
        "time/generate_s": 10.0,
        "time/score_s": 20.0,
        "time/other_s": 1.0,
        "time/step_s": 31.0,
    }


def test_time_while_paused_is_in_no_lap() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.paused():
        clock.now += 2
    with watch.phase("update"):
        clock.now += 4
    assert watch.lap() == {"time/update_s": 4.0, "time/other_s": 1.0, "time/step_s": 5.0}


def test_a_lap_starts_afresh_and_splits_a_phase_that_is_open() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.phase("generate"):
        clock.now += 1
        watch.lap()
        clock.now += 2
    assert watch.lap() == {"time/generate_s": 2.0, "time/other_s": 0.0, "time/step_s": 2.0}


def test_a_phase_that_raises_is_booked_and_closed() -> None:
    clock = Clock()
    watch = Stopwatch(clock)

    def fail() -> None:
        with watch.phase("update"):
            clock.now += 3
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 1
    assert watch.lap()["time/update_s"] == 3.0
