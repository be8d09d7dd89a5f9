"""Evaluation on held-out prompts: sampled and greedy answers, scored and written to a file.

The random numbers of an answer depend on the run's seed, the prompt's place and the answer's
index, not on when it is asked: evaluations of one run share them, which takes noise out of the
difference between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winnow.config.trainer import EvaluationConfig
from winnow.evaluation.statistics import PromptAnswers, as_record, summarise
from winnow.observe.metrics import Metrics
from winnow.observe.names import EVAL, Number
from winnow.observe.rollouts import (
    Decode,
    RolloutGroup,
    choose_text_groups,
    problem_id,
    write_rollouts,
)
from winnow.rewards.pipeline import TASK, Rewards
from winnow.rollout.engine import Engine, SamplingParams, generate, group_request
from winnow.types import Answer, Group, Prompt, Trajectory

_SEED_STREAM = 0x0E7A1
_SCORES_CASES = "passed_share"
"""A metric of scorers whose `pred` tells of an answer's tests, not what the answer says."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings under which held-out answers are sampled."""

    n: int
    greedy: bool
    sampling: SamplingParams
    seed: int

    @classmethod
    def of(cls, config: EvaluationConfig, rollout: SamplingParams, seed: int) -> EvaluationSettings:
        """Take the settings of a recipe's section; stop conditions are the rollout's."""
        sampling = replace(
            rollout,
            max_tokens=config.max_response_tokens or rollout.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=0.0,
        )
        return cls(config.n, config.greedy, sampling, seed)


@dataclass(frozen=True)
class Evaluated:
    """The scored answers of an evaluation, a group a prompt."""

    groups: tuple[Group, ...]
    greedy: tuple[Group, ...]
    """One greedy answer a prompt; empty where none was asked for."""
    votes: frozenset[str]
    """Data sources whose scorers tell what an answer says, for maj@k."""
    seed: int

    @property
    def problems(self) -> list[PromptAnswers]:
        """Group the sampled answers by problem."""
        return by_problem(self.groups, self.votes)

    @property
    def greedy_problems(self) -> list[PromptAnswers]:
        """Group the greedy answers by problem."""
        return by_problem(self.greedy, frozenset())

    def record(self) -> dict[str, Number]:
        """Compute the figures `eval/SOURCE/…` of a step's record."""
        greedy = summarise(self.greedy_problems, self.seed) if self.greedy else None
        sampled = summarise(self.problems, self.seed)
        return {**as_record(sampled, greedy), **_means(self.groups)}


@dataclass(frozen=True)
class AskProgress:
    """Progress of an evaluation, in answers and tokens."""

    answers: int
    """Answers that it will have in all."""
    written: int
    scored: int
    tokens: int
    """Tokens written so far."""


