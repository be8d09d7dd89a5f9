"""Which engine writes what: free slots first, in order, and groups together where that saves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.request_queue import RequestQueue, TrackedAnswer, max_waiting, merge_requests
from winnow.types import Segment


def group(
    number: int, answers: int, prefix: int = 0, priority: int | None = None
) -> list[TrackedAnswer]:
    begun = Segment(np.zeros(prefix, np.int64), np.zeros(prefix, np.float32), ())
    requests = tuple(AnswerRequest(i, i, begun if prefix else None) for i in range(answers))
    place = number if priority is None else priority
    made = GroupRequest(number, np.zeros(1, np.int64), requests, SamplingParams(9), place)
    return [TrackedAnswer(made, request) for request in requests]


def line(*groups: list[TrackedAnswer]) -> RequestQueue:
    made = RequestQueue()
    for answers in groups:
        made.add(answers)
    return made


def placed(
    waiting: RequestQueue, slots: list[int], loads: list[int] | None = None
) -> list[list[tuple[int, int]]]:
    found = waiting.assign(slots, loads or [0] * len(slots))
    return [[answer.key for answer in answers] for answers in found]


def test_a_group_goes_whole_to_the_engine_with_most_free_slots() -> None:
    assert placed(line(group(0, 3)), [4, 8], [0, 3]) == [[], [(0, 0), (0, 1), (0, 2)]]
    assert placed(line(group(0, 3)), [4, 8], [0, 5]) == [[(0, 0), (0, 1), (0, 2)], []]


def test_a_group_is_split_over_slots_that_are_free_elsewhere() -> None:
    found = placed(line(group(0, 3), group(1, 3), group(2, 3)), [4, 4])
    assert found == [
        [(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)],  # the last one waits beside a sibling
        [(1, 0), (1, 1), (1, 2), (2, 1)],
    ]


def test_beyond_the_slots_a_group_stays_whole_in_the_shortest_queue() -> None:
    waiting = line(group(0, 6), group(1, 6), group(2, 6))
    found = placed(waiting, [8, 8], [8, 9])
    assert found == [[(0, i) for i in range(6)], [(1, i) for i in range(6)]]
    assert len(waiting) == 6


def test_prefixes_go_first_and_anywhere_then_priority_decides() -> None:
    waiting = line(group(0, 2, priority=7), group(1, 2, priority=3), group(2, 2, prefix=4))
    assert placed(waiting, [2, 1], [0, 0]) == [[(2, 0), (2, 1), (0, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_answers_of_one_group_are_one_request_and_so_one_prefill() -> None:
    answers = group(0, 4)
    (request,) = merge_requests(answers[1:3])
    assert request.group_id == 0
    assert [answer.index for answer in request.answers] == [1, 2]


def test_what_is_taken_out_waits_no_more() -> None:
    waiting = line(group(0, 2), group(1, 2), group(2, 2, prefix=1))
    assert [answer.key for answer in waiting.remove({0, 2})] == [(2, 0), (2, 1), (0, 0), (0, 1)]
    assert len(waiting) == 2


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 15)), min_size=1, max_size=4),
)
def test_no_answer_is_lost_no_slot_left_empty_and_no_queue_too_long(
    groups: list[tuple[int, bool]], engines: list[tuple[int, int]]
) -> None:
    waiting = line(*(group(i, n, prefix=int(begun)) for i, (n, begun) in enumerate(groups)))
    total = len(waiting)
    slots, loads = [s for s, _ in engines], [load for _, load in engines]
    found = waiting.assign(slots, loads)
    keys = [answer.key for answers in found for answer in answers]
    assert len(set(keys)) == len(keys) == total - len(waiting)
    most = max((n for n, _ in groups), default=0)
    for count, before, answers in zip(slots, loads, found, strict=True):
        after = before + len(answers)
        assert len(waiting) == 0 or after >= count + min(max_waiting(count), 1)
        assert not answers or after <= count + max_waiting(count) - 1 + most
    free = sum(max(0, count - load) for count, load in engines)
    begun = min(free, total)
    assert len(keys) >= begun
    # Those in slots are the first in the line's order.
    order = [
        answer.key
        for answer in line(*(group(i, n, int(b)) for i, (n, b) in enumerate(groups))).remove(
            range(9)
        )
    ]
    assert set(order[:begun]) <= set(keys)
