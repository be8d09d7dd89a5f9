"""Evaluation on held-out prompts: sampled answers, greedy ones, statistics, a file of all.

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

from winnow.config.evaluation import EvaluationConfig
from winnow.observe.metrics import Metrics
from winnow.observe.names import EVAL, Number
from winnow.observe.rollouts import Decode, RolloutGroup, choose_text_groups, write_rollouts
from winnow.rewards.blending import TASK
from winnow.rewards.service import RewardService
from winnow.rollout.engine import Engine, SamplingParams
from winnow.rollout.generate import generate
from winnow.rollout.single_turn import group_request
from winnow.trainer.evaluation_math import PromptAnswers, as_record, summarise
from winnow.types import Answer, Group, Prompt, Trajectory

_SEED_STREAM = 0x0E7A1


@dataclass(frozen=True)
class EvaluationSettings:
    """How held-out answers are sampled."""

    n: int
    greedy: bool
    sampling: SamplingParams
    seed: int

    @classmethod
    def of(cls, config: EvaluationConfig, rollout: SamplingParams, seed: int) -> EvaluationSettings:
        """From a recipe's section; limits and stop conditions are the rollout's."""
        sampling = replace(
            rollout,
            max_tokens=config.max_response_tokens or rollout.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=0.0,
        )
        return cls(config.n, config.greedy, sampling, seed)


class Evaluator:
    """Asks the held-out prompts and scores the answers, without shaping.

    Args:
        rewards: this evaluator's own, because it counts failures.
        text_groups: prompts whose answers are kept with their text.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        rewards: RewardService,
        settings: EvaluationSettings,
        decode: Decode,
        file_of: Callable[[int], Path],
        text_groups: int,
    ) -> None:
        self._engine, self._prompts, self._rewards = engine, tuple(prompts), rewards
        self._settings, self._file_of = settings, file_of
        self.decode = decode
        self._text_groups = text_groups
        self._scorings = 0

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The held-out prompts."""
        return self._prompts

    async def evaluate(self, step: int) -> dict[str, Number]:
        """Figures `eval/SOURCE/…`; nothing where there are no held-out prompts.

        Writes all answers to the run's evaluation file of the step.

        Raises:
            RewardError: scoring failed for more than `reward.max_failure_share` of them.
        """
        if not self._prompts:
            return {}
        settings = self._settings
        groups = await self._answer(settings.sampling, settings.n)
        shown = groups
        greedy = None
        if settings.greedy:
            shown = await self._answer(replace(settings.sampling, temperature=0.0), 1)
            greedy = summarise([_statistics_of(group) for group in shown], settings.seed)
        self._write(step, groups, shown if settings.greedy else [])
        sampled = summarise([_statistics_of(group) for group in groups], settings.seed)
        self._check_scoring()
        return {**as_record(sampled, greedy), **_means(groups)}

    async def _answer(self, sampling: SamplingParams, n: int) -> list[Group]:
        fresh: Mapping[int, Any] = dict.fromkeys(range(n))
        seed = self._settings.seed ^ _SEED_STREAM
        requests = [
            group_request(place, prompt, fresh, sampling, seed)
            for place, prompt in enumerate(self._prompts)
        ]
        done = await generate(self._engine, requests)
        groups = []
        for place, prompt in enumerate(self._prompts):
            # All answers of a prompt at once: a scorer may wait for another machine.
            answers = await asyncio.gather(
                *(self._scored(prompt, done[place, index]) for index in range(n))
            )
            groups.append(Group(place, prompt, tuple(answers)))
        return groups

    async def _scored(self, prompt: Prompt, trajectory: Trajectory) -> Answer:
        text = self.decode(trajectory.token_ids)
        score = await self._rewards.score(prompt, trajectory, text, training=False)
        self._scorings += 1
        return Answer(trajectory, score)

    def _check_scoring(self) -> None:
        try:
            self._rewards.check_failures(self._scorings)
        finally:
            self._rewards.reset_failures()
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


def _statistics_of(group: Group) -> PromptAnswers:
    said = [_vote(answer.score.extra.get("pred")) for answer in group.answers]
    parsed = said if any("pred" in answer.score.extra for answer in group.answers) else None
    accuracies = [answer.score.accuracy for answer in group.answers]
    return PromptAnswers(group.prompt.data_source, accuracies, parsed)


def _vote(pred: object) -> str | None:
    """What an answer says, for the majority; None where nothing could be read."""
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
