"""Evaluation on held-out prompts: sampled and greedy answers, scored and written to a file.

The random numbers of an answer depend on the run's seed, the prompt's place and the answer's
index, not on when it is asked: evaluations of one run share them, which takes noise out of the
difference between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from winnow.config.root import ObserveConfig
from winnow.config.trainer import EvaluationConfig
from winnow.evaluation.statistics import PromptAnswers, finite_numbers, summarise, vote_of
from winnow.observe.metrics import EVAL, Metrics, Number, grouped
from winnow.observe.rollouts import (
    Decode,
    RolloutGroup,
    choose_text_groups,
    problem_id,
    write_rollouts,
)
from winnow.rewards.pipeline import TASK
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import Engine, SamplingParams, generate, group_request
from winnow.types import Answer, Group, Prompt, Score, Trajectory

_SEED_STREAM = 0x0E7A1
SCORES_CASES = "passed_share"
"""A metric of scorers whose `pred` is about an answer's tests, not what the answer says."""


@dataclass(frozen=True)
class EvalResult:
    """The outcome of an evaluation: the scored answers, by problem."""

    problems: Sequence[PromptAnswers]
    seed: int

    def record(self) -> dict[str, Number]:
        """Compute the figures `eval/SOURCE/…` of a step's record."""
        metrics = Metrics()
        for source, summary in summarise(self.problems, self.seed).items():
            name = f"{EVAL}{source}"
            for figure, estimate in summary.figures.items():
                metrics.last(f"{name}/{figure}", estimate.mean)
            metrics.last(f"{name}/avg@{summary.answers}_se", summary.average.standard_error)
            if summary.ended is not None:
                metrics.last(f"{name}/avg_ended", summary.ended.mean)
                metrics.last(f"{name}/avg_ended_se", summary.ended.standard_error)
            metrics.last(f"{name}/prompts", len(summary.prompts))
            if summary.greedy is not None:
                metrics.last(f"{name}/greedy", summary.greedy.mean)
                metrics.last(f"{name}/greedy_se", summary.greedy.standard_error)
            for prompt in summary.prompts:
                metrics.mean_of(f"{name}/length", sum(prompt.tokens), len(prompt.tokens))
                metrics.mean_of(f"{name}/truncated", sum(prompt.truncated), len(prompt.truncated))
                if prompt.parsed is not None:
                    metrics.mean_of(f"{name}/unread", prompt.unread, len(prompt.parsed))
                for part, value in chain.from_iterable(parts.items() for parts in prompt.parts):
                    if part != TASK:  # whose mean says what the accuracy does
                        metrics.mean(f"{name}/part_{part}", value)
                columns: dict[str, Sequence[float]] = {"": prompt.accuracies}
                for key in dict.fromkeys(chain.from_iterable(prompt.extras)):
                    if numbers := finite_numbers([extra.get(key) for extra in prompt.extras]):
                        columns[f"own_{key}_"] = numbers
                for figure, values in columns.items():
                    drawn = values[: summary.answers]  # of rows that ask the same there are more
                    metrics.mean(f"{name}/{figure}best@{summary.answers}", max(drawn))
                    metrics.mean(f"{name}/{figure}worst@{summary.answers}", min(drawn))
                    if figure:
                        metrics.mean_of(f"{name}/{figure}mean", sum(values), len(values))
        return metrics.record()


@dataclass(frozen=True)
class EvalProgress:
    """Progress of an evaluation, in answers and tokens."""

    answers: int
    """Answers that it will have in all."""
    written: int
    scored: int
    tokens: int
    """Tokens written so far."""


