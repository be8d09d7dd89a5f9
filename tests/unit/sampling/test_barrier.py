"""The barrier of deterministic mode: however late a score comes, the run is the same.

A score is seen a fixed number of ticks after its answer finished, and the scheduler waits for
it then.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
from tests.engines import Prompts, ScriptedEngine, uniforms
from tests.states import read_back

from winnow.config.rollout import SamplingConfig
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    Engine,
    GroupRequest,
    SamplingParams,
)
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.weights import WeightUpdate
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


async def answer_something_else(engine: Engine, number: int) -> None:
    """As an evaluation does between two steps."""
    answers = tuple(AnswerRequest(i, 77 * number + i) for i in range(3))
    sampling = SamplingParams(12)
    await engine.submit([GroupRequest(10**6 + number, np.array([number]), answers, sampling, 0)])
    told = 0
    while told < len(answers):
        told += len(await engine.events())


def sampler_of(
    engine: Engine, prompts: Prompts, score: Scorer, settings: dict[str, object], **others: Any
) -> Sampler:
    return Sampler(
        SamplingConfig.model_validate({"groups_per_step": 4, **settings}),
        engine=engine,
        next_prompt=prompts.next,
        give_back=prompts.give_back,
        score=score,
        n=3,
        sampling=SamplingParams(max_tokens=12),
        run_seed=5,
        **others,
    )


def history(
    score: Scorer,
    settings: dict[str, object],
    steps: int = 5,
    restart_at: int | None = None,
    with_baseline: bool = False,
    restart_with: dict[str, object] | None = None,
    look_ticks: int = 1,
    engines: int = 0,
    evaluate_after: Collection[int] = (),
) -> str:
    """Everything that some steps trained, counted and left behind.

    Args:
        engines: as many in a group that is looked at each `look_ticks`; 0: one, alone.
        evaluate_after: steps after which the engine answers something else.
    """
    prompts = Prompts()

    def start(more: dict[str, object] | None = None) -> tuple[Engine, Sampler]:
        engine: Engine = ScriptedEngine(ragged, slots=12)
        if engines:
            members = [ScriptedEngine(ragged, slots=12 // engines) for _ in range(engines)]
            engine = EngineGroup(members, True, look_ticks)
        others = {"with_baseline": with_baseline, "look_ticks": look_ticks}
        return engine, sampler_of(engine, prompts, score, settings | (more or {}), **others)

    async def go() -> list[object]:
        engine, sampler = start()
        seen: list[object] = []
        for version in range(steps):
            if version == restart_at:
                state = read_back(sampler.state_dict())
                engine, sampler = start(restart_with)
                sampler.load_state_dict(state)
            elif version - 1 in evaluate_after:
                await answer_something_else(engine, version)
            await engine.load_weights(WeightUpdate(version))
            step = await sampler.step(version)
            settled = (*step.trained, *step.discarded)
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
        {"score_lag_ticks": 3, "lookahead": 1.0},
        {"score_lag_ticks": 50},
        {"score_lag_ticks": 3, "max_staleness": 0},
        {"score_lag_ticks": 3, "max_groups_per_step": 6},
    ],
    ids=str,
)
def test_scores_that_come_late_and_out_of_order_change_nothing(settings: dict[str, object]) -> None:
    wanted = history(at_once, settings)
    for seed in range(2):
        rng = random.Random(seed)
        assert history(delayed(rng, share=rng.choice([0.1, 0.5, 1.0])), settings) == wanted


def test_late_scores_of_greedy_baselines_change_nothing() -> None:
    settings: dict[str, object] = {"score_lag_ticks": 1, "lookahead": 1.0}
    wanted = history(at_once, settings, with_baseline=True)
    assert history(delayed(random.Random(0), 0.5), settings, with_baseline=True) == wanted
    restarted = history(at_once, settings, restart_at=3, with_baseline=True)
    assert restarted == wanted != history(at_once, settings)


def test_the_engine_writes_on_while_a_score_is_not_due() -> None:
    engine, prompts, waits = ScriptedEngine(ragged, slots=12), Prompts(), []

    async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
        begun = engine.tick
        for _ in range(1000):
            if engine.tick > begun or not engine.status().running:
                break
            await asyncio.sleep(0)
        waits.append(engine.tick - begun)
        return at_once(prompt, trajectory)

    for lag in (0, 2):
        settings: dict[str, object] = {"lookahead": 1, "score_lag_ticks": lag}
        waits.clear()
        asyncio.run(sampler_of(engine, prompts, slow, settings).step(0))
        assert lag or max(waits) == 0
    assert sum(wait > 0 for wait in waits) > len(waits) / 2


@pytest.mark.parametrize("lag", [0, 3])
def test_scores_are_seen_at_looks_alone(lag: int) -> None:
    asked: list[int | None] = []

    class Watched(ScriptedEngine):
        async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
            asked.append(until)
            return await super().events(until)

    late = delayed(random.Random(1), 1.0)
    settings: dict[str, object] = {"score_lag_ticks": lag}
    engine = Watched(ragged, slots=12)
    asyncio.run(sampler_of(engine, Prompts(), late, settings, look_ticks=5).step(0))
    ticks = {until for until in asked if until is not None}
    assert len(ticks) > 2
    assert all(until % 5 == 0 for until in ticks)


@pytest.mark.parametrize(
    ("look_ticks", "settings"),
    [
        (8, {}),
        (3, {"score_lag_ticks": 3, "lookahead": 1.0}),
        (8, {"max_staleness": 0, "score_lag_ticks": 3}),
    ],
    ids=str,
)
def test_a_run_on_several_engines_goes_on_exactly_though_scores_are_late(
    look_ticks: int, settings: dict[str, object]
) -> None:
    group: dict[str, Any] = {"engines": 2, "look_ticks": look_ticks, "evaluate_after": (0, 2)}
    wanted = history(at_once, settings, **group)
    for step in (1, 4):
        late = delayed(random.Random(step), 0.5)
        assert history(late, settings, restart_at=step, **group) == wanted


def test_a_state_brings_its_lag_along() -> None:
    settings: dict[str, object] = {"score_lag_ticks": 3}
    undisturbed = history(at_once, settings)
    other: dict[str, object] = {"score_lag_ticks": None}
    assert history(at_once, settings, restart_at=2, restart_with=other) == undisturbed
    assert history(at_once, other) != undisturbed
