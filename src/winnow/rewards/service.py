"""Scores for answers: routed, shaped, and safe against scorers that fail.

A scorer that raises, exits, hangs, dies, or returns NaN or the wrong type marks its own sample as
failed: `Score.error` says why, the reward is that of a wrong answer and the accuracy 0. Too large
a share of failures stops the run, because a broken reward must not train a model. Where scorers
run is the affair of `winnow.rewards.backend`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import SupportsFloat

from winnow.config.reward import RewardConfig
from winnow.errors import RewardError
from winnow.rewards.backend import Backend
from winnow.rewards.shaping import overlong_penalty
from winnow.rewards.task import Failure
from winnow.rewards.user_function import WRONG_REWARD
from winnow.types import Prompt, Score, Trajectory


@dataclass(frozen=True)
class FailureReport:
    """Failed scorings since the last reset."""

    count: int
    first_error: str
    """One line; empty when nothing failed."""
    first_traceback: str
    """Of the same failure, for the log."""


class RewardService:
    """Scores answers by the section `reward`."""

    def __init__(
        self, config: RewardConfig, max_response_tokens: int, backend: Backend | None = None
    ) -> None:
        """Load what scores; a user's file is imported here, or in its workers.

        Args:
            backend: another service's; None starts one, which `close` ends.

        Raises:
            RewardError: a scorer's name or the user's file is wrong.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._backend = backend or Backend(config)
        self._has_user = config.function.path is not None
        self._required: str | None = None
        self._failures = FailureReport(0, "", "")

    def twin(self) -> RewardService:
        """Another service over the same scorers and workers, with a count of its own."""
        return RewardService(self._config, self._max_response_tokens, self._backend)

    def close(self) -> None:
        """End the workers; nothing can be scored afterwards."""
        self._backend.close()

    def scored_apart(self) -> int:
        """Answers that workers have dealt with: grows as long as scoring gets on."""
        return self._backend.scored

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """See before training that every source can be scored.

        Raises:
            RewardError: one cannot.
        """
        self._backend.prepare(set(data_sources))

    def known_metrics(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """The numbers that every score of these sources has; None: only a run will tell."""
        if self._has_user:
            return None
        own = [self._backend.router.scorer(source).metrics for source in data_sources]
        shared = frozenset.intersection(*own) if own else frozenset()
        return self._common_metrics() | shared

    def require_metric(self, metric: str, data_sources: Iterable[str]) -> None:
        """Say what a filter will ask for: from now on each training score has it.

        A failed scoring has 0 there. A user's function that leaves it out stops the run.

        Raises:
            RewardError: no scorer of these sources gives it.
        """
        known = self.known_metrics(data_sources)
        if known is not None and metric not in known:
            raise RewardError(
                f"sampling.filter.metric is {metric}, which no scorer of these data sources gives; "
                f"there are {', '.join(sorted(known))}"
            )
        self._required = metric

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str, training: bool
    ) -> Score:
        """What an answer is worth; length is shaped in training only.

        Raises:
            RewardError: scoring failed and `on_failure` is fatal, or the score lacks the metric
                that the filter asks for.
        """
        result = await self._backend.score(prompt, text)
        score = self._failed(prompt, result) if isinstance(result, Failure) else result
        if not training:
            return score
        self._check_required(score)
        return self._shaped(score, trajectory)

    @property
    def failure_report(self) -> FailureReport:
        """Failures since the last reset."""
        return self._failures

    def reset_failures(self) -> None:
        """Start a new count, as at the beginning of a step."""
        self._failures = FailureReport(0, "", "")

    def check_failures(self, scored: int) -> None:
        """Hold the failures counted against the `scored` answers of the same time.

        Raises:
            RewardError: their share is above `reward.max_failure_share`.
        """
        count, limit = self._failures.count, self._config.max_failure_share
        if count and count > limit * scored:
            raise RewardError(
                f"scoring failed for {count} of {scored} answers ({count / max(scored, 1):.0%}), "
                f"reward.max_failure_share is {limit:g}; the first failure: "
                f"{self._failures.first_error}; mend the scorer (its traceback is in the log)"
            )

    def _failed(self, prompt: Prompt, failure: Failure) -> Score:
        line = failure.line
        if not self._failures.count:
            self._failures = FailureReport(0, f"{line} (prompt {prompt.uid})", failure.trace)
        self._failures = replace(self._failures, count=self._failures.count + 1)
        if self._config.on_failure == "fatal":
            raise RewardError(
                f"scoring an answer to prompt {prompt.uid} failed and reward.on_failure is fatal: "
                f"{line}; mend the scorer, or set reward.on_failure to wrong"
            )
        wrong = self._wrong_reward(prompt)
        required = self._required
        extra = {} if required is None or required in self._common_metrics() else {required: 0.0}
        return Score(wrong, 0.0, {"task": wrong}, extra, error=line)

    def _wrong_reward(self, prompt: Prompt) -> float:
        if self._has_user:
            return WRONG_REWARD
        return self._backend.router.scorer(prompt.data_source).wrong_reward

    def _shaped(self, score: Score, trajectory: Trajectory) -> Score:
        overlong = self._config.overlong
        if not overlong.enabled:
            return score
        penalty = overlong_penalty(
            trajectory.generated_tokens,
            self._max_response_tokens,
            overlong.buffer_tokens,
            overlong.factor,
        )
        parts = {**score.parts, "overlong": penalty}
        return replace(score, reward=sum(parts.values()), parts=parts)

    def _common_metrics(self) -> frozenset[str]:
        names = {"accuracy", "reward", "task_reward", "task"}
        return frozenset(names | {"overlong"} if self._config.overlong.enabled else names)

    def _check_required(self, score: Score) -> None:
        metric = self._required
        if metric is None or metric in self._common_metrics():
            return
        value = score.extra.get(metric)
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            given = [k for k, number in score.extra.items() if isinstance(number, SupportsFloat)]
            raise RewardError(
                f"sampling.filter.metric is {metric}, but the score has "
                f"{'no such number' if metric not in score.extra else repr(value)}; it has "
                f"{', '.join(sorted(self._common_metrics()) + given)}"
            )
