"""Dealing the samples of an update out to ranks: evenly, in step, and without a change to it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from benchmarks.lockstep import WIDTH, drawn, least_time, updates_of
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_strategy import groups_of, learnable
from tests.ranks import fake_ranks
from torch.distributed.device_mesh import init_device_mesh

from winnow.learning.balance import assign, estimate_work, repeated_share
from winnow.learning.batch import (
    NO_SHARDING,
    Batch,
    MicroBatch,
    MicroBatchSharder,
    gather_tokens,
    micro_batches,
    split_update,
)
from winnow.types import IntArray


def batch_of(lengths: list[list[int]]) -> Batch:
    return learnable(groups_of([[(2, n) for n in answers] for answers in lengths]))


def test_work_by_hand() -> None:
    np.testing.assert_array_equal(estimate_work(np.array([0, 12, 24]), 1), [0, 12 * 24, 24 * 36])


def test_an_update_by_hand() -> None:
    # At this width a token is a million. 44 tokens ask two ranks for two rounds of 2 x 12: 12
    # beside 9 and 2, then 7 and 3 beside 6 and 5. There is no way to fill 12, 12, 10 and 10.
    found = assign(np.array([12, 9, 7, 6, 5, 3, 2]), 12, 2, 83_333)
    rank, micro = np.divmod(found.places, 2)
    assert micro.tolist() == [0, 0, 1, 1, 1, 1, 0]
    assert rank.tolist() == [0, 1, 0, 1, 1, 0, 1]
    assert found.lockstep == pytest.approx(44 / (2 * (12 + 11)), rel=1e-4)


def test_ranks_take_turns_with_the_heavier_part_and_keep_to_the_budget() -> None:
    found = assign(np.array([10, 8, 6, 4]), 10, 2, 10**6)
    assert found.work.tolist() == pytest.approx(12e6 * np.array([[10, 4], [8, 6]]), rel=1e-4)
    # At this width 30 tokens that see each other take as long as 96 that see nothing.
    lengths = np.array([30] + [1] * 70)
    tokens = np.bincount(assign(lengths, 40, 2, 1).places, lengths)
    assert tokens.sum() == 100
    assert tokens.max() <= 40


def test_ranks_beside_the_longest_sample_share_the_rest() -> None:
    assert assign(np.array([100, 30, 30, 20]), 200, 4, 100).places.tolist() == [0, 1, 2, 3]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    budget=st.integers(4, 30),
    width=st.integers(1, 6),
)
def test_no_dealing_is_much_faster(lengths: list[int], budget: int, width: int) -> None:
    ordered = np.sort(np.array(lengths))[::-1]
    found = assign(ordered, budget, 2, width)
    least = fastest(ordered, budget, width)
    assert found.work.max(0).sum() <= 1.25 * least
    assert least_time(ordered, budget, 2, width) <= least + 1e-6


def fastest(lengths: IntArray, budget: int, width: int) -> float:
    """The least time of all ways to lay samples into two ranks' micro-batches, one round each."""
    all_work, best = estimate_work(lengths, width), np.inf
    rounds = min(3, len(lengths))
    for places in itertools.product(range(2 * rounds), repeat=len(lengths)):
        tokens = np.bincount(places, lengths, 2 * rounds)
        if (tokens[np.bincount(places, minlength=2 * rounds) > 1] <= budget).all():
            loads = np.bincount(places, all_work, 2 * rounds)
            best = min(best, loads.reshape(rounds, 2).max(1).sum())
    return best


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=4),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 80),
)
def test_every_sample_is_run_once_and_ranks_stay_in_step(
    lengths: list[list[int]], ranks: int, budget: int
) -> None:
    batch = batch_of(lengths)
    groups = list(range(0, batch.n_groups, 2))
    alone = micro_batches(batch, groups, 10_000)
    width = 1 + 7 * (budget % 2)
    shares = split_update(batch, groups, budget, ranks, width)
    every_rank = [shares.micro_batches(rank) for rank in range(ranks)]
    assert len({len(own) for own in every_rank}) == 1
    every = [micro for own in every_rank for micro in own]
    assert sorted(samples(every)) == sorted(samples(alone))
    assert all(micro.counts == alone[0].counts for micro in every)
    for micro in every:
        assert len(micro.token_ids) <= budget or len(micro.lengths) == 1
    # No round is empty, and the work of each micro-batch is that of its samples.
    assert shares.assignment.work.max(0).all()
    for own, work_K in zip(every_rank, shares.assignment.work, strict=True):
        found = [estimate_work(np.array(micro.lengths, np.int64), width).sum() for micro in own]
        assert found == work_K.tolist()
    of_group = dict(zip(samples(alone), alone[0].group_tokens.tolist(), strict=True))
    for micro in every:
        assert micro.group_tokens.tolist() == [of_group[b] for b in micro.samples.tolist()]
    back = gather_tokens(batch, every, [micro.columns["old"] for micro in every])
    wanted = torch.zeros_like(back)
    wanted[alone[0].source] = batch.columns["old"][alone[0].source]
    assert torch.equal(back, wanted)


