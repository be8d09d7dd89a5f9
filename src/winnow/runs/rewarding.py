"""From a recipe to its reward pipeline: rules, a reward model, a judge, all in one process.

That is the run's process, or each of those apart (`reward.processes`). Torch is imported where
there is a reward model only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from winnow.config.judge import NoRewardModel, OpenAiJudge
from winnow.config.reward import RewardConfig, share_of
from winnow.config.root import Config
from winnow.errors import RewardError
from winnow.rewards.parts import Section
from winnow.rewards.pipeline import Decode, RewardPipeline, Rewards
from winnow.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    import torch

    from winnow.rewards.remote_pipeline import PipelineWorker
    from winnow.workers.host import RankInfo


log = logging.getLogger(__name__)


def make_rewards(
    config: Config, device: torch.device | str, decode: Decode | None = None, training: bool = True
) -> Rewards:
    """Make the scorers, with workers where they run apart, and the models that judge; close it.

    Args:
        decode: reads the tokens of answers that come without a text.
        training: else a model that scores only in training is left out.

    Raises:
        RewardError: a scorer's name, the user's file, or the judge's key or cache is wrong.
        ModelError: the reward model is not usable.
    """
    panel = make_panel(config, device, decode, training)
    return Rewards(config.reward, panel, asked_models(config.reward, training))


def make_panel(
    config: Config, device: torch.device | str, decode: Decode | None, training: bool = True
) -> RewardPipeline:
    """Make a reward pipeline; arguments and errors are those of `make_rewards`."""
    model, judge = None, None
    for section in asked_models(config.reward, training):
        if isinstance(section, OpenAiJudge):
            from winnow.rewards.judge import Judge

            judge = Judge(section)
            continue
        import torch

        from winnow.runs.reward_model import make_model_scorer

        budget = section.microbatch_tokens or config.trainer.microbatch_tokens
        deterministic = config.run.deterministic
        model = make_model_scorer(
            section, config.model, torch.device(device), budget, deterministic
        )
    return RewardPipeline(config.reward, config.rollout.max_response_tokens, model, judge, decode)


def asked_models(config: RewardConfig, training: bool = True) -> list[Section]:
    """List the models that are asked, the reward model first."""
    found = [each for each in (config.model, config.judge) if isinstance(each, Section)]
    return [each for each in found if training or each.in_evaluation]


def make_pipeline_worker(rank: RankInfo, config: Config, tokenizer: str) -> PipelineWorker:
    """Make one of the processes that score (`reward.processes`): a worker of a `WorkerGroup`.

    Args:
        rank: its place; the device is the reward model's.
        tokenizer: its folder; reads answers.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
    """
    from winnow.data.tokenizer import decoder, load_tokenizer
    from winnow.rewards.remote_pipeline import PipelineWorker

    index = rank.device_index
    if config.run.threads is not None and not isinstance(config.reward.model, NoRewardModel):
        import torch  # which takes its time, and rules do without

        torch.set_num_threads(config.run.threads)
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    read = load_tokenizer(tokenizer, config.model.trust_remote_code, field)
    own = config.model_copy(update={"reward": share_of(config.reward)})
    return PipelineWorker(
        make_panel(own, "cpu" if index is None else f"cuda:{index}", decoder(read))
    )


class TrainingScores:
    """The scorer of training answers, which the sampler calls for each finished one.

    Args:
        patience: answers after which failures are held against the limit before the step ends,
            so that a broken scorer is found even when no group qualifies.
    """

    def __init__(self, rewards: Rewards, patience: int) -> None:
        self._rewards, self._patience = rewards, patience
        self._scored = 0

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score one answer.

        Raises:
            RewardError: too many of this step's scorings failed.
        """
        score = await self._rewards.score(prompt, trajectory, None, training=True)
        self._scored += 1
        if self._scored >= self._patience:
            self._check()
        return score

    def end_step(self) -> None:
        """Hold the step's failures against the limit, and start anew.

        Raises:
            RewardError: their share is above `reward.max_failure_share`.
        """
        report = self._rewards.failure_report
        if report.count:
            log.warning(
                "scoring failed for %d of %d answers; the first failure: %s",
                report.count,
                self._scored,
                report.first_error,
            )
        try:
            self._check()
        finally:
            self._rewards.reset_failures()
            self._scored = 0

    def _check(self) -> None:
        try:
            self._rewards.check_failures(self._scored)
        except RewardError:
            report = self._rewards.failure_report
            log.error("%s", report.first_traceback or report.first_error)
            raise
