"""SIGKILL at random moments, in processes of their own: each resumed run ends with the same bits.

The moments are drawn from a seed, but what is under way at them is the machine's affair.
`benchmarks/kill.py` is the same at length.
"""

from __future__ import annotations

import random

import pytest
from benchmarks.kill import Lab, Trial, trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = 3


def test_killed_at_random_moments_a_run_ends_with_the_bits_of_an_undisturbed_one(lab: Lab) -> None:
    rng = random.Random(20)
    trials: list[Trial] = []
    while (left := KILLS - sum(len(each.kills) for each in trials)) > 0:
        trials.append(trial(lab, f"trial-{len(trials)}", left, rng))
    assert [each for each in trials if each.faults] == []
