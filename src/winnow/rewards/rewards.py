"""`Rewards`: the scoring of a run, over a pipeline in this process or in others."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, SupportsFloat

from winnow.config.reward import RewardConfig
from winnow.errors import RewardError
from winnow.rewards.pipeline import ANSWERS, FAILED, ModelSection, RewardPipeline, ScoreNames
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from winnow.rewards.remote_pipeline import RemotePipeline

log = logging.getLogger(__name__)


@dataclass
class FailureReport:
    """Scorings since the count began, and those that failed."""

    scored: int = 0
    count: int = 0
    """The number that failed."""
    first_error: str = ""
    """One line; empty when nothing failed."""
    first_traceback: str = ""
    """Traceback of the same failure, for the log."""


class Rewards:
    """Scores answers by the section `reward`, and counts failures.

    Args:
        pipeline: scores them.
        models: sections of those models that the pipeline asks.
        conversations: as for `RewardPipeline`.
    """

    def __init__(
        self,
        config: RewardConfig,
        pipeline: RewardPipeline | RemotePipeline,
        models: Sequence[ModelSection] = (),
        conversations: bool = False,
    ) -> None:
        self._config, self.pipeline = config, pipeline
        self._names = ScoreNames(config, models, conversations)
        self._required: str | None = None
        """The filter's metric, unless every score has it."""
        self.failure_report = FailureReport()
        self._counts = Counter[str]()
        self.patience = math.inf
        """Scorings after which failures are held against the limit before the step ends, so that a
        broken scorer is found even when no group qualifies."""
        self.close = pipeline.close
        self.check_prompt = pipeline.check_prompt
        self.takes_time = pipeline.takes_time
        self.count_offloaded = pipeline.count_offloaded
        self.supported_metrics = self._names.for_sources

    def copy(self) -> Self:
        """Return a copy with the same scorers and workers, and separate counts."""
        other = copy.copy(self)
        other._required, other.patience = None, math.inf
        other.failure_report, other._counts = FailureReport(), Counter()
        return other

    def figures(self) -> dict[str, int]:
        """Return `scoring/answers`, those `scoring/failed`, and the judge's counts, since the last
        call."""
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in (ANSWERS, FAILED)} | self.pipeline.figures()

    def check_sources(self, data_sources: Iterable[str], held_out: bool = False) -> None:
        """Check before training that every source can be scored.

        Args:
            held_out: and given an accuracy, which evaluation is about.

        Raises:
            RewardError: one cannot.
        """
        sources = set(data_sources)
        self.pipeline.prepare(sources)
        if not held_out or self._names.judge_sets_accuracy(training=False):
            return
        for source in sorted(sources):
            if not self._names.has_task_scorer(source):
                raise RewardError(
                    f"reward.scorers routes {source} to none, and a reward model or judge gives "
                    "held-out answers no accuracy; set a scorer for it, remove it from data."
                    "eval_files, or set reward.judge.in_evaluation and reward.judge.as_accuracy"
                )

    def require_metric(self, metric: str, data_sources: Iterable[str]) -> None:
        """Require a filter's metric in each training score from now on.

        A failed scoring has 0 there. A user's function that leaves it out stops the run.

        Raises:
            RewardError: no scorer of these sources gives it.
        """
        supported = self.supported_metrics(data_sources)
        if supported is not None and metric not in supported:
            raise RewardError(
                f"sampling.filter.metric is {metric}, which no scorer of these data sources "
                f"returns; available: {', '.join(sorted(supported))}"
            )
        self._required = None if metric in self._names.common() else metric

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None = None, training: bool = True
    ) -> Score:
        """Score one answer; its length counts in training only.

        Args:
            text: the answer; None: its tokens are decoded where it is scored.

        Raises:
            RewardError: scoring failed and `on_failure` is fatal, the score lacks the metric that
                the filter asks for, or too many scorings failed.
        """
        scored = await self.pipeline.score(prompt, trajectory, text, training)
        score, report = scored.score, self.failure_report
        report.scored += 1
        self._counts[ANSWERS] += 1
        if scored.failure is not None:
            score = self._record_failure(prompt, score, scored.failure)
        elif training and self._required is not None:
            self._check_metric(score, self._required)
        if report.count and report.scored >= self.patience:
            self._check_failure_share()
        return score

    def end_step(self) -> None:
        """Check the step's failures against the limit, and start a new count.

        Raises:
            RewardError: their share is above `reward.max_failure_share`.
        """
        report = self.failure_report
        try:
            if report.count:
                log.warning(
                    "scoring failed for %d of %d answers; the first failure: %s",
                    report.count,
                    report.scored,
                    report.first_error,
                )
                self._check_failure_share()
        finally:
            self.failure_report = FailureReport()

    def _check_failure_share(self) -> None:
        report, limit = self.failure_report, self._config.max_failure_share
        if report.count > limit * report.scored:
            log.error("%s", report.first_traceback or report.first_error)
            raise RewardError(
                f"scoring failed for {report.count} of {report.scored} answers "
                f"({report.count / report.scored:.0%}), reward.max_failure_share is {limit:g}; the "
                f"first failure: {report.first_error}; fix the scorer (its traceback is in the "
                "log)"
            )

    def _record_failure(self, prompt: Prompt, score: Score, failure: Failure) -> Score:
        """Count a failure, and add the filter's metric, 0, to its score."""
        line, report = failure.line, self.failure_report
        if not report.count:
            report.first_error = f"{line} (prompt {prompt.uid})"
            report.first_traceback = failure.trace
        report.count += 1
        self._counts[FAILED] += 1
        if self._config.on_failure == "fatal":
            raise RewardError(
                f"scoring an answer to prompt {prompt.uid} failed and reward.on_failure is fatal: "
                f"{line}; fix the scorer, or set reward.on_failure to wrong"
            )
        if self._required is None:
            return score
        return replace(score, extra={self._required: 0.0, **score.extra})

    def _check_metric(self, score: Score, metric: str) -> None:
        value = score.extra.get(metric)
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            numeric = [k for k, number in score.extra.items() if isinstance(number, SupportsFloat)]
            common = self._names.common()
            raise RewardError(
                f"sampling.filter.metric is {metric}, but the score has "
                f"{'no such number' if metric not in score.extra else repr(value)}; it has "
                f"{', '.join(sorted(common) + [key for key in numeric if key not in common])}"
            )
