"""The barrier of deterministic mode: however late a score comes, the run is the same.

A score is seen at the end of the turn in which its answer finished, and that turn waits for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from engines import Prompts, ScriptedEngine, uniforms
from winnow.config.sampling import SamplingConfig
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams, WeightUpdate
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory

Scorer = Callable[[Prompt, Trajectory], Score | Awaitable[Score]]


def ragged(request: GroupRequest, answer: AnswerRequest) -> int:
    return 2 + int(12 * uniforms(answer.seed + 1, 0, 1)[0])


def at_once(prompt: Prompt, trajectory: Trajectory) -> Score:
    right = float(trajectory.token_ids[0] < 32)
    return Score(2 * right - 1, right)


def delayed(rng: random.Random, share: float) -> Scorer:
    """Some scores take up to 4 ms, so that any later one may overtake them."""

    async def late(prompt: Prompt, trajectory: Trajectory) -> Score:
        if rng.random() < share:
            await asyncio.sleep(rng.uniform(0, 0.004))
        return at_once(prompt, trajectory)

    return late


def history(score: Scorer, settings: dict[str, object], steps: int = 5) -> str:
    """Everything that some steps trained, counted and left behind."""
    engine, prompts = ScriptedEngine(ragged, slots=12), Prompts()
    sampler = Sampler(
        SamplingConfig.model_validate({"groups_per_step": 4, **settings}),
        engine=engine,
        next_prompt=prompts.next,
        give_back=prompts.give_back,
        score=score,
        n=3,
        sampling=SamplingParams(max_tokens=12),
        run_seed=5,
    )

    async def go() -> list[object]:
        seen: list[object] = []
        for version in range(steps):
            await engine.load_weights(WeightUpdate(version))
            step = await sampler.step(version)
            settled = [each.plain() for each in (*step.trained, *step.discarded)]
            seen.append((settled, repr(step.counts), sampler.state_dict()))
        return seen

    return repr(asyncio.run(go()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lookahead": 1.0},
        {"max_staleness": 0},
        {"commit": "completion_order"},
        {"max_groups_per_step": 6},
    ],
    ids=str,
)
def test_scores_that_come_late_and_out_of_order_change_nothing(settings: dict[str, object]) -> None:
    wanted = history(at_once, settings)
    for seed in range(3):
        rng = random.Random(seed)
        assert history(delayed(rng, share=rng.choice([0.1, 0.5, 1.0])), settings) == wanted