class Evaluator:
    """Asks the held-out prompts and scores the answers, without shaping.

    Args:
        rewards: this evaluator's own, because it counts failures.
        text_groups: number of prompts whose answers are kept with their text.
        left_out: number of held-out rows that were too long to be asked.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        rewards: Rewards,
        settings: EvaluationSettings,
        decode: Decode,
        file_of: Callable[[int], Path],
        text_groups: int,
        left_out: int = 0,
    ) -> None:
        self._engine, self.prompts, self._rewards = engine, tuple(prompts), rewards
        self._settings, self._file_of = settings, file_of
        self.decode, self.left_out = decode, left_out
        self._text_groups = text_groups
        self._asked = self._scorings = self._tokens_before = 0

    @property
    def progress(self) -> AskProgress:
        """The progress of the evaluation under way."""
        status = self._engine.status()
        return AskProgress(
            answers=len(self.prompts) * (self._settings.n + self._settings.greedy),
            written=self._asked - status.running - status.queued,
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
        return (await self.ask(step)).record()

    async def ask(self, step: int) -> Evaluated:
        """Ask the held-out prompts, score the answers and write them to the step's file.

        Raises:
            RewardError: scoring failed for more than `reward.max_failure_share` of them.
        """
        settings = self._settings
        self._asked, self._tokens_before = 0, self._engine.status().generated_tokens
        groups = await self._answer(settings.sampling, settings.n)
        greedy: list[Group] = []
        if settings.greedy:
            greedy = await self._answer(replace(settings.sampling, temperature=0.0), 1)
        self._write(step, groups, greedy)
        self._check_scoring()
        return Evaluated(tuple(groups), tuple(greedy), self._votes(), settings.seed)

    async def _answer(self, sampling: SamplingParams, n: int) -> list[Group]:
        fresh: Mapping[int, Any] = dict.fromkeys(range(n))
        seed = self._settings.seed ^ _SEED_STREAM
        requests = [
            group_request(place, prompt, fresh, sampling, seed)
            for place, prompt in enumerate(self.prompts)
        ]
        self._asked += n * len(requests)
        done = await generate(self._engine, requests)
        # All answers at once: a scorer may wait for another machine.
        answers = await asyncio.gather(
            *(
                self._scored(prompt, done[place, index])
                for place, prompt in enumerate(self.prompts)
                for index in range(n)
            )
        )
        return [
            Group(place, prompt, tuple(answers[place * n : (place + 1) * n]))
            for place, prompt in enumerate(self.prompts)
        ]

    async def _scored(self, prompt: Prompt, trajectory: Trajectory) -> Answer:
        score = await self._rewards.score(prompt, trajectory, None, training=False)
        self._scorings += 1
        return Answer(trajectory, score)

    def _votes(self) -> frozenset[str]:
        sources = {prompt.data_source for prompt in self.prompts}
        known = {source: self._rewards.known_metrics([source]) for source in sources}
        return frozenset(s for s in sources if _SCORES_CASES not in (known[s] or ()))

    def _check_scoring(self) -> None:
        try:
            self._rewards.end_step()
        finally:
            self._scorings = 0

    def _write(self, step: int, groups: Sequence[Group], greedy: Sequence[Group]) -> None:
        # The same prompts in each evaluation, so that one can be followed through the run.
        seed, ids = self._settings.seed, [group.id for group in groups]
        write_rollouts(
            self._file_of(step),
            step,
            [RolloutGroup(group, "held_out") for group in groups]
            + [RolloutGroup(group, "held_out_greedy") for group in greedy],
            version=step,
            text_groups=choose_text_groups(ids, self._text_groups, seed, step=0),
            decode=self.decode,
        )


def by_problem(groups: Sequence[Group], votes: frozenset[str]) -> list[PromptAnswers]:
    """Group answers by problem; rows that ask the same are one problem.

    Published files repeat a problem for each answer that they want; answers to copies of a row
    are no more independent than answers to the row.
    """
    members: dict[str, list[Group]] = {}
    for group in groups:
        members.setdefault(problem_id(group.prompt), []).append(group)
    return [_statistics_of(copies, votes) for copies in members.values()]


def _statistics_of(copies: Sequence[Group], votes: frozenset[str]) -> PromptAnswers:
    source = copies[0].prompt.data_source
    answers = [answer for group in copies for answer in group.answers]
    said = [_vote(answer.score.extra.get("pred")) for answer in answers]
    is_told = source in votes and any("pred" in answer.score.extra for answer in answers)
    return PromptAnswers(
        source,
        [answer.score.accuracy for answer in answers],
        said if is_told else None,
        tokens=[answer.trajectory.generated_tokens for answer in answers],
        truncated=[answer.trajectory.truncated for answer in answers],
    )


def _vote(pred: object) -> str | None:
    """Return an answer's vote in the majority; None where nothing could be read."""
    return None if pred is None or pred == "" else pred if isinstance(pred, str) else repr(pred)


def _means(groups: Sequence[Group]) -> dict[str, Number]:
    metrics = Metrics()
    for group in groups:
        name = f"{EVAL}{group.prompt.data_source}"
        for answer in group.answers:
            metrics.mean(f"{name}/length", answer.trajectory.generated_tokens)
            metrics.mean(f"{name}/truncated", answer.trajectory.truncated)
            for part, value in answer.score.parts.items():
                if part != TASK:  # whose mean says what the accuracy does
                    metrics.mean(f"{name}/part_{part}", value)
    return metrics.record()
