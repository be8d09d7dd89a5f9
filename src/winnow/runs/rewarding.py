"""From a recipe to its reward pipeline: rules, a reward model, a judge, all in one process.

That is the run's process, or each of those apart (`reward.processes`). Torch is imported where
there is a reward model only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from winnow.config.judge import NoRewardModel, OpenAiJudge
from winnow.config.reward import RewardConfig, share_of
from winnow.config.root import Config
from winnow.rewards.pipeline import Decode, RewardPipeline, Rewards
from winnow.rewards.score_names import Section

if TYPE_CHECKING:
    import torch

    from winnow.rewards.remote_pipeline import PipelineWorker
    from winnow.workers.protocol import RankInfo


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
