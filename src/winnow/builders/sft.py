"""From a recipe to the objects of a run that imitates demonstrations (`winnow sft`)."""

from __future__ import annotations

from winnow.builders.run import RunContext, make_base_run, make_evaluator
from winnow.config.data import DataConfig, Demonstrations
from winnow.data.demonstrations import read_demonstrations
from winnow.data.loader import PromptLoader, evaluation_prompts
from winnow.ranks.models import LoadedPolicy
from winnow.run.sft import SftData, SftRun


def read_sft_data(sft: Demonstrations, data: DataConfig, policy: LoadedPolicy) -> SftData:
    """Read a recipe's demonstrations.

    Raises:
        DataError, ModelError: as for `read_demonstrations`.
    """
    shape = policy.model.config.get_text_config()
    positions = getattr(shape, "max_position_embeddings", sft.max_tokens)
    limited = sft.model_copy(update={"max_tokens": min(sft.max_tokens, positions)})
    training, held_out = (
        read_demonstrations(files, limited, data, policy.tokenizer, policy.stop_ids)
        for files in (sft.train_files, sft.eval_files)
    )
    return SftData(training, held_out, sft.batch_size)


def build_sft(context: RunContext, data: SftData) -> SftRun:
    """Build everything that `train_sft` sequences.

    Raises:
        WinnowError: held-out prompts do not fit what the recipe asks.
    """
    config, policy, folder = context.config, context.policy, context.folder
    engine, rewards = context.placed.engine, context.rewards
    held_out = evaluation_prompts(config.data, policy.tokenizer, vision=policy.vision)
    evaluator = make_evaluator(config, policy, engine, folder.eval_file, rewards, held_out)
    loader = PromptLoader(data.training.prompts, config.run.seed, config.data.shuffle)
    base = make_base_run(context, evaluator, loader, {})
    base.evaluate_before = config.evaluation.before
    base.notes = (data.note(base.steps),)
    return SftRun(**vars(base), data=data, loader=loader)
