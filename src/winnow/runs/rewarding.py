"""From a recipe to those who score: rules, a reward model, a judge, all in one process.

Torch is imported where there is a reward model only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from winnow.config.judge import OpenAiJudge
from winnow.config.reward import RewardConfig
from winnow.config.root import Config
from winnow.rewards.pipeline import Decode, RewardPipeline, Rewards
from winnow.rewards.score_names import Section

if TYPE_CHECKING:
    import torch


def make_rewards(
    config: Config, device: torch.device | str, decode: Decode | None = None, training: bool = True
) -> Rewards:
    """The scorers, with workers where they run apart, and the models that judge; close it.

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
    """Who scores; arguments and errors are those of `make_rewards`."""
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
    """The models that are asked, the reward model first."""
    found = [each for each in (config.model, config.judge) if isinstance(each, Section)]
    return [each for each in found if training or each.in_evaluation]
