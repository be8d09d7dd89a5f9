"""Scores for answers: routed, shaped, and safe against scorers that fail.

A scorer that raises, exits, hangs, dies, or returns NaN or the wrong type marks its own sample as
failed: `Score.error` says why, the reward is that of a wrong answer and the accuracy 0. Too large
a share of failures stops the run, because a broken reward must not train a model. Where scorers
run is the affair of `winnow.rewards.managers`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import SupportsFloat

from winnow.config.reward import RewardConfig
from winnow.config.reward_manager import DapoManager
from winnow.errors import RewardError
from winnow.rewards.blending import TASK, blended, part_weights
from winnow.rewards.judge import Judge
from winnow.rewards.managers import make_manager, rules_place
from winnow.rewards.managers.protocol import Manager
from winnow.rewards.managers.rules import Rules
from winnow.rewards.model_scorer import ModelScorer
from winnow.rewards.parts import ScoredParts
from winnow.rewards.routing import NO_SCORER
from winnow.rewards.shaping import COSINE, OVERLONG, OVERLONG_REWARD, length_parts
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
        self,
        config: RewardConfig,
        max_response_tokens: int,
        model: ModelScorer | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Load what scores; a user's file is imported here, or in its workers.

        Args:
            model: runs what `config.model` describes; None leaves it out.
            judge: asks what `config.judge` describes; None leaves it out.

        Raises:
            RewardError: a scorer's name or the user's file is wrong.
        """
        self._config = config
        self._max_response_tokens = max_response_tokens
        self._manager = manager = make_manager(config)
        try:
            self._rules = (
                manager if isinstance(manager, Rules) else Rules(config, rules_place(config))
            )
            self._parts = ScoredParts(config, self._rules)
        except BaseException:
            manager.close()
            raise
        self._model, self._judge = model, judge
        self._models = [each for each in (model, judge) if each is not None]
        self._weights = part_weights(config)
        self._required: str | None = None
        self._failures = FailureReport(0, "", "")

    def twin(self) -> RewardService:
        """Another service over the same scorers and workers, with a count of its own."""
        other = copy.copy(self)
        other._required = None
        other.reset_failures()
        return other

    def close(self) -> None:
        """End the workers; nothing can be scored afterwards."""
        with ExitStack() as stack:  # one that fails to close leaves the others to be closed
            if self._judge is not None:
                stack.callback(self._judge.close)
            stack.callback(self._rules.close)
            stack.callback(self._manager.close)

    def scored_apart(self) -> int:
        """Answers that workers or models have dealt with: grows as long as scoring gets on."""
        own: set[Manager | ModelScorer | Judge] = {self._manager, self._rules, *self._models}
        return sum(each.scored for each in own)

    def check_sources(self, data_sources: Iterable[str], held_out: bool = False) -> None:
        """See before training that every source can be scored.

        Args:
            held_out: and given an accuracy, which evaluation is about.

        Raises:
            RewardError: one cannot.
        """
        sources = set(data_sources)
        self._manager.prepare(sources)
        self._parts.prepare()
        for source in sorted(sources):
            if held_out and not self._has_task(source) and not self._judge_decides(training=False):
                raise RewardError(
                    f"reward.scorers leaves {source} to the reward model or the judge, which gives "
                    "held-out answers no accuracy; name a scorer for it, leave it out of data."
                    "eval_files, or set reward.judge.in_evaluation and reward.judge.as_accuracy"
                )

    def check_prompt(self, prompt: Prompt) -> None:
        """See before training that answers to a prompt can be put before the models.

        Raises:
            ModelError: not before the reward model.
            RewardError: not before the judge.
        """
        for model in self._models:
            model.check(prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether scores of these sources come later, from scorers beside the engine."""
        return (
            self._judge is not None
            or self._manager.takes_time(data_sources)
            or self._parts.take_time
        )

    def figures(self) -> dict[str, int]:
        """`judge/…`: what the judge was asked since the last call, by twins, too."""
        return {} if self._judge is None else self._judge.figures()

    def known_metrics(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """The numbers that every score of these sources has; None: only a run will tell."""
        router = self._manager.router
        if router is None:
            return None
        own = [
            router.scorer(source).metrics | self._common_metrics(source) for source in data_sources
        ]
        return frozenset.intersection(*own) if own else self._common_metrics()

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

        The models are asked before anything is waited for, so that answers whose scoring
        begins together are run together.

        Raises:
            RewardError: scoring failed and `on_failure` is fatal, or the score lacks the metric
                that the filter asks for.
        """
        asked = [
            (model.config, model.begin(prompt, text))
            for model in self._models
            if training or model.config.in_evaluation
        ]
        result: Score | Failure = await self._manager.score(prompt, text)
        parts = self._parts.wrong(training)
        if not isinstance(result, Failure):
            scores = await self._parts.score(prompt, text, training)
            result, parts = (scores, parts) if isinstance(scores, Failure) else (result, scores)
        verdicts = {section.part: (section, await verdict) for section, verdict in asked}
        for _, said in verdicts.values():
            if isinstance(said, Failure) and not isinstance(result, Failure):
                result, parts = said, self._parts.wrong(training)
        score = self._failed(prompt, result) if isinstance(result, Failure) else result
        for part, (section, said) in verdicts.items():
            if isinstance(said, Failure) or score.error:
                said = section.wrong_score
            parts[part] = said
        score = self._decided(score, parts, training)
        if training:
            self._check_required(score)
            score = self._shaped(score, trajectory, parts)
        return blended(score, parts, self._weights)

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
        parts = {TASK: wrong} if self._has_task(prompt.data_source) else {}
        return Score(wrong, 0.0, parts, extra, error=line, outside=failure.outside)

    def _wrong_reward(self, prompt: Prompt) -> float:
        router = self._manager.router
        return WRONG_REWARD if router is None else router.scorer(prompt.data_source).wrong_reward

    def _shaped(self, score: Score, trajectory: Trajectory, parts: dict[str, float]) -> Score:
        """Add what the length makes to the parts, and what verl's dapo manager notes of it."""
        tokens, limit = trajectory.generated_tokens, self._max_response_tokens
        parts.update(length_parts(self._config, score.accuracy, tokens, limit))
        if not isinstance(self._config.manager, DapoManager):
            return score
        penalty = parts[OVERLONG]
        notes = {OVERLONG: float(penalty < 0), OVERLONG_REWARD: penalty}
        return replace(score, extra={**score.extra, **notes})

    def _judge_decides(self, training: bool) -> bool:
        """Whether the accuracy is the judge's."""
        if self._judge is None or not self._judge.config.as_accuracy:
            return False
        return training or self._judge.config.in_evaluation

    def _decided(self, score: Score, parts: Mapping[str, float], training: bool) -> Score:
        """The score with the judge's accuracy, where that counts; a failed one stays wrong."""
        if self._judge is None or score.error or not self._judge_decides(training):
            return score
        judge = self._judge.config
        return replace(score, accuracy=float(parts[judge.part] >= judge.threshold))

    def _has_task(self, data_source: str) -> bool:
        """Whether something else than models scores this source."""
        router = self._manager.router
        return router is None or router.scorer(data_source) is not NO_SCORER

    def _common_metrics(self, data_source: str | None = None) -> frozenset[str]:
        """Numbers of every training score, or of those of a source."""
        names = {"reward"} | self._parts.names
        if data_source is None or self._has_task(data_source):
            names |= {"accuracy", "task_reward", TASK}
        if self._judge_decides(training=True):
            names.add("accuracy")
        if self._config.overlong.enabled:
            names.add(OVERLONG)
        if self._config.cosine.enabled:
            names.add(COSINE)
        if isinstance(self._config.manager, DapoManager):
            names.add(OVERLONG_REWARD)
        names |= {model.config.part for model in self._models}
        return frozenset(names)

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
