"""Packing, cutting and counting; and that none of it changes what an update learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.written import answer, environment, group, written

from winnow.learning.batch import (
    Batch,
    MicroBatch,
    UpdateCounts,
    all_micro_batches,
    count_loss_tokens,
    gather_tokens,
    micro_batches,
    pack,
    split_updates,
)
from winnow.types import Group

VOCABULARY = 6


TWO_GROUPS = [
    group(
        answer(written([4, 5], [-0.5, -0.25]), reward=1.0),
        answer(written([4], -0.5), reward=-1.0, truncated=True),
        prompt=[1, 2, 3],
    ),
    group(answer(written([5], -0.5), environment([0, 1]), written([3], -0.5)), prompt=[2]),
]


@st.composite
def step(draw: st.DrawFn) -> list[Group]:
    """A few groups of ragged answers, some truncated, some with an environment's turn."""
    ids = st.integers(0, VOCABULARY - 1)
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(ids, min_size=1, max_size=3))
        answers = []
        for _ in range(draw(st.integers(1, 4))):
            tokens = draw(st.lists(st.tuples(ids, st.floats(-3, 0)), max_size=5))
            parts = [written([i for i, _ in tokens], [logprob for _, logprob in tokens])]
            if draw(st.booleans()):
                parts.append(environment(draw(st.lists(ids, max_size=2))))
                parts.append(written(draw(st.lists(ids, max_size=3))))
            reward = draw(st.integers(-2, 2)) / 2
            answers.append(answer(*parts, reward=reward, truncated=draw(st.booleans())))
        groups.append(group(*answers, prompt=prompt))
    return groups


def test_packing_worked_by_hand() -> None:
    batch = pack(TWO_GROUPS)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 2, 5, 0, 1, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert batch.offsets.tolist() == [0, 5, 9, 14]
    assert batch.prompt_lengths.tolist() == [3, 3, 1]
    assert batch.groups.tolist() == [0, 0, 1]
    assert batch.gen_mask.nonzero()[:, 0].tolist() == [3, 4, 8, 10, 13]
    assert torch.equal(batch.loss_mask, batch.gen_mask)
    assert batch.behav[batch.gen_mask].tolist() == [-0.5, -0.25, -0.5, -0.5, -0.5]
    assert not batch.behav[~batch.gen_mask].any()
    assert batch.rewards.tolist() == [1.0, -1.0, 0.0]
    assert (batch.n_samples, batch.n_groups) == (3, 2)


def test_a_restart_begins_a_context_of_the_same_sample() -> None:
    anew = answer(written([4, 5], -0.5), environment([1, 6], restarts=True), written([7], -0.5))
    batch = pack([group(anew, answer(written([8], -0.5)), prompt=[1, 2, 3])])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 6, 7, 1, 2, 3, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    (micro,) = micro_batches(batch, [0], 100)
    assert (micro.lengths, micro.contexts) == ((8, 4), (5, 3, 4))
    assert micro.counts == UpdateCounts(tokens=4, samples=2, groups=1)


def test_overlong_filtering_takes_truncated_answers_out_of_the_loss_only() -> None:
    batch = pack(TWO_GROUPS, overlong_filtering=True)
    assert batch.gen_mask.nonzero()[:, 0].tolist() == [3, 4, 8, 10, 13]
    assert batch.loss_mask.nonzero()[:, 0].tolist() == [3, 4, 10, 13]
    assert count_loss_tokens(batch, np.arange(batch.n_samples)).tolist() == [2, 0, 2]
    counts = micro_batches(batch, [0, 1], 100)[0].counts
    assert counts == UpdateCounts(tokens=4, samples=2, groups=2)


