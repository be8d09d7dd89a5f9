"""From a recipe to its reward pipeline: rules, a reward model, a judge, all in one process.

That is the run's process, or each of those apart (`reward.processes`). Torch is imported where
there is a reward model only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow.config.judge import EngineJudge, NoRewardModel, OpenAiJudge, SequenceClassifier
from winnow.config.model import ModelConfig
from winnow.config.reward import RewardConfig, share_of
from winnow.config.root import Config
from winnow.rewards.pipeline import Decode, RewardPipeline, Section
from winnow.rewards.rewards import Rewards
from winnow.types import IntArray

if TYPE_CHECKING:
    import torch

    from winnow.builders.judge import StartEngines
    from winnow.rewards.model import ModelScorer
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
    """Make the scorers, with workers where they run apart, and the models that judge; close it.

    Args:
        decode: reads the tokens of answers that come without a text.
        training: else a model that scores only in training is left out.
        ranks: hold the reward model (`RewardModelWorker`); None loads it here.
        judges: None starts a judge's engines for these rewards alone.

    Raises:
        RewardError: a scorer's name, the user's file, or the judge's key or cache is wrong.
        ModelError: the reward model is not usable, or a judge's own.
    """
    pipeline = make_pipeline(config, device, decode, training, ranks, judges)
    return Rewards(config.reward, pipeline, scoring_models(config.reward, training))


def make_pipeline(
    config: Config,
    device: torch.device | str,
    decode: Decode | None,
    training: bool = True,
    ranks: WorkerGroup | None = None,
    judges: StartEngines | None = None,
) -> RewardPipeline:
    """Make a reward pipeline; arguments and errors are those of `make_rewards`."""
    model, judge = None, None
    for section in scoring_models(config.reward, training):
        if isinstance(section, OpenAiJudge):
            from winnow.rewards.judge import Judge

            judge = Judge(section)
        elif isinstance(section, EngineJudge):
            from winnow.builders.judge import make_judge

            judge = make_judge(config, judges)
        else:
            assert isinstance(section, SequenceClassifier)
            budget = section.microbatch_tokens or config.trainer.microbatch_tokens
            deterministic = config.run.deterministic
            model = make_model_scorer(section, config.model, device, budget, deterministic, ranks)
    longest = config.rollout.max_response_tokens
    try:
        return RewardPipeline(config.reward, longest, model, judge, decode)
    except BaseException:
        if judge is not None:  # whose engines nobody else ends
            judge.close()
        raise


def scoring_models(config: RewardConfig, training: bool = True) -> list[Section]:
    """List the models that are asked, the reward model first."""
    models = [each for each in (config.model, config.judge) if isinstance(each, Section)]
    return [each for each in models if training or each.in_evaluation]


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
    decode = decoder(load_tokenizer(tokenizer, config.model.trust_remote_code, field))
    local_config = config.model_copy(update={"reward": share_of(config.reward)})
    return PipelineWorker(
        make_pipeline(local_config, "cpu" if index is None else f"cuda:{index}", decode)
    )


def make_model_scorer(
    config: SequenceClassifier,
    policy: ModelConfig,
    device: torch.device | str,
    microbatch_tokens: int,
    deterministic: bool,
    ranks: WorkerGroup | None = None,
) -> ModelScorer:
    """Load the reward model and all it takes to ask it.

    Args:
        policy: gives what `config` leaves open.
        microbatch_tokens: packed tokens run at once.
        deterministic: run each answer alone.
        ranks: as for `make_rewards`.

    Raises:
        ModelError: it is no sequence classifier with one label, is damaged, has no tokenizer or
            template, or does not fit them.
    """
    import torch

    from winnow.data.tokenizer import load_tokenizer
    from winnow.learning.strategy import Strategy
    from winnow.models.folders import check_vocabulary, torch_dtype
    from winnow.models.value import load_reward_model
    from winnow.ranks.remote import asking
    from winnow.ranks.workers import facts_of, scores_of
    from winnow.rewards.model import Forward, ModelScorer

    field = "reward.model.tokenizer" if config.tokenizer else "reward.model.path"
    trust, dtype = policy.trust_remote_code, torch_dtype(config.dtype or policy.dtype)
    tokenizer = load_tokenizer(config.tokenizer or config.path, trust, field, ends_answers=False)
    forward: Forward
    if ranks is None:
        model = load_reward_model(config.path, dtype, torch.device(device), trust)
        facts, strategy = facts_of(config.path, model), Strategy(model)

        async def forward(sequences: Sequence[IntArray]) -> list[float]:
            return scores_of(strategy, sequences, microbatch_tokens)

    else:
        facts = ranks.ask("facts")[0]
        forward = asking(ranks, 1 if deterministic else microbatch_tokens)
    remedy = "give the tokenizer that belongs to the model in reward.model.tokenizer"
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    where = f"reward.model.path {config.path}"
    check_vocabulary(where, vocabulary, facts.embedded_tokens, remedy)
    is_here, ids, positions = ranks is None, facts.pad_token_id, facts.positions
    alone = deterministic and is_here
    return ModelScorer(config, forward, tokenizer, ids, positions, alone, not is_here)
