"""The pipeline that scores answers, and the count of scorings that fail.

    answer ─► text ─► model and judge are asked ─► manager: task ─► further scorers ─► length
                 └──────────── parts, each by its weight ────────────┘ ─► reward

A score is a list of parts. Each has a scorer, a weight, and a place where it runs:

| part | scored by | where |
|---|---|---|
| task | the manager: a rule by data source, or code of the user's | here, a worker, or over HTTP |
| those of `reward.parts` | built-in rules | here, or a worker |
| a reward model's, a judge's | `ModelScorer`, `Judge` | here, or over HTTP |
| overlong, cosine | `winnow.rewards.parts`, in training only | here |

A scorer that raises, exits, hangs, dies, or returns NaN or the wrong type marks its own sample as
failed: `Score.error` says why, the reward is that of a wrong answer and the accuracy 0. Too large
a share of failures stops the run, because a broken reward must not train a model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self, SupportsFloat

from winnow.config.reward import DapoManager, RewardConfig
from winnow.errors import RewardError
from winnow.rewards.managers import Manager, Rules, make_manager
from winnow.rewards.parts import (
    OVERLONG,
    OVERLONG_REWARD,
    TASK,
    ScoreNames,
    Section,
    length_parts,
    part_weights,
)
from winnow.rewards.routing import check_package
from winnow.rewards.scorers import SCORERS, Scorer
from winnow.rewards.task import Failure, Verdict
from winnow.types import IntArray, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from winnow.rewards.judge import Judge
    from winnow.rewards.model import ModelScorer

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, eq=False)
class ScoredAnswer:
    """A score, and why it is that of a failed scoring if it is."""

    score: Score
    failure: Failure | None = None


class AnyPipeline(Protocol):
    """Scores answers in this process (`RewardPipeline`) or in others (`RemotePipeline`).

    An answer's score depends on that answer alone. Contract tests: tests/contract/test_rewards.py.
    """

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Start what these sources need.

        Raises:
            RewardError: one cannot be scored.
        """

    def check_prompt(self, prompt: Prompt) -> None:
        """Check before training that answers to a prompt can be put before the models.

        Raises:
            ModelError: not before the reward model.
            RewardError: not before the judge.
        """

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Return whether scores of these sources come later, from scorers beside the engine."""

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        """Score one answer; its length counts in training only.

        Args:
            text: the answer; None: its tokens are decoded where it is scored.

        Raises:
            RewardError: no answer can be scored any more.
        """

    def figures(self) -> dict[str, int]:
        """Return the judge's counts since the last call, as `judge/NAME`."""

    def scored_apart(self) -> int:
        """Return how many answers workers or models have dealt with; from any thread."""

    def close(self) -> None:
        """End what it started; a second time does nothing."""


