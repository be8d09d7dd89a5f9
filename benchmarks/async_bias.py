"""Length bias of asynchronous sampling, exactly, over many groups: our rule and drop-stale.

    python -m benchmarks.async_bias [--steps 200] [--out FILE]

The real sampler and ledger on the tests' scripted engine, in which each answer has one true ending:
lengths are log-logistic, 8 to 512 tokens (tests/integration/sampling/test_length_bias.py). Sampling
runs on without a pause; learning a step takes a fixed number of decode ticks, after which its
weights are published while answers are written. Nothing depends on the clock.

The bias compares the trained answers with all answers of groups that qualify, up to the first group
that is still open at the end. Throughput counts trained groups a tick, relative to our rule at the
same staleness; a tick takes as long however many slots write, as on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.drop_stale import DropStaleLedger
from tests.engines import VOCABULARY, Prompts, ScriptedEngine, uniform
from tests.integration.sampling.test_length_bias import (
    ANSWERS,
    LIMIT,
    SEED,
    N,
    is_right,
    length_of,
)

from winnow.config.rollout import SamplingConfig
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    GroupRequest,
    SamplingParams,
    answer_seed,
)
from winnow.rollout.weights import WeightUpdate
from winnow.sampling import stream
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.types import Prompt, Score, Trajectory

SLOTS = 1024
LEARNING = {"sampling is slower": 100, "learning is slower": 400}
"""Decode ticks that learning a step takes."""


class LearnerBeside(ScriptedEngine):
    """The scripted engine, and a learner that publishes a step `learning` ticks after its turn."""

    def __init__(self, *args: Any, learning: int, **options: Any) -> None:
        super().__init__(*args, live_updates=True, **options)
        self._learning = learning
        self._due = deque[int]()
        self.sampler: stream.Sampler | None = None

    def learn(self) -> None:
        """Begin with a step that was just cut, as soon as those before it are learnt."""
        self._due.append(max(self.tick, *self._due, 0) + self._learning)

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        due = self._due[0] if self._due else None
        limit = min((each for each in (until, due) if each is not None), default=None)
        events = await super().events(limit)
        if due is not None and not events and not self._running and not self._queue:
            self.tick = max(self.tick, due)  # nothing to write until then
        if due is not None and self.tick >= due:
            self._due.popleft()
            await self.load_weights(WeightUpdate(self.version + 1))
            assert self.sampler is not None
            self.sampler.set_engine_version(self.version)
        return events


@dataclass
class Outcome:
    """What a rule did with the groups that it admitted."""

    bias: float
    thrown_away: float
    """Share of the generated tokens."""
    lost_groups: float
    """Share of the qualified groups."""
    ticks: float
    """A step."""
    staleness: float
    staleness_max: int
    groups: int


def simulate(
    rule: type[Ledger], steps: int, learning: int, harder_is_longer: bool, **settings: Any
) -> Outcome:
    """Train without learning anything."""
    uids: dict[int, int] = {}

    def length(request: GroupRequest, answer: AnswerRequest) -> int:
        uids[request.group_id] = int(request.prompt_ids[0])
        return length_of(answer.seed, uids[request.group_id])

    def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        right = is_right(trajectory.token_ids[1], int(prompt.uid), harder_is_longer)
        return Score(float(right), float(right))

    engine, prompts = LearnerBeside(length, slots=SLOTS, learning=learning), Prompts()
    stream.Ledger = rule  # type: ignore[attr-defined]
    sampler = engine.sampler = stream.Sampler(
        SamplingConfig(groups_per_step=N, **settings),
        engine=engine,
        next_prompt=prompts.next,
        give_back=prompts.give_back,
        score=score,
        n=ANSWERS,
        sampling=SamplingParams(max_tokens=LIMIT),
        run_seed=SEED,
    )

    async def sample() -> list[StepGroups]:
        found = []
        for step in range(steps):
            found.append(await sampler.step(engine.version, learns=step))
            engine.learn()
        return found

    return outcome_of(asyncio.run(sample()), engine, uids, harder_is_longer)


def outcome_of(
    steps: Sequence[StepGroups],
    engine: ScriptedEngine,
    uids: dict[int, int],
    harder_is_longer: bool,
) -> Outcome:
    """Compare what was trained with all that would have qualified."""
    settled = {s.group.id: s for step in steps for s in (*step.trained, *step.discarded)}
    first_open = next(i for i in range(len(settled) + 1) if i not in settled)
    trained, all_of, lost, qualified = list[int](), list[int](), 0, 0
    for group in range(first_open):
        seeds = [answer_seed(SEED, group, index) for index in range(ANSWERS)]
        uid = uids[group]
        tokens = [int(VOCABULARY * uniform(seed, 1)) for seed in seeds]
        if len({is_right(token, uid, harder_is_longer) for token in tokens}) < 2:
            continue
        lengths = [length_of(seed, uid) for seed in seeds]
        qualified += 1
        all_of += lengths
        if settled[group].fate == "trained":
            trained += lengths
        else:
            lost += 1
    later = steps[len(steps) // 10 :]
    return Outcome(
        bias=float(np.mean(trained) / np.mean(all_of)) - 1,
        thrown_away=sum(s.tokens for s in settled.values() if s.fate == "stale")
        / engine.status().generated_tokens,
        lost_groups=lost / qualified,
        ticks=engine.tick / len(steps),
        staleness=float(np.mean([step.counts.staleness_mean for step in later])),
        staleness_max=max(step.counts.staleness_max for step in steps),
        groups=qualified,
    )


RULES: tuple[tuple[str, type[Ledger], dict[str, Any]], ...] = (
    ("async", Ledger, {"max_staleness": 1}),
    ("drop-stale", DropStaleLedger, {"max_staleness": 1}),
    ("async", Ledger, {"max_staleness": 2, "lookahead": 1}),
    ("drop-stale", DropStaleLedger, {"max_staleness": 2}),
    ("async", Ledger, {"max_staleness": 4, "lookahead": 3}),
    ("drop-stale", DropStaleLedger, {"max_staleness": 4}),
)


def table(steps: int) -> list[str]:
    """The figures of every rule as Markdown."""
    lines = [
        "| learning | rule | max_staleness | bias | bias, harder is longer | qualified groups lost "
        "| tokens thrown away | ticks a step | throughput | staleness, mean (largest) | groups |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for words, learning in LEARNING.items():
        base = 0.0
        for name, rule, settings in RULES:
            got, harder = (simulate(rule, steps, learning, h, **settings) for h in (False, True))
            base = got.ticks if rule is Ledger else base
            lines.append(
                f"| {words} ({learning} ticks) | {name} | {settings['max_staleness']} "
                f"| {got.bias:+.1%} | {harder.bias:+.1%} | {got.lost_groups:.1%} "
                f"| {got.thrown_away:.1%} | {got.ticks:.0f} | {base / got.ticks:.2f} "
                f"| {got.staleness:.2f} ({got.staleness_max}) | {got.groups:,} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = table(given.steps)
    command = shlex.join(["python", "-m", "benchmarks.async_bias", *sys.argv[1:]])
    if given.out:
        given.out.write_text(
            f"# Length bias of asynchronous sampling, simulated\n\nMade by `{command}`: "
            f"{N} groups of {ANSWERS} answers a step, {SLOTS} slots, {given.steps} steps a row.\n\n"
            + "\n".join([*lines, ""])
        )


if __name__ == "__main__":
    main()
