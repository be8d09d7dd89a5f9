"""Scores for answers: routed, shaped, and safe against scorers that fail.

A scorer that raises, exits, hangs, dies, or returns NaN or the wrong type marks its own sample as
failed: `Score.error` says why, the reward is that of a wrong answer and the accuracy 0. Too large
a share of failures stops the run, because a broken reward must not train a model. Who scores is
the affair of `winnow.rewards.panel`, where scorers run that of `winnow.rewards.managers`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, SupportsFloat

from winnow.config.reward import RewardConfig
from winnow.errors import RewardError
from winnow.rewards.judge import Judge
from winnow.rewards.model import ModelScorer
from winnow.rewards.panel import AnyPipeline, Decode, RewardPipeline
from winnow.rewards.score_names import ScoreNames, Section
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score, Trajectory


@dataclass(frozen=True)
class FailureReport:
    """Failed scorings since the last reset."""

    count: int
    first_error: str
    """One line; empty when nothing failed."""
    first_traceback: str
    """Of the same failure, for the log."""


class Rewards:
    """Scores answers by the section `reward`, and counts what fails.

    Args:
        panel: who scores.
        models: the sections of those models that it asks.
    """

    def __init__(self, config: RewardConfig, panel: AnyPipeline, models: Sequence[Section]) -> None:
        self._config, self._panel = config, panel
        self._names = ScoreNames(config, models)
        self._required: str | None = None
        """What the filter asks for, unless every score has it."""
        self._failures = FailureReport(0, "", "")

    def twin(self) -> Self:
        """The same scorers and workers, with a count of its own."""
        other = copy.copy(self)
        other._required = None
        other.reset_failures()
        return other

    def close(self) -> None:
        """End the workers; nothing can be scored afterwards."""
        self._panel.close()

    def scored_apart(self) -> int:
        """Answers that workers or models have dealt with: grows as long as scoring gets on."""
        return self._panel.scored_apart()

    def check_sources(self, data_sources: Iterable[str], held_out: bool = False) -> None:
        """See before training that every source can be scored.

        Args:
            held_out: and given an accuracy, which evaluation is about.

        Raises:
            RewardError: one cannot.
        """
        sources = set(data_sources)
        self._panel.prepare(sources)
        has_task, judge_decides = self._names.has_task, self._names.judge_decides(training=False)
        for source in sorted(sources):
            if held_out and not has_task(source) and not judge_decides:
                raise RewardError(
                    f"reward.scorers leaves {source} to the reward model or the judge, which gives "
                    "held-out answers no accuracy; name a scorer for it, leave it out of data."
                    "eval_files, or set reward.judge.in_evaluation and reward.judge.as_accuracy"
                )

    def check_prompt(self, prompt: Prompt) -> None:
        """See `AnyPipeline.check_prompt`."""
        self._panel.check_prompt(prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """See `AnyPipeline.takes_time`."""
        return self._panel.takes_time(data_sources)

    def figures(self) -> dict[str, int]:
        """`judge/…`: what the judge was asked since the last call, by twins, too."""
        return self._panel.figures()

    def known_metrics(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """The numbers that every score of these sources has; None: only a run will tell."""
        return self._names.of(data_sources)

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
        self._required = None if metric in self._names.common() else metric

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> Score:
        """What an answer is worth; length is shaped in training only.

        Args:
            text: what it says; None: its tokens are read where it is scored.

        Raises:
            RewardError: scoring failed and `on_failure` is fatal, or the score lacks the metric
                that the filter asks for.
        """
        judged = await self._panel.score(prompt, trajectory, text, training)
        if judged.failure is not None:
            return self._failed(prompt, judged.score, judged.failure)
        if training:
            self._check_required(judged.score)
        return judged.score

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

    def _failed(self, prompt: Prompt, score: Score, failure: Failure) -> Score:
        """Count it, and give the score the number that a filter will ask for."""
        line = failure.line
        if not self._failures.count:
            self._failures = FailureReport(0, f"{line} (prompt {prompt.uid})", failure.trace)
        self._failures = replace(self._failures, count=self._failures.count + 1)
        if self._config.on_failure == "fatal":
            raise RewardError(
                f"scoring an answer to prompt {prompt.uid} failed and reward.on_failure is fatal: "
                f"{line}; mend the scorer, or set reward.on_failure to wrong"
            )
        if self._required is None:
            return score
        return replace(score, extra={self._required: 0.0, **score.extra})

    def _check_required(self, score: Score) -> None:
        metric = self._required
        if metric is None:
            return
        value = score.extra.get(metric)
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            given = [k for k, number in score.extra.items() if isinstance(number, SupportsFloat)]
            common = self._names.common()
            raise RewardError(
                f"sampling.filter.metric is {metric}, but the score has "
                f"{'no such number' if metric not in score.extra else repr(value)}; it has "
                f"{', '.join(sorted(common) + [key for key in given if key not in common])}"
            )


class RewardService(Rewards):
    """`Rewards` of a panel in this process."""

    def __init__(
        self,
        config: RewardConfig,
        max_response_tokens: int,
        model: ModelScorer | None = None,
        judge: Judge | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Load what scores; arguments and errors are those of `RewardPipeline`."""
        panel = RewardPipeline(config, max_response_tokens, model, judge, decode)
        super().__init__(config, panel, [each.config for each in (model, judge) if each])