class RewardPipeline:
    """An `AnyPipeline` in this process.

    Args:
        max_response_tokens: length at which answers are cut off.
        model: runs what `config.model` describes; None leaves it out.
        judge: asks what `config.judge` describes; None leaves it out.
        decode: makes text of tokens, where an answer comes without it.

    Raises:
        RewardError: a scorer's name or the user's file is wrong; the file is imported here, or in
            workers.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_response_tokens: int,
        model: ModelScorer | None = None,
        judge: Judge | None = None,
        decode: Decode | None = None,
    ) -> None:
        self._config, self._max_response_tokens = config, max_response_tokens
        self._judge, self._decode = judge, decode
        self._models = [each for each in (model, judge) if each is not None]
        self._names = ScoreNames(config, [each.config for each in self._models])
        self._weights = part_weights(config)
        self._is_shaped = config.overlong.enabled or config.cosine.enabled
        own = [(name, _rule(name, part.scorer)) for name, part in config.parts.items()]
        held_out = [each for each in own if config.parts[each[0]].in_evaluation]
        self._further = {True: own, False: held_out}
        """Scorers of `reward.parts` by name, in training and in evaluation."""
        self._manager = make_manager(config)
        manager = self._manager
        self._rules = manager if isinstance(manager, Rules) else Rules(config)

    def prepare(self, data_sources: Iterable[str]) -> None:
        self._manager.prepare(data_sources)
        for name, scorer in self._further[True]:
            check_package(scorer, f"reward.parts.{name}", f"reward.parts.{name}.scorer")
        self._rules.start(scorer for _, scorer in self._further[True])

    def check_prompt(self, prompt: Prompt) -> None:
        for model in self._models:
            model.check(prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        return (
            self._judge is not None
            or self._manager.takes_time(data_sources)
            or any(self._rules.is_late(scorer) for _, scorer in self._further[True])
        )

    def figures(self) -> dict[str, int]:
        return {} if self._judge is None else self._judge.figures()

    def scored_apart(self) -> int:
        own: set[Manager | ModelScorer | Judge] = {self._manager, self._rules, *self._models}
        return sum(each.scored for each in own)

    def close(self) -> None:
        with ExitStack() as stack:  # one that fails to close leaves the others to be closed
            if self._judge is not None:
                stack.callback(self._judge.close)
            stack.callback(self._rules.close)
            stack.callback(self._manager.close)

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        if text is None:
            assert self._decode is not None, "made without what reads tokens"
            text = self._decode(trajectory.token_ids)
        # The models are asked before anything is waited for, so that answers whose scoring begins
        # together are run together.
        asked: list[tuple[Section, Verdict]] = []
        for model in self._models:
            if training or model.config.in_evaluation:
                asked.append((model.config, model.begin(prompt, text)))
        result: Score | Failure = await self._manager.score(prompt, text)
        parts: dict[str, float] = {}
        for name, scorer in self._further[training]:
            if isinstance(result, Failure):
                break
            said = await self._rules.score(prompt, text, scorer)
            if isinstance(said, Failure):
                result = Failure(f"the part {name}: {said.line}", said.trace, said.outside)
            else:
                parts[name] = said.reward
        for section, verdict in asked:
            value = await verdict
            if not isinstance(value, Failure):
                parts[section.part] = value
            elif not isinstance(result, Failure):
                result = value
        if isinstance(result, Failure):
            parts = {name: scorer.wrong_reward for name, scorer in self._further[training]}
            parts |= {section.part: section.wrong_score for section, _ in asked}
            score = self._complete(self._wrong(prompt, result), parts, trajectory, training)
            return ScoredAnswer(score, result)
        return ScoredAnswer(self._complete(result, parts, trajectory, training))

    def _wrong(self, prompt: Prompt, failure: Failure) -> Score:
        wrong = self._names.wrong_reward(prompt.data_source)
        parts = {TASK: wrong} if self._names.has_task(prompt.data_source) else {}
        return Score(wrong, 0.0, parts, error=failure.line, outside=failure.outside)

    def _complete(
        self, score: Score, more: dict[str, float], trajectory: Trajectory, training: bool
    ) -> Score:
        """The task's score with the other parts, and the reward that all of them make.

        Parts keep the numbers that scorers gave, so that metrics and filters see them as they are;
        weights work on the sum alone.
        """
        parts, accuracy, extra = {**score.parts, **more}, score.accuracy, score.extra
        judge = None if self._judge is None else self._judge.config
        if judge is not None and not score.error and self._names.judge_decides(training):
            accuracy = float(parts[judge.part] >= judge.threshold)
        if training and self._is_shaped:
            tokens, limit = trajectory.generated_tokens, self._max_response_tokens
            parts |= length_parts(self._config, accuracy, tokens, limit)
            if isinstance(self._config.manager, DapoManager):  # as verl's dapo manager logs them
                penalty = parts[OVERLONG]
                extra = {**extra, OVERLONG: float(penalty < 0), OVERLONG_REWARD: penalty}
        reward = 0.0
        for name, value in parts.items():
            reward += self._weights.get(name, 1.0) * value
        return Score(float(reward), accuracy, parts, extra, score.error, score.outside)


def _rule(name: str, scorer: str) -> Scorer:
    if scorer not in SCORERS:
        raise RewardError(
            f"reward.parts.{name}.scorer is {scorer}, which is no scorer; "
            f"there are {', '.join(SCORERS)}"
        )
    return SCORERS[scorer]


@dataclass(frozen=True)
class FailureReport:
    """Failed scorings since the last reset."""

    count: int = 0
    first_error: str = ""
    """One line; empty when nothing failed."""
    first_traceback: str = ""
    """Traceback of the same failure, for the log."""


class Rewards:
    """Scores answers by the section `reward`, and counts failures.

    Args:
        pipeline: scores them.
        models: sections of those models that the pipeline asks.
    """

    def __init__(
        self, config: RewardConfig, pipeline: AnyPipeline, models: Sequence[Section] = ()
    ) -> None:
        self._config, self._pipeline = config, pipeline
        self._names = ScoreNames(config, models)
        self._required: str | None = None
        """The filter's metric, unless every score has it."""
        self._failures = FailureReport()
        self.close = pipeline.close
        self.check_prompt = pipeline.check_prompt
        self.takes_time = pipeline.takes_time
        self.figures = pipeline.figures
        self.scored_apart = pipeline.scored_apart
        self.known_metrics = self._names.of

    def twin(self) -> Self:
        """Return a copy with the same scorers and workers, and a count of its own."""
        other = copy.copy(self)
        other._required = None
        other.reset_failures()
        return other

    def check_sources(self, data_sources: Iterable[str], held_out: bool = False) -> None:
        """Check before training that every source can be scored.

        Args:
            held_out: and given an accuracy, which evaluation is about.

        Raises:
            RewardError: one cannot.
        """
        sources = set(data_sources)
        self._pipeline.prepare(sources)
        if not held_out or self._names.judge_decides(training=False):
            return
        for source in sorted(sources):
            if not self._names.has_task(source):
                raise RewardError(
                    f"reward.scorers leaves {source} to the reward model or the judge, which gives "
                    "held-out answers no accuracy; name a scorer for it, leave it out of data."
                    "eval_files, or set reward.judge.in_evaluation and reward.judge.as_accuracy"
                )

    def require_metric(self, metric: str, data_sources: Iterable[str]) -> None:
        """Demand that each training score has a filter's metric, from now on.

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
        """Score one answer; its length counts in training only.

        Args:
            text: the answer; None: its tokens are decoded where it is scored.

        Raises:
            RewardError: scoring failed and `on_failure` is fatal, or the score lacks the metric
                that the filter asks for.
        """
        scored = await self._pipeline.score(prompt, trajectory, text, training)
        if scored.failure is not None:
            return self._failed(prompt, scored.score, scored.failure)
        if training and self._required is not None:
            self._check_metric(scored.score, self._required)
        return scored.score

    @property
    def failure_report(self) -> FailureReport:
        """Failures since the last reset."""
        return self._failures

    def reset_failures(self) -> None:
        """Start a new count, as at the beginning of a step."""
        self._failures = FailureReport()

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
        """Count a failure, and give its score the number that a filter will ask for."""
        line, before = failure.line, self._failures
        if not before.count:
            before = FailureReport(0, f"{line} (prompt {prompt.uid})", failure.trace)
        self._failures = replace(before, count=before.count + 1)
        if self._config.on_failure == "fatal":
            raise RewardError(
                f"scoring an answer to prompt {prompt.uid} failed and reward.on_failure is fatal: "
                f"{line}; mend the scorer, or set reward.on_failure to wrong"
            )
        if self._required is None:
            return score
        return replace(score, extra={self._required: 0.0, **score.extra})

    def _check_metric(self, score: Score, metric: str) -> None:
        value = score.extra.get(metric)
        if not isinstance(value, SupportsFloat) or not math.isfinite(value):
            given = [k for k, number in score.extra.items() if isinstance(number, SupportsFloat)]
            common = self._names.common()
            raise RewardError(
                f"sampling.filter.metric is {metric}, but the score has "
                f"{'no such number' if metric not in score.extra else repr(value)}; it has "
                f"{', '.join(sorted(common) + [key for key in given if key not in common])}"
            )
