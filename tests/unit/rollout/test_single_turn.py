import subprocess
import sys

import numpy as np

from winnow.rollout.engine import (
    CompletionEvent,
    SamplingParams,
    answer_seed,
    group_request,
    trajectory_of,
)
from winnow.types import Prompt, Segment, VersionSpan

PROMPT = Prompt("7", np.array([5, 6]), "ab", "test", "c")
SEGMENT = Segment(np.array([1, 2]), np.array([-0.5, -1.0], np.float32), (VersionSpan(3, 2),))


def test_seeds_are_64_bits_and_differ_by_run_group_and_answer() -> None:
    keys = [(run, group, answer) for run in range(6) for group in range(50) for answer in range(8)]
    seeds = {answer_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63


def test_a_seed_is_the_same_in_every_process() -> None:
    code = "from winnow.rollout.engine import answer_seed; print(answer_seed(1, 2, 3))"
    env = {"PYTHONHASHSEED": "17", "PYTHONPATH": ":".join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env)
    assert int(out.stdout) == answer_seed(1, 2, 3) == 13041116711478803063


def test_a_request_asks_for_the_unfinished_answers_behind_their_prefixes() -> None:
    sampling = SamplingParams(max_tokens=9)
    request = group_request(4, PROMPT, {0: None, 2: SEGMENT}, sampling, run_seed=1)
    assert request.group_id == request.priority == 4
    assert request.prompt_ids is PROMPT.token_ids
    assert request.sampling is sampling
    assert [(a.index, a.prefix) for a in request.answers] == [(0, None), (2, SEGMENT)]
    assert request.answers[1].seed == answer_seed(1, 4, 2)


def test_one_answer_of_a_request_may_be_greedy() -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9)
    request = group_request(4, PROMPT, {1: None, 2: SEGMENT}, sampling, run_seed=1, greedy=2)
    assert [(a.index, a.greedy) for a in request.answers] == [(1, False), (2, True)]
    drawn = [request.sampling_of(answer) for answer in request.answers]
    assert drawn == [sampling, SamplingParams(max_tokens=9, temperature=0.0, top_p=0.9)]
    # What is left of the group may hold no greedy answer any more.
    rest = group_request(4, PROMPT, {0: None}, sampling, run_seed=1, greedy=2)
    assert [a.greedy for a in rest.answers] == [False]


def test_a_resumed_answer_keeps_its_seed() -> None:
    fresh = group_request(4, PROMPT, {0: None, 1: None}, SamplingParams(9), run_seed=1)
    resumed = group_request(4, PROMPT, {1: SEGMENT}, SamplingParams(9), run_seed=1)
    assert resumed.answers[0].seed == fresh.answers[1].seed


def test_a_finished_answer_is_a_trajectory_of_one_segment() -> None:
    event = CompletionEvent(4, 0, "finished", SEGMENT, "length", tick=9)
    trajectory = trajectory_of(event)
    assert trajectory.segments == (SEGMENT,)
    assert trajectory.truncated
    assert trajectory.versions == (3,)
