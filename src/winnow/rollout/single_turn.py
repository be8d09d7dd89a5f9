"""The default trajectory: a prompt, one answer of one segment.

Makes requests from prompts and trajectories from events. The key of an answer's random
numbers depends on the run's seed, the group's id and the answer's index alone, so that an
answer is the same however often it is interrupted, and wherever it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from struct import Struct

from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.types import Prompt, Segment, Trajectory

_KEY = Struct("<qqq")


def answer_seed(run_seed: int, group_id: int, answer: int) -> int:
    """A 64-bit hash, unsigned, the same in every process and on every machine."""
    digest = blake2b(_KEY.pack(run_seed, group_id, answer), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def group_request(
    group_id: int,
    prompt: Prompt,
    prefixes: Mapping[int, Segment | None],
    sampling: SamplingParams,
    run_seed: int,
    greedy: int | None = None,
) -> GroupRequest:
    """Ask for these answers of a group: from the start, or behind what is written already.

    `greedy` is the index of the one answer that is not sampled, if the group has one.
    """
    answers = tuple(
        AnswerRequest(index, answer_seed(run_seed, group_id, index), prefix, index == greedy)
        for index, prefix in prefixes.items()
    )
    return GroupRequest(group_id, prompt.token_ids, answers, sampling, priority=group_id)


def trajectory_of(event: CompletionEvent) -> Trajectory:
    """The trajectory that a finished answer makes."""
    assert event.kind == "finished"
    return Trajectory((event.segment,), event.finish_reason)
