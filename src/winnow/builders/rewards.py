"""The reward pipeline of a recipe: rules, a reward model and a judge, all in one process.

That process is the driver, or each of `reward.processes`. Torch is imported for a reward model
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow.config.judge import EngineJudge, NoRewardModel, OpenAiJudge, SequenceClassifier
from winnow.config.reward import RewardConfig, config_per_process
from winnow.config.root import Config
from winnow.rewards.pipeline import Decode, ModelSection, RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.types import IntArray

if TYPE_CHECKING:
    import torch

    from winnow.builders.judge import StartEngines
    from winnow.rewards.model_scorer import ModelScorer
    from winnow.rewards.remote_pipeline import PipelineWorker
    from winnow.workers.group import WorkerGroup
    from winnow.workers.host import RankInfo


def make_rewards(
    config: Config,
    device: torch.device | str,
    decode: Decode | None = None,
    training: bool = True,
    ranks: WorkerGroup | None = None,
    judges: StartEngines | None = None,
) -> Rewards:
    """Make the scorers, with their workers, and the reward model and judge; the caller closes them.

    Args:
        decode: turns the tokens of answers without a text into one.
        training: False leaves out models that score in training only.
        ranks: hold the reward model (`RewardModelWorker`); None loads it in this process.
        judges: starts the judge's engines; None starts engines for these rewards only.

    Raises:
        RewardError: a scorer's name, the user's file, or the judge's key or cache is not usable.
        ModelError: the reward model or the judge's model is not usable.
    """
    sections = scoring_sections(config.reward, training)
    model, judge = None, None
    for section in sections:
        if isinstance(section, OpenAiJudge):
            from winnow.rewards.judge import Judge

            judge = Judge(section)
        elif isinstance(section, EngineJudge):
            from winnow.builders.judge import make_engine_judge

            judge = make_engine_judge(config, judges)
        else:
            model = make_model_scorer(config, device, ranks)
    longest, conversations = config.rollout.max_response_tokens, config.environment.name != "none"
    try:
        pipeline = RewardPipeline(config.reward, longest, model, judge, decode, conversations)
        return Rewards(config.reward, pipeline, sections, conversations)
    except BaseException:
        if judge is not None:  # nothing else would end its engines
            judge.close()
        raise


def scoring_sections(config: RewardConfig, training: bool = True) -> list[ModelSection]:
    """Return the sections of the reward model and the judge, where a recipe has them."""
    models = [each for each in (config.model, config.judge) if isinstance(each, ModelSection)]
    return [each for each in models if training or each.in_evaluation]


def make_pipeline_worker(rank: RankInfo, config: Config, tokenizer: str) -> PipelineWorker:
    """Make the worker of a scoring process (`reward.processes`).

    Args:
        rank: gives the device of the reward model.
        tokenizer: folder of the tokenizer that decodes answers.

    Raises:
        RewardError, ModelError: as for `make_rewards`.
    """
    from winnow.data.tokenizer import load_tokenizer, make_decoder
    from winnow.rewards.remote_pipeline import PipelineWorker

    index = rank.device_index
    if config.run.threads is not None and not isinstance(config.reward.model, NoRewardModel):
        import torch  # slow, and not needed by rules

        torch.set_num_threads(config.run.threads)
    field = "model.tokenizer" if config.model.tokenizer else "model.path"
    decode = make_decoder(load_tokenizer(tokenizer, config.model.trust_remote_code, field))
    local_config = config.model_copy(update={"reward": config_per_process(config.reward)})
    rewards = make_rewards(local_config, "cpu" if index is None else f"cuda:{index}", decode)
    assert isinstance(rewards.pipeline, RewardPipeline)
    return PipelineWorker(rewards.pipeline)


def make_model_scorer(
    config: Config, device: torch.device | str, ranks: WorkerGroup | None = None
) -> ModelScorer:
    """Load the reward model with its tokenizer and template.

    Args:
        ranks: as for `make_rewards`.

    Raises:
        ModelError: it is not a sequence classifier with one label, is damaged, or has no tokenizer
            or template that fits.
    """
    import torch

    from winnow.data.tokenizer import load_tokenizer
    from winnow.learning.strategy import Strategy
    from winnow.models.folders import check_vocabulary, torch_dtype
    from winnow.models.value import load_reward_model
    from winnow.ranks.remote import asking
    from winnow.ranks.workers import facts_of, scores_of
    from winnow.rewards.model_scorer import Forward, ModelScorer

    section, policy, deterministic = config.reward.model, config.model, config.run.deterministic
    assert isinstance(section, SequenceClassifier)
    microbatch_tokens = section.microbatch_tokens or config.trainer.token_budget
    field = "reward.model.tokenizer" if section.tokenizer else "reward.model.path"
    trust, dtype = policy.trust_remote_code, torch_dtype(section.dtype or policy.dtype)
    tokenizer = load_tokenizer(section.tokenizer or section.path, trust, field, ends_answers=False)
    forward: Forward
    if ranks is None:
        model = load_reward_model(section.path, dtype, torch.device(device), trust)
        facts, strategy = facts_of(section.path, model), Strategy(model)

        async def forward(sequences: Sequence[IntArray]) -> list[float]:
            return scores_of(strategy, sequences, microbatch_tokens)

    else:
        facts = ranks.call_blocking("facts")[0]
        forward = asking(ranks, 1 if deterministic else microbatch_tokens)
    remedy = "give the tokenizer that belongs to the model in reward.model.tokenizer"
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    where = f"reward.model.path {section.path}"
    check_vocabulary(where, vocabulary, facts.embedded_tokens, remedy)
    one_by_one = deterministic and ranks is None
    pad_id, positions, takes_time = facts.pad_token_id, facts.positions, ranks is not None
    return ModelScorer(section, forward, tokenizer, pad_id, positions, one_by_one, takes_time)