@dataclass(eq=False)
class Evaluator:
    """Generates answers to the held-out prompts and scores them, without reward shaping."""

    engine: Engine
    prompts: Sequence[Prompt]
    rewards: Rewards
    """For this evaluator alone, because it counts failures."""
    config: EvaluationConfig
    rollout: SamplingParams
    """Sampling in training, whose stop conditions and limit hold here, too."""
    seed: int
    decode: Decode
    path_of_step: Callable[[int], Path]
    observe: ObserveConfig
    """Sets for how many prompts the answers are kept with their text."""
    filtered: int = 0
    """Number of held-out rows that were too long for the prompt limit."""

    def __post_init__(self) -> None:
        config = self.config
        self._sampling = replace(
            self.rollout,
            max_tokens=config.max_response_tokens or self.rollout.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=0.0,
        )
        self._requested = self._scorings = self._tokens_before = 0

    @property
    def progress(self) -> EvalProgress:
        """The progress of the evaluation under way."""
        status = self.engine.status()
        return EvalProgress(
            answers=len(self.prompts) * (self.config.n + self.config.greedy),
            written=self._requested - status.running - status.queued,
            scored=self._scorings,
            tokens=status.generated_tokens - self._tokens_before,
        )

    async def evaluate(self, step: int) -> dict[str, Number]:
        """Ask the held-out prompts and return `eval/SOURCE/…`; nothing where there are none.

        All answers go to the run's evaluation file of the step.

        Raises:
            RewardError: scoring failed for more than `reward.max_failure_share` of them.
        """
        if not self.prompts:
            return {}
        return (await self.collect_answers(step)).record()

    async def collect_answers(self, step: int) -> EvalResult:
        """Ask the held-out prompts, score the answers and write them to the step's file.

        Raises:
            RewardError: scoring failed for more than `reward.max_failure_share` of them.
        """
        self._requested, self._tokens_before = 0, self.engine.status().generated_tokens
        groups = await self._generate_groups(self._sampling, self.config.n)
        greedy: list[Group] = []
        if self.config.greedy:
            greedy = await self._generate_groups(replace(self._sampling, temperature=0.0), 1)
        entries = [
            *(RolloutGroup(group, "held_out") for group in groups),
            *(RolloutGroup(group, "held_out_greedy") for group in greedy),
        ]
        write_rollouts(
            self.path_of_step(step),
            step,
            entries,
            version=step,
            # The same prompts in each evaluation, so that one can be followed through the run.
            text_groups=choose_text_groups(entries, self.observe, self.seed, step=0),
            decode=self.decode,
            image_mib=self.observe.image_mib,
        )
        try:
            self.rewards.end_step()
        finally:
            self._scorings = 0
        return EvalResult(merge_by_problem(groups, greedy, self._voting_sources()), self.seed)

    async def _generate_groups(self, sampling: SamplingParams, n: int) -> list[Group]:
        fresh: Mapping[int, Any] = dict.fromkeys(range(n))
        seed = self.seed ^ _SEED_STREAM
        requests = [
            group_request(place, prompt, fresh, sampling, seed, trained=False)
            for place, prompt in enumerate(self.prompts)
        ]
        self._requested += n * len(requests)
        faults: dict[tuple[int, int], list[str]] = {}
        done = await generate(self.engine, requests, faults)

        async def scored(place: int, prompt: Prompt) -> Group:
            keys = [(place, index) for index in range(n)]
            answers = (self._score(prompt, done[key], faults.get(key, ())) for key in keys)
            return Group(place, prompt, tuple(await asyncio.gather(*answers)))

        # All answers at once: a scorer may wait for another machine.
        return await asyncio.gather(*(scored(*each) for each in enumerate(self.prompts)))

    async def _score(self, prompt: Prompt, trajectory: Trajectory, faults: Sequence[str]) -> Answer:
        """Score an answer; one that its environment ended is wrong."""
        if trajectory.finish_reason == "aborted":
            score = Score(0.0, 0.0, error=f"environment fault: {faults[-1]}")
        else:
            score = await self.rewards.score(prompt, trajectory, None, training=False)
        self._scorings += 1
        return Answer(trajectory, score)

    def _voting_sources(self) -> frozenset[str]:
        sources = {prompt.data_source for prompt in self.prompts}
        metrics = {source: self.rewards.supported_metrics([source]) for source in sources}
        return frozenset(s for s in sources if SCORES_CASES not in (metrics[s] or ()))


def merge_by_problem(
    groups: Sequence[Group], greedy: Sequence[Group], votes: Collection[str]
) -> list[PromptAnswers]:
    """Collect answers by problem; rows that ask the same are one problem.

    Published files repeat a problem for each answer that they want; answers to copies of a row
    are no more independent than answers to the row.

    Args:
        votes: data sources whose scorers return what an answer says, for maj@k.
    """
    members = grouped((problem_id(group.prompt), group) for group in groups)
    best = grouped((problem_id(group.prompt), each) for group in greedy for each in group.answers)
    return [
        _merge_copies(copies, best.get(problem, []), votes) for problem, copies in members.items()
    ]


def _merge_copies(
    copies: Sequence[Group], greedy: Sequence[Answer], votes: Collection[str]
) -> PromptAnswers:
    source = copies[0].prompt.data_source
    answers = [answer for group in copies for answer in group.answers]
    has_votes = source in votes and any("pred" in answer.score.extra for answer in answers)
    return PromptAnswers(
        source,
        [answer.score.accuracy for answer in answers],
        [vote_of(answer.score.extra.get("pred")) for answer in answers] if has_votes else None,
        tokens=[answer.trajectory.generated_tokens for answer in answers],
        truncated=[answer.trajectory.truncated for answer in answers],
        parts=[answer.score.parts for answer in answers],
        extras=[answer.score.extra for answer in answers],
        greedy=[answer.score.accuracy for answer in greedy],
        failed=sum(bool(answer.score.error) for answer in (*answers, *greedy)),
    )
