"""The pipeline that scores answers, and the count of scorings that fail.

    answer ─► text ─► model and judge are asked ─► manager: task ─► further scorers ─► length
                 └──────────── parts, each by its weight ────────────┘ ─► reward

A score is a list of parts. Each has a scorer, a weight, and a place where it runs:

| part | scored by | where |
|---|---|---|
| task | the manager: a rule by data source, or code of the user's | here, a worker, or over HTTP |
| those of `reward.parts` | built-in rules, functions of the user's | here, or a worker |
| a reward model's, a judge's | `ModelScorer`, `Judge` | here, apart, or over HTTP |
| environment | the sum of its rewards of a conversation's turns | where it runs |
| overlong, cosine | `overlong_penalty`, `cosine_reward`, in training only | here |

A scorer that raises, exits, hangs, dies, or returns NaN or the wrong type marks its own sample as
failed: `Score.error` says why, the reward is that of a wrong answer and the accuracy 0. Too large
a share of failures stops the run, because a broken reward must not train a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from winnow.config.judge import LanguageModelJudge, SequenceClassifier
from winnow.config.reward import UNROUTED, CosineConfig, RewardConfig
from winnow.rewards.manager import Manager
from winnow.rewards.managers import TURN_REWARDS, FunctionManager, RuleManager, make_manager
from winnow.rewards.routing import NO_SCORER, Router, check_package, find_scorer
from winnow.rewards.task import Failure, ScoreFuture
from winnow.types import IntArray, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from winnow.rewards.judge import Judge
    from winnow.rewards.model_scorer import ModelScorer

TASK = "task"
"""Part of the reward that the manager's scorer gives."""
OVERLONG, COSINE, ENVIRONMENT = "overlong", "cosine", "environment"
OVERLONG_REWARD = "overlong_reward"
ANSWERS, FAILED = "scoring/answers", "scoring/failed"
WRONG_REWARD = -1.0
"""Reward of an answer whose scoring failed. A user's scale is unknown; the lower end of the
usual ones keeps a policy from living on answers that break the scorer."""
ModelSection = SequenceClassifier | LanguageModelJudge
Decode = Callable[[IntArray], str]


@dataclass(frozen=True, eq=False)
class ScoredAnswer:
    """A score, and the failure if scoring failed."""

    score: Score
    failure: Failure | None = None