@given(groups=step())
def test_a_batch_gives_back_every_sample(groups: list[Group]) -> None:
    batch = pack(groups)
    b = 0
    for g, one in enumerate(groups):
        for each in one.answers:
            low, high = batch.offsets[b : b + 2].tolist()
            n = len(one.prompt.token_ids)
            assert batch.token_ids[low : low + n].tolist() == one.prompt.token_ids.tolist()
            assert batch.token_ids[low + n : high].tolist() == each.trajectory.token_ids.tolist()
            assert not batch.gen_mask[low : low + n].any()
            assert batch.gen_mask[low + n : high].tolist() == each.trajectory.gen_mask.tolist()
            assert batch.behav[low + n : high].tolist() == each.trajectory.logprobs.tolist()
            assert (int(batch.groups[b]), float(batch.rewards[b])) == (g, each.score.reward)
            b += 1
    assert b == batch.n_samples
    assert int(batch.offsets[-1]) == len(batch.token_ids)


def test_no_groups_make_an_empty_batch() -> None:
    batch = pack([])
    assert (batch.n_samples, batch.n_groups, len(batch.token_ids)) == (0, 0, 0)
    assert all_micro_batches(batch, 8) == []
    assert gather_tokens(batch, [], []).shape == (0,)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt p has no tokens"):
        pack([group(answer(written([1])), prompt=[])])


@given(n=st.integers(0, 200), size=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_updates_partition_the_groups_into_near_equal_parts(n: int, size: int, seed: int) -> None:
    updates = split_updates(n, size, seed)
    assert sorted(g for update in updates for g in update) == list(range(n))
    if n == 0:
        assert updates == []
        return
    sizes = [len(update) for update in updates]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert abs(len(updates) - n / size) <= 0.5 or len(updates) == 1
    if n % size == 0:
        assert set(sizes) == {size}
    assert updates == split_updates(n, size, seed)


def test_updates_are_shuffled_by_their_seed() -> None:
    assert split_updates(64, 16, (1, 2)) != split_updates(64, 16, (1, 3))
    assert split_updates(64, 16, (1, 2))[0] != list(range(16))


@given(groups=step(), budget=st.integers(1, 30), seed=st.integers(0, 9))
def test_micro_batches_hold_each_sample_of_the_update_once(
    groups: list[Group], budget: int, seed: int
) -> None:
    batch = pack(groups, overlong_filtering=bool(seed % 2))
    batch.columns["old"] = torch.randn(len(batch.token_ids))
    for update in split_updates(len(groups), 2, seed):
        micros = micro_batches(batch, update, budget)
        held = [b for micro in micros for b in micro.samples.tolist()]
        assert sorted(held) == [b for b in range(batch.n_samples) if int(batch.groups[b]) in update]
        for micro in micros:
            assert sum(micro.lengths) <= budget or len(micro.lengths) == 1
            check_micro_batch(micro, batch, update)


def check_micro_batch(micro: MicroBatch, batch: Batch, update: list[int]) -> None:
    """Every field against a loop over the samples."""
    counted = count_loss_tokens(batch, np.arange(batch.n_samples)).tolist()
    of_update = [b for b in range(batch.n_samples) if int(batch.groups[b]) in update]
    assert micro.counts == UpdateCounts(
        tokens=sum(counted[b] for b in of_update),
        samples=sum(counted[b] > 0 for b in of_update),
        groups=len({int(batch.groups[b]) for b in of_update if counted[b]}),
    )
    for i, b in enumerate(micro.samples.tolist()):
        ours = slice(*micro.offsets[i : i + 2].tolist())
        theirs = slice(*batch.offsets[b : b + 2].tolist())
        assert micro.lengths[i] == theirs.stop - theirs.start
        assert set(micro.sample_index[ours].tolist()) == {i}
        for name in ("token_ids", "positions", "gen_mask", "loss_mask", "behav"):
            assert torch.equal(getattr(micro, name)[ours], getattr(batch, name)[theirs])
        assert torch.equal(micro.columns["old"][ours], batch.columns["old"][theirs])
        same = [c for c in range(batch.n_samples) if batch.groups[c] == batch.groups[b]]
        assert int(micro.group_tokens[i]) == sum(counted[c] for c in same)
    assert torch.equal(micro.scored_positions, micro.gen_mask.nonzero()[:, 0])
    assert not micro.positions[micro.scored_positions].eq(0).any()
