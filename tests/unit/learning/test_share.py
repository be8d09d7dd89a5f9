"""Sharing the samples of an update over ranks: evenly, in step, and without a change to it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_strategy import groups_of, learnable
from tests.examples import examples
from tests.recorded import recorded_groups

from winnow.learning.batch import (
    Batch,
    MicroBatch,
    gather_tokens,
    micro_batches,
    pack,
    share,
    split,
    work,
)


def batch_of(lengths: list[list[int]]) -> Batch:
    return learnable(groups_of([[(2, n) for n in answers] for answers in lengths]))


def test_samples_by_hand() -> None:
    # 6 and 5 go first, 4 joins the 5, 3 the 6, and 2 the first of two nines.
    assert [part.tolist() for part in split(np.array([5.0, 6, 4, 2, 3]), 2)] == [[1, 3, 4], [0, 2]]
    assert [part.tolist() for part in split(np.array([1.0]), 3)] == [[0], [], []]
    np.testing.assert_array_equal(work(np.array([0, 12, 24]), 1), [0, 24, 72])


@examples(15)
@given(
    items=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=7),
    ranks=st.integers(1, 3),
)
def test_a_split_is_a_third_off_the_best_at_most(items: list[float], ranks: int) -> None:
    given_ = np.array(items)
    most = max(given_[part].sum() for part in split(given_, ranks))
    best = min(
        max(given_[np.array(places) == rank].sum() for rank in range(ranks))
        for places in itertools.product(range(ranks), repeat=len(items))
    )
    assert most <= (4 / 3) * best + 1e-9


@examples(15)
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
    shares = share(batch, groups, budget, ranks, 8)
    assert len(shares.ranks) == ranks
    assert len({len(own) for own in shares.ranks}) == 1
    every = [micro for own in shares.ranks for micro in own]
    assert sorted(samples(every)) == sorted(samples(alone))
    assert all(micro.counts == alone[0].counts for micro in every)
    for micro in every:
        assert len(micro.token_ids) <= budget or len(micro.lengths) == 1
    of_group = dict(zip(samples(alone), alone[0].group_tokens.tolist(), strict=True))
    for micro in every:
        assert micro.group_tokens.tolist() == [of_group[b] for b in micro.samples.tolist()]
    back = gather_tokens(batch, every, [micro.columns["old"] for micro in every])
    wanted = torch.zeros_like(back)
    wanted[alone[0].source] = batch.columns["old"][alone[0].source]
    assert torch.equal(back, wanted)


def samples(micro: list[MicroBatch]) -> list[int]:
    return [b for each in micro for b in each.samples.tolist()]


def test_recorded_answers_are_shared_within_a_few_percent() -> None:
    batch = pack(recorded_groups())
    shares = share(batch, range(batch.n_groups), 500, 4, 64)
    assert 1 <= shares.spread < 1.05
    # Dealt out in turn, as they come, they are not.
    lengths = batch.offsets.diff().numpy()
    dealt = [work(lengths[rank::4], 64).sum() for rank in range(4)]
    assert max(dealt) / np.mean(dealt) > shares.spread
    for rank, own in enumerate(shares.ranks):
        mine = np.array([n for micro in own for n in micro.lengths])
        assert shares.work[rank] == pytest.approx(work(mine, 64).sum())


def test_more_ranks_than_samples_leave_some_with_nothing() -> None:
    batch = batch_of([[3, 4]])
    shares = share(batch, [0], 100, 4, 8)
    assert shares.idle_share == 0.5
    assert [len(own[0].token_ids) for own in shares.ranks] == [6, 5, 0, 0]
    nothing = share(batch, [], 100, 2, 8)
    assert nothing.ranks == [[], []]
    assert nothing.spread == 1.0