class RewardPipeline:
    """Scores answers in this process; `RemotePipeline` does the same in others.

    An answer's score depends on that answer alone. Contract tests: tests/contract/test_rewards.py.

    Args:
        max_response_tokens: length at which answers are cut off.
        model: runs what `config.model` describes; None leaves it out.
        judge: asks what `config.judge` describes; None leaves it out.
        decode: makes text of tokens, where an answer comes without it.
        conversations: answers are conversations with environments, which reward turns.

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
        conversations: bool = False,
    ) -> None:
        self._config, self._max_response_tokens = config, max_response_tokens
        self._judge, self._decode, self._conversations = judge, decode, conversations
        self._models = [each for each in (model, judge) if each is not None]
        self._names = ScoreNames(config, [each.config for each in self._models], conversations)
        self._weights = {TASK: config.weights.task, COSINE: config.cosine.weight}
        self._weights[ENVIRONMENT] = config.weights.environment
        self._weights |= {each.config.part: each.config.weight for each in self._models}
        self._weights |= {name: part.weight for name, part in config.parts.items()}
        held_out = [name for name, part in config.parts.items() if part.in_evaluation]
        self._scored_parts = {True: [*config.parts], False: held_out}
        """Names of `reward.parts`, in training and in evaluation."""
        self._part_scorers = {
            name: find_scorer(part.scorer, f"reward.parts.{name}.scorer")
            for name, part in config.parts.items()
            if part.scorer is not None
        }
        self._manager = manager = make_manager(config)
        self._rules = manager if isinstance(manager, RuleManager) else RuleManager(config)
        self._functions = dict[str, FunctionManager]()
        try:
            for name, part in config.parts.items():
                if part.path is not None:
                    self._functions[name] = FunctionManager(config, f"reward.parts.{name}")
        except BaseException:  # nothing else would end the workers of the others
            self.close()
            raise

    def prepare(self, data_sources: Iterable[str]) -> None:
        """Start the workers and services that these sources need.

        Raises:
            RewardError: one cannot be scored.
        """
        self._manager.prepare(data_sources)
        for name, scorer in self._part_scorers.items():
            check_package(scorer, f"reward.parts.{name}", f"reward.parts.{name}.scorer")
        self._rules.start(self._part_scorers.values())

    def check_prompt(self, prompt: Prompt) -> None:
        """Check before training that the models can score answers to a prompt.

        Raises:
            ModelError: not before the reward model.
            RewardError: not before the judge.
        """
        for model in self._models:
            model.check(prompt)

    def takes_time(self, data_sources: Iterable[str]) -> bool:
        """Return whether scores of these sources arrive later, from other processes or threads."""
        return (
            any(model.takes_time for model in self._models)
            or self._manager.takes_time(data_sources)
            or any(map(self._rules.is_offloaded, self._part_scorers.values()))
            or any(function.takes_time(data_sources) for function in self._functions.values())
        )

    def figures(self) -> dict[str, int]:
        """Return the judge's counts since the last call, as `judge/NAME`."""
        return {} if self._judge is None else self._judge.figures()

    def count_offloaded(self) -> int:
        """Return how many answers workers or models have scored; safe from any thread."""
        backends: set[Manager | ModelScorer | Judge] = {
            *(self._manager, self._rules, *self._models, *self._functions.values())
        }
        return sum(each.scored for each in backends)

    def close(self) -> None:
        """Stop all scorers; may be called twice."""
        with ExitStack() as stack:  # one that fails to close leaves the others to be closed
            if self._judge is not None:
                stack.callback(self._judge.close)
            for each in (self._rules, self._manager, *self._functions.values()):
                stack.callback(each.close)

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        """Score one answer; its length counts in training only.

        Args:
            text: the answer; None: its tokens are decoded where it is scored.

        Raises:
            RewardError: no answer can be scored any more.
        """
        if text is None:
            assert self._decode is not None, "made without what reads tokens"
            text = self._decode(np.asarray(trajectory.last_turn.token_ids))
        # The models are asked before anything is waited for, so that answers whose scoring begins
        # together are run together.
        verdicts: list[tuple[ModelSection, ScoreFuture]] = []
        for model in self._models:
            if training or model.config.in_evaluation:
                verdicts.append((model.config, model.begin_scoring(prompt, text)))
        if self._conversations:
            prompt = _with_rollout_scores(prompt, trajectory)
        result: Score | Failure = await self._manager.score(prompt, text)
        parts: dict[str, float] = {}
        for name in self._scored_parts[training]:
            if isinstance(result, Failure):
                break
            if name in self._functions:
                outcome = await self._functions[name].score(prompt, text)
            else:
                outcome = await self._rules.score(prompt, text, self._part_scorers[name])
            if isinstance(outcome, Failure):
                result = replace(outcome, line=f"the part {name}: {outcome.line}")
            elif outcome.parts:  # a function in TRL's signature may give no reward
                parts[name] = outcome.reward
        for section, verdict in verdicts:
            value = await verdict
            if not isinstance(value, Failure):
                parts[section.part] = value
            elif not isinstance(result, Failure):
                result = value
        failure = result if isinstance(result, Failure) else None
        if isinstance(result, Failure):
            scorers, names = self._part_scorers, self._scored_parts[training]
            parts = {n: scorers[n].wrong_reward if n in scorers else WRONG_REWARD for n in names}
            parts |= {section.part: section.wrong_score for section, _ in verdicts}
            result = self._names.wrong_score(prompt.data_source, result)
        return ScoredAnswer(self._combine_parts(result, parts, trajectory, training), failure)

    def _combine_parts(
        self, score: Score, model_parts: dict[str, float], trajectory: Trajectory, training: bool
    ) -> Score:
        """Combine the task's score and the other parts into one reward.

        Parts keep the numbers that scorers gave, so that metrics and filters see them as they are;
        weights work on the sum alone.
        """
        parts, accuracy, extra = {**score.parts, **model_parts}, score.accuracy, score.extra
        judge = None if self._judge is None else self._judge.config
        is_judged = not score.error and self._names.judge_sets_accuracy(training)
        if judge is not None and is_judged:
            accuracy = float(parts[judge.part] >= judge.threshold)
        if self._conversations:
            parts[ENVIRONMENT] = math.fsum(turn.reward for turn in trajectory.turns)
        overlong, cosine = self._config.overlong, self._config.cosine
        tokens = sum(len(s) for s in trajectory.segments if not s.restarts)  # as the limit does
        if training and overlong.enabled:
            limit = self._max_response_tokens
            penalty = overlong_penalty(tokens, limit, overlong.buffer_tokens, overlong.factor)
            parts[OVERLONG] = penalty
            if self._config.manager.name == "dapo":  # as verl's dapo manager logs them
                extra = {**extra, OVERLONG: float(penalty < 0), OVERLONG_REWARD: penalty}
        if training and cosine.enabled:
            limit = cosine.limit_tokens or self._max_response_tokens
            parts[COSINE] = cosine_reward(cosine, accuracy >= 1, tokens, limit)
        reward = 0.0
        for name, value in parts.items():
            reward += self._weights.get(name, 1.0) * value
        has_acc = score.has_accuracy or is_judged
        return Score(float(reward), accuracy, parts, extra, score.error, score.outside, has_acc)


