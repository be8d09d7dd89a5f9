"""From a recipe to the objects of a run that imitates demonstrations (`winnow sft`)."""

from __future__ import annotations

from winnow.builders.run import RunContext, make_base, make_evaluator
from winnow.config.data import Demonstrations
from winnow.config.root import Config
from winnow.data.demonstrations import read_demonstrations
from winnow.data.loader import PromptLoader, evaluation_prompts
from winnow.ranks.models import LoadedPolicy
from winnow.run.sft import Imitation, Shown


def read_shown(config: Config, policy: LoadedPolicy) -> Shown:
    """Read a recipe's demonstrations.

    Raises:
        DataError, ModelError: as for `read_demonstrations`.
    """
    sft = config.sft
    assert isinstance(sft, Demonstrations)
    positions = getattr(policy.model.config, "max_position_embeddings", sft.max_tokens)
    limited = sft.model_copy(update={"max_tokens": min(sft.max_tokens, positions)})
    shown, held_out = (
        read_demonstrations(files, limited, config.data, policy.tokenizer, policy.stop_ids)
        for files in (sft.train_files, sft.eval_files)
    )
    return Shown(shown, held_out, sft.batch_size)


def build_imitation(context: RunContext, shown: Shown) -> Imitation:
    """Build everything that `imitate` sequences.

    Raises:
        WinnowError: held-out prompts do not fit what the recipe asks.
    """
    config, policy, folder = context.config, context.policy, context.folder
    engine, rewards = context.placed.engine, context.rewards
    held_out = evaluation_prompts(config.data, policy.tokenizer)
    evaluator = make_evaluator(config, policy, engine, folder.eval_file, rewards, held_out)
    loader = PromptLoader(shown.training.prompts, config.run.seed, config.data.shuffle)
    base = make_base(context, evaluator, loader, {})
    base.evaluate_before = config.evaluation.before
    base.notes = (shown.note(base.steps),)
    return Imitation(**vars(base), shown=shown, loader=loader)
