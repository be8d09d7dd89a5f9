"""Who has a say in what an answer is worth: the manager, further rules, a reward model, a judge.

    Panel        in this process, with its manager's own workers
    RemotePanel  whole panels in other processes (`winnow.rewards.remote_panel`)

An answer's score depends on that answer alone. What a failed scoring means for the run, and who
counts it, is left to `winnow.rewards.service`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

from winnow.config.reward import DapoManager, RewardConfig
from winnow.rewards.blending import TASK, blended, part_weights
from winnow.rewards.judge import Judge
from winnow.rewards.managers import make_manager, rules_place
from winnow.rewards.managers.protocol import Manager
from winnow.rewards.managers.rules import Rules
from winnow.rewards.model import ModelScorer
from winnow.rewards.parts import ScoredParts
from winnow.rewards.score_names import ScoreNames
from winnow.rewards.shaping import OVERLONG, OVERLONG_REWARD, length_parts
from winnow.rewards.task import Failure
from winnow.types import IntArray, Prompt, Score, Trajectory

Decode = Callable[[IntArray], str]


@dataclass(frozen=True, eq=False)
class ScoredAnswer:
    """A score, and why it is that of a failed scoring if it is."""

    score: Score
    failure: Failure | None = None


class AnyPipeline(Protocol):
    """Contract tests in `tests/contract/test_rewards.py`."""

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See that these can be scored, and start what that needs.

        Raises:
            RewardError: one cannot.
        """
        ...

    def check_prompt(self, prompt: Prompt) -> None:
        """See before training that answers to a prompt can be put before the models.

        Raises:
            ModelError: not before the reward model.
            RewardError: not before the judge.
        """
        ...

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Whether scores of these sources come later, from scorers beside the engine."""
        ...

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        """What an answer is worth.

        Args:
            text: what it says; None: its tokens are read where it is scored.

        Raises:
            RewardError: no answer can be scored any more.
        """
        ...

    def figures(self) -> dict[str, int]:
        """`judge/…`: what the judge was asked since the last call."""
        ...

    def scored_apart(self) -> int:
        """Answers that workers or models have dealt with; another thread may ask."""
        ...

    def close(self) -> None:
        """End what it started; a second time does nothing."""
        ...


class RewardPipeline:
    """Everybody in this process.

    Args:
        max_response_tokens: at which answers are cut off.
        model: runs what `config.model` describes; None leaves it out.
        judge: asks what `config.judge` describes; None leaves it out.
        decode: reads tokens, where a text is not given.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_response_tokens: int,
        model: ModelScorer | None = None,
        judge: Judge | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Load what scores; a user's file is imported here, or in its workers.

        Raises:
            RewardError: a scorer's name or the user's file is wrong.
        """
        self._config, self._max_response_tokens = config, max_response_tokens
        self._manager = manager = make_manager(config)
        try:
            self._rules = (
                manager if isinstance(manager, Rules) else Rules(config, rules_place(config))
            )
            self._parts = ScoredParts(config, self._rules)
        except BaseException:
            manager.close()
            raise
        self._model, self._judge, self._decode = model, judge, decode
        self._models = [each for each in (model, judge) if each is not None]
        self._weights = part_weights(config)
        self._names = ScoreNames(config, [each.config for each in self._models])

    def prepare(self, data_sources: Iterable[str]) -> None:
        """See `AnyPipeline.prepare`."""
        self._manager.prepare(data_sources)
        self._parts.prepare()

    def check_prompt(self, prompt: Prompt) -> None:
        """See `AnyPipeline.check_prompt`."""
        for model in self._models:
            model.check(prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """See `AnyPipeline.takes_time`."""
        return (
            self._judge is not None
            or self._manager.takes_time(data_sources)
            or self._parts.take_time
        )

    def figures(self) -> dict[str, int]:
        """See `AnyPipeline.figures`."""
        return {} if self._judge is None else self._judge.figures()

    def scored_apart(self) -> int:
        """See `AnyPipeline.scored_apart`."""
        own: set[Manager | ModelScorer | Judge] = {self._manager, self._rules, *self._models}
        return sum(each.scored for each in own)

    def close(self) -> None:
        """See `AnyPipeline.close`."""
        with ExitStack() as stack:  # one that fails to close leaves the others to be closed
            if self._judge is not None:
                stack.callback(self._judge.close)
            stack.callback(self._rules.close)
            stack.callback(self._manager.close)

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        """See `AnyPipeline.score`; length is shaped in training only.

        The models are asked before anything is waited for, so that answers whose scoring
        begins together are run together.
        """
        if text is None:
            assert self._decode is not None, "made without what reads tokens"
            text = self._decode(trajectory.token_ids)
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
        failure = result if isinstance(result, Failure) else None
        score = self._wrong(prompt, result) if isinstance(result, Failure) else result
        for part, (section, said) in verdicts.items():
            if isinstance(said, Failure) or score.error:
                said = section.wrong_score
            parts[part] = said
        score = self._decided(score, parts, training)
        if training:
            score = self._shaped(score, trajectory, parts)
        return ScoredAnswer(blended(score, parts, self._weights), failure)

    def _wrong(self, prompt: Prompt, failure: Failure) -> Score:
        wrong = self._names.wrong_reward(prompt.data_source)
        parts = {TASK: wrong} if self._names.has_task(prompt.data_source) else {}
        return Score(wrong, 0.0, parts, error=failure.line, outside=failure.outside)

    def _shaped(self, score: Score, trajectory: Trajectory, parts: dict[str, float]) -> Score:
        """Add what the length makes to the parts, and what verl's dapo manager notes of it."""
        tokens, limit = trajectory.generated_tokens, self._max_response_tokens
        parts.update(length_parts(self._config, score.accuracy, tokens, limit))
        if not isinstance(self._config.manager, DapoManager):
            return score
        penalty = parts[OVERLONG]
        notes = {OVERLONG: float(penalty < 0), OVERLONG_REWARD: penalty}
        return replace(score, extra={**score.extra, **notes})

    def _decided(self, score: Score, parts: Mapping[str, float], training: bool) -> Score:
        """The score with the judge's accuracy, where that counts; a failed one stays wrong."""
        if self._judge is None or score.error or not self._names.judge_decides(training):
            return score
        judge = self._judge.config
        return replace(score, accuracy=float(parts[judge.part] >= judge.threshold))