class ScoreNames:
    """The names of all numbers in the scores of a recipe.

    Args:
        models: sections of those models that are asked.
        conversations: answers are conversations with environments.

    Raises:
        RewardError: a scorer's name is wrong.
    """

    def __init__(
        self, config: RewardConfig, models: Sequence[ModelSection], conversations: bool = False
    ) -> None:
        self._config, self._models, self._conversations = config, models, conversations
        self._judge = next((each for each in models if isinstance(each, LanguageModelJudge)), None)
        is_rules = config.function.path is None and config.manager.name not in UNROUTED
        self._router = Router(config.scorers) if is_rules else None

    def for_sources(self, data_sources: Iterable[str]) -> frozenset[str] | None:
        """Return the names in every score of these sources; None if unknown before a run."""
        if self._router is None:
            return None
        metrics = [self._router.scorer(name).metrics | self.common(name) for name in data_sources]
        return frozenset.intersection(*metrics) if metrics else self.common()

    def common(self, data_source: str | None = None) -> frozenset[str]:
        """Return the names in every training score, or in those of one source."""
        config = self._config
        has_task = data_source is None or self.has_task_scorer(data_source)
        optional = {
            "task_reward": has_task,
            TASK: has_task,
            "accuracy": has_task or self.judge_sets_accuracy(training=True),
            ENVIRONMENT: self._conversations,
            OVERLONG: config.overlong.enabled,
            COSINE: config.cosine.enabled,
            OVERLONG_REWARD: config.manager.name == "dapo",
        }
        names = [name for name, is_present in optional.items() if is_present]
        return frozenset(("reward", *names, *config.parts, *(m.part for m in self._models)))

    def has_task_scorer(self, data_source: str) -> bool:
        """Return whether a rule, the user's code or the environment scores this source, too, not
        only models."""
        return self._router is None or self._router.scorer(data_source) is not NO_SCORER

    def wrong_score(self, data_source: str, failure: Failure) -> Score:
        """Return the score of an answer whose scoring failed, with the reward of a wrong one."""
        rule = None if self._router is None else self._router.scorer(data_source)
        wrong = WRONG_REWARD if rule is None else rule.wrong_reward
        parts = {} if rule is NO_SCORER else {TASK: wrong}
        return Score(wrong, 0.0, parts, error=failure.line, outside=failure.outside)

    def judge_sets_accuracy(self, training: bool) -> bool:
        """Return whether the judge sets the accuracy."""
        if self._judge is None or not self._judge.as_accuracy:
            return False
        return training or self._judge.in_evaluation


def _with_rollout_scores(prompt: Prompt, trajectory: Trajectory) -> Prompt:
    """Return a prompt with the conversation's figures in `extra_info`, under verl's names."""
    turns, info = trajectory.turns, prompt.extra.get("extra_info")
    figures = [each for turn in turns for each in turn.figures.items()]
    scores = {name: value for name, value in figures if name not in ("calls", "malformed")}
    info = {
        **(info if isinstance(info, Mapping) else {}),
        "num_turns": 2 * len(turns),  # the prompt and replies are turns, too, as in verl
        "rollout_reward_scores": {**scores, TURN_REWARDS: [turn.reward for turn in turns]},
    }
    return replace(prompt, extra={**prompt.extra, "extra_info": info})


def overlong_penalty(
    length_tokens: int, limit_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> float:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13); no answer is over the limit.

    0 up to `limit - buffer`, then falling linearly to -factor at the limit.
    """
    over = length_tokens - (limit_tokens - buffer_tokens)
    return -factor * min(max(over, 0) / buffer_tokens, 1.0)


def cosine_reward(
    config: CosineConfig, is_right: bool, length_tokens: int, limit_tokens: int
) -> float:
    """Return the cosine reward of arXiv 2502.03373, section 4.2.

    With r_0 and r_L the ends for right or for wrong answers,
    r_L + (r_0 - r_L) / 2 * (1 + cos(pi * length / limit)): r_0 at no length, r_L towards the
    limit; an answer that has reached the limit gets `exceeded`, right or wrong.
    """
    if length_tokens >= limit_tokens:
        return config.exceeded
    short, long = config.wrong_short, config.wrong_long
    if is_right:
        short, long = config.right_short, config.right_long
    fall = (1 + math.cos(math.pi * length_tokens / limit_tokens)) / 2
    return long + (short - long) * fall
