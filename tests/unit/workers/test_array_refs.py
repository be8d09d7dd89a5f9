"""Arrays that lie elsewhere: read as numpy reads, fetched once a block, whole in a checkpoint."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.states import read_back
from tests.stored import Elsewhere

from winnow.learning.batch import pack
from winnow.rollout.engine import CompletionEvent, trajectory_of
from winnow.rollout.remote_engine import _detach_arrays
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan
from winnow.workers.array_refs import ArrayBlock, ArrayRef, SplitResult, fetch_arrays

LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)


def events_of(lengths: list[int]) -> list[CompletionEvent]:
    rng = np.random.default_rng(len(lengths))
    return [
        CompletionEvent(
            group_id=i // 2,
            answer=i % 2,
            kind="finished",
            segment=Segment(
                rng.integers(0, 1 << 30, length),
                rng.standard_normal(length).astype(np.float32),
                (VersionSpan(i, length),) if length else (),
            ),
            finish_reason="stop",
            tick=i,
        )
        for i, length in enumerate(lengths)
    ]


def groups_of(events: list[CompletionEvent]) -> list[Group]:
    prompt = Prompt("0", np.array([5, 6]), "ab", "digits", "1")
    return [
        Group(e.group_id, prompt, (Answer(Trajectory((e.segment,), "stop"), Score(1.0, 1.0)),))
        for e in events
    ]


def same(one: Segment, other: Segment) -> None:
    for name in ("token_ids", "logprobs"):
        a, b = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert (one.spans, one.source, len(one)) == (other.spans, other.source, len(other))


def far_events(events: list[CompletionEvent]) -> tuple[list[CompletionEvent], Elsewhere]:
    """The events as a driver gets them whose arrays stay on the worker's node."""
    split = SplitResult(*_detach_arrays(events))
    handle = Elsewhere(split.block.pop_arrays())
    told = pickle.dumps(split)
    assert not any(e.segment.token_ids.tobytes() in told for e in events if len(e.segment) > 1)
    arrived: SplitResult = pickle.loads(told)
    arrived.block.handle = handle
    return arrived.inline, handle


@given(LENGTHS)
def test_events_arrive_whole_with_their_arrays_or_references_to_them(lengths: list[int]) -> None:
    events = events_of(lengths)
    near: list[CompletionEvent] = pickle.loads(
        pickle.dumps(SplitResult(*_detach_arrays(events)))
    ).inline
    far, handle = far_events(events)
    assert handle.fetched == 0
    for event, *others in zip(events, near, far, strict=True):
        assert [type(e.segment.token_ids) for e in others] == [np.ndarray, ArrayRef]
        for other in others:
            same(event.segment, other.segment)
            assert (event.key, event.kind, event.tick) == (other.key, other.kind, other.tick)
    assert handle.fetched == 1, "once a block"


def test_whoever_reads_tokens_fetches_no_extras() -> None:
    events = [
        replace(each, extras={"routes": np.arange(len(each.segment)) + i, "all": np.arange(3)})
        for i, each in enumerate(events_of([4, 5]))
    ]
    split = SplitResult(*_detach_arrays(events))
    assert split.extras is not None
    handles = tokens, extras = [
        Elsewhere(each.pop_arrays()) for each in (split.block, split.extras)
    ]
    arrived = pickle.loads(pickle.dumps(split))
    arrived.block.handle, arrived.extras.handle = handles
    far = [trajectory_of(event) for event in arrived.inline]
    fetch_arrays(replace(each, extras={}) for each in far)
    assert (tokens.fetched, extras.begun, extras.fetched) == (1, 0, 0)
    fetch_arrays(far)
    assert (tokens.fetched, extras.begun, extras.fetched) == (1, 1, 1)
    for event, trajectory in zip(events, far, strict=True):
        for name, array in event.extras.items():
            assert np.asarray(trajectory.extras[name]).tolist() == array.tolist()


def test_what_counts_and_sends_on_fetches_nothing() -> None:
    events, handle = far_events(events_of([4, 5]))
    (first, second) = groups_of(events)
    trajectory = first.answers[0].trajectory
    assert (trajectory.generated_tokens, len(second.answers[0].trajectory.gen_mask)) == (4, 5)
    assert trajectory.versions == (0,)
    assert handle.fetched == 0


def test_a_block_that_travels_is_one_block_without_what_was_fetched() -> None:
    numbers = np.arange(9)
    near = ArrayRef(ArrayBlock(handle=Elsewhere((numbers,))), 0, 0, 4, np.int64)
    np.asarray(near)
    again: list[ArrayRef] = pickle.loads(pickle.dumps([near, near]))
    assert again[0].block is again[1].block
    assert not again[0].block.is_fetched
    np.testing.assert_array_equal(again[0], near)


def test_all_that_a_step_needs_is_asked_for_before_anything_is_waited_for() -> None:
    handles = []
    groups: list[Group] = []
    for lengths in ([3, 4], [5], [2, 2, 1]):
        events, handle = far_events(events_of(lengths))
        handles.append(handle)
        groups += groups_of(events)
    every = [*groups, *groups_of(events_of([3]))]
    fetch_arrays(answer.trajectory for group in every for answer in group.answers)
    assert [(far.begun, far.fetched) for far in handles] == [(1, 1)] * 3
    fetch_arrays(answer.trajectory for group in groups for answer in group.answers)
    packed = pack(groups)
    assert [(far.begun, far.fetched) for far in handles] == [(1, 1)] * 3
    whole = pack(groups_of(events_of([3, 4]) + events_of([5]) + events_of([2, 2, 1])))
    assert torch.equal(packed.token_ids, whole.token_ids)
    assert torch.equal(packed.behav, whole.behav)
    assert torch.equal(packed.gen_mask, whole.gen_mask)


def test_a_checkpoint_holds_the_arrays_themselves() -> None:
    events = events_of([4, 5])
    far, _ = far_events(events)
    groups = groups_of(far)
    saved = read_back({"answers": [group.answers[0] for group in groups]})["answers"]
    for answer, event in zip(saved, events, strict=True):
        segment = answer.trajectory.segments[0]
        assert type(segment.token_ids) is np.ndarray
        same(segment, event.segment)


def test_numpy_reads_a_stored_array_like_any_other() -> None:
    numbers = np.arange(10, dtype=np.int32)
    stored = ArrayRef(ArrayBlock((numbers,)), 0, 2, 6, np.int64)
    assert np.asarray(stored).dtype == np.int64
    assert np.concatenate([cast(Any, stored), [7]]).tolist() == [2, 3, 4, 5, 7]
    target = np.zeros(4, np.float32)
    target[:] = stored
    assert target.tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="int64 needs a copy"):
        np.array(stored, copy=False)
    copied = np.array(stored, dtype=np.int32, copy=True)
    copied[0] = 99
    assert numbers[2] == 2