def samples(micro: list[MicroBatch]) -> list[int]:
    return [b for each in micro for b in each.samples.tolist()]


@pytest.mark.parametrize(("kind", "reached"), [("late", 0.98), ("dapo", 0.90)])
def test_128_ranks_hardly_wait_for_each_other(kind: str, reached: float) -> None:
    done = capacity = best = 0.0
    for lengths in itertools.islice(updates_of(drawn(kind)), 4):
        found = assign(lengths, 22_528, 128, WIDTH)
        done, capacity = done + float(found.work.sum()), capacity + found.capacity
        best += 128 * least_time(lengths, 22_528, 128, WIDTH)
    assert reached <= done / capacity <= done / best


def test_figures_weigh_each_update_by_its_time() -> None:
    batch = batch_of([[8, 4], [40, 20, 20]])
    with fake_ranks(2, rank=1):
        sharder = MicroBatchSharder(init_device_mesh("cpu", (2,)), 10**6)
        first = sharder.cut_update(batch, [0], 100)
        assert [micro.lengths for micro in first] == [(6,)]
        sharder.cut_update(batch, [1], 100)
        figures = sharder.figures().record()
        assert sharder.figures().record() == {}
    # With prompts of 2 tokens: 10 and 6; 42, and 22 with 22.
    assert figures["ranks/lockstep"] == pytest.approx((16 + 86) / (20 + 88), rel=1e-4)
    assert figures["ranks/spread"] == pytest.approx((10 / 8 + 44 / 43) / 2, rel=1e-4)
    assert figures["ranks/idle"] == 0
    assert NO_SHARDING.figures().record() == {}


def test_more_ranks_than_samples_leave_some_with_nothing() -> None:
    batch = batch_of([[3, 4]])
    for shares_prompts in (False, True):
        shares = split_update(batch, [0], 100, 4, 8, shares_prompts)
        assert shares.assignment.idle_share == 0.5
        own = [shares.micro_batches(rank) for rank in range(4)]
        assert [len(micro.token_ids) for (micro,) in own] == [6, 5, 0, 0]
    nothing = split_update(batch, [], 100, 2, 8)
    assert nothing.micro_batches(0) == nothing.micro_batches(1) == []
    assert nothing.assignment.spread == nothing.assignment.lockstep == 1.0
    assert nothing.assignment.idle_share == 0.0


def test_copies_of_prompts_are_counted_but_for_one_in_each_group() -> None:
    lengths, prompts, groups = np.array([5, 6, 4]), np.array([3, 3, 2]), np.array([0, 0, 1])
    assert repeated_share(lengths, prompts, groups) == pytest.approx(3 / 15)
    assert repeated_share(lengths[:0], prompts[:0], groups[:0]) == 0.0
