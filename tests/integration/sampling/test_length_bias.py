"""Whoever finishes first is short: the trained answers' lengths against all that qualified.

The yardstick is every group admitted during the run that would qualify if all its answers
were written to their end, trained or not. On the scripted engine these ends are known.

`PYTHONPATH=. python tests/integration/sampling/test_length_bias.py` prints the table of
docs/sampling.md.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.engines import VOCABULARY, Prompts, ScriptedEngine, uniform

from winnow.config.rollout import SamplingConfig
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.weights import WeightUpdate
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory

N, ANSWERS, LIMIT, SEED = 32, 8, 512, 3
STEPS = 30
"""In the tests; over seeds 3 to 5 the bias in admission order then is 0.8 % at most."""


def length_of(seed: int, uid: int) -> int:
    """Log-logistic, 8 to 512 tokens: some prompts ask for long answers, some answers ramble."""
    spread = odds(uniform(uid, 0)) * odds(uniform(seed, 0))
    return int(min(max(60 * spread**0.35, 8), LIMIT))


def odds(chance: float) -> float:
    return chance / (1 - chance)


def chance_of(uid: int, harder_is_longer: bool) -> float:
    """That an answer is right."""
    if harder_is_longer:
        return (1 - uniform(uid, 0)) ** 3
    return [0.0, 0.15, 0.5, 0.85, 1.0][uid % 5]


def is_right(token: int, uid: int, harder_is_longer: bool) -> bool:
    """Whether an answer is, told by its second token, which has nothing to do with its length."""
    return token < VOCABULARY * chance_of(uid, harder_is_longer)


@dataclass
class Lengths:
    trained: float
    """Mean length of the trained answers."""
    all_qualifying: float
    """The same for all qualifying groups admitted, run to their end."""
    tokens_per_group: float
    """Generated per trained group."""
    busy: float
    """Share of the slots that wrote, over all ticks."""

    @property
    def bias(self) -> float:
        return self.trained / self.all_qualifying - 1


@cache
def run(steps: int, harder_is_longer: bool = False, slots: int = 256, **settings: Any) -> Lengths:
    asked: dict[int, tuple[int, set[int]]] = {}

    def length(request: GroupRequest, answer: AnswerRequest) -> int:
        uid = int(request.prompt_ids[0])
        asked.setdefault(request.group_id, (uid, set()))[1].add(answer.seed)
        return length_of(answer.seed, uid)

    def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        right = is_right(trajectory.token_ids[1], int(prompt.uid), harder_is_longer)
        return Score(float(right), float(right))

    engine, prompts = ScriptedEngine(length, slots=slots), Prompts()
    sampler = Sampler(
        SamplingConfig(groups_per_step=N, **settings),
        engine=engine,
        next_prompt=prompts.next,
        give_back=prompts.give_back,
        score=score,
        n=ANSWERS,
        sampling=SamplingParams(max_tokens=LIMIT),
        run_seed=SEED,
    )

    async def train() -> list[int]:
        lengths = []
        for version in range(steps):
            await engine.load_weights(WeightUpdate(version))
            step = await sampler.step(version)
            lengths += [a.trajectory.generated_tokens for g in step.groups for a in g.answers]
        return lengths

    trained = asyncio.run(train())
    qualifying = []
    # A prompt that comes again with its old seeds is one group.
    for uid, seeds in {(uid, frozenset(seeds)) for uid, seeds in asked.values()}:
        tokens = [int(VOCABULARY * uniform(seed, 1)) for seed in seeds]
        right = {is_right(token, uid, harder_is_longer) for token in tokens}
        if len(right) == 2:
            qualifying += [length_of(seed, uid) for seed in seeds]
    generated = engine.status().generated_tokens
    return Lengths(
        float(np.mean(trained)),
        float(np.mean(qualifying)),
        generated / (len(trained) / ANSWERS),
        generated / engine.tick / slots,
    )


@pytest.mark.parametrize(
    ("settings", "harder_is_longer"),
    [
        ({"max_staleness": 1}, False),
        ({"max_staleness": 1, "lookahead": 1}, True),
        ({"max_staleness": 0}, False),
    ],
    ids=str,
)
def test_in_admission_order_trained_answers_are_as_long_as_all_that_qualify(
    settings: dict[str, Any], harder_is_longer: bool
) -> None:
    assert abs(run(STEPS, harder_is_longer, **settings).bias) < 0.01


def test_in_completion_order_trained_answers_are_too_short() -> None:
    assert run(20, True, commit="completion_order", max_staleness=1, lookahead=1).bias < -0.03


def test_carrying_groups_over_saves_the_tokens_that_dropping_them_wastes() -> None:
    kept, dropped = (
        run(STEPS, False, max_staleness=staleness).tokens_per_group for staleness in (1, 0)
    )
    assert kept < 0.95 * dropped


def print_table() -> None:
    """The figures of docs/sampling.md."""
    for commit in ("admission_order", "completion_order"):
        for staleness, lookahead in [(1, 0), (1, 1), (2, 2), (0, 0)]:
            way = {"commit": commit, "max_staleness": staleness, "lookahead": lookahead}
            for harder_is_longer in (False, True):
                got = run(60, harder_is_longer, **way)
                print(
                    f"{commit:16} staleness {staleness} lookahead {lookahead} "
                    f"harder_is_longer {harder_is_longer!s:5} bias {got.bias:+7.2%} "
                    f"tokens/group {got.tokens_per_group:5.0f} busy {got.busy:.0%}"
                )


if __name__ == "__main__":
    print_table()
