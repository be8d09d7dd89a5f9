"""Checks of a recipe against this machine before anything is built, and notes on the start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from winnow.builders.engines import check_engine_installed
from winnow.checkpoints.opening import user_code_settings
from winnow.config.data import DataConfig, Demonstrations, Sft
from winnow.config.model import LoraAdapter
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron, RayCluster
from winnow.data.sources import check_files_exist
from winnow.errors import ConfigError, RewardError
from winnow.learning.balance import Assignment, assign
from winnow.learning.batch import split_updates
from winnow.models.fetch import check_model_path
from winnow.observe.profile import check_profile
from winnow.types import IntArray
from winnow.user_code import check_user_file

LEAST_LOCKSTEP = 0.9
"""Share of the ranks' time below which a recipe is warned of waiting ranks."""
_REWARD = "reward.function.path"


def check_requirements(config: Config) -> None:
    """Refuse a recipe whose packages are not installed, or whose Python files lack a name it uses.

    Files are parsed, not executed.

    Raises:
        WinnowError: names field, value and remedy.
    """
    check_engine_installed(config.cluster, config.rollout.engine, config.reward.judge)
    is_local = not isinstance(config.cluster, RayCluster)
    has_gpu = not is_local or (config.run.device != "cpu" and torch.cuda.is_available())
    check_profile(config.trainer.profile, has_gpu)
    if config.observe.trackers:
        from winnow.observe.trackers import check_tracker_packages

        check_tracker_packages(config)
    for key, package, is_used in (
        ("cluster=ray", "ray", isinstance(config.cluster, RayCluster)),
        ("model/adapter=lora", "peft", isinstance(config.model.adapter, LoraAdapter)),
    ):
        if is_used and find_spec(package) is None:
            install = f"pip install 'winnow-rl[{package}]'"
            raise ConfigError(f"{key} needs {package}, which is not installed; {install}")
    if is_local and isinstance(config.trainer.strategy, Megatron):
        from winnow.models.megatron.mcore_import import check_installed, import_megatron

        check_installed()
        if not has_gpu:
            import_megatron(torch.device("cpu"))
    for key, value in () if isinstance(config.cluster, RayCluster) else user_code_settings(config):
        if not re.fullmatch(r".+\.py(:\w+)?", value):
            continue
        place, _, name = value.rpartition(":") if value[-3:] != ".py" else (value, "", None)
        name = config.reward.function.name if key == _REWARD else name
        error = RewardError if key.startswith("reward.") else ConfigError
        check_user_file(place, f"{key} {value}", error, name)


def check_inputs_exist(data: DataConfig, sft: Sft, model: str | None) -> None:
    """Refuse data files and a model that do not exist, before a run prints its folder.

    Args:
        model: `model.path`; None where a checkpoint has the model.

    Raises:
        WinnowError: names the first.
    """
    training = sft if isinstance(sft, Demonstrations) else data
    check_files_exist([*training.train_files, *training.eval_files, *data.eval_files])
    if model is not None:
        check_model_path(model, "model.path")


def startup_notes(roles: Roles, checkpoint_url: str | None) -> list[str]:
    """Return lines on the processes that are about to start, and on copies of checkpoints."""
    lines = []
    if processes := ", ".join(role.count_text for role in roles):
        lines.append(f"Starting processes, {processes}: half a minute, longer for large models")
    if checkpoint_url is not None:
        lines.append(f"Each checkpoint is copied to {checkpoint_url} (trainer.checkpoint_url)")
    return lines


def draw_lengths(config: Config, mean: float | None = None) -> tuple[IntArray, IntArray]:
    """Draw lengths of prompts and answers [B], log-normal with a long tail, clipped to the limits.

    Args:
        mean: mean tokens of an answer before clipping; None: a quarter of the limit.
    """
    limit = config.rollout.max_response_tokens
    count = config.sampling.groups_per_step * config.rollout.n
    mu, deviation = np.log(mean or limit / 4), 0.8
    answers = np.random.default_rng(0).lognormal(mu - deviation**2 / 2, deviation, count)
    prompts = np.full(count, max(config.data.max_prompt_tokens // 8, 1))
    return prompts, np.clip(answers, 1, limit).astype(np.int64)


def deal_updates(
    config: Config, lengths_B: IntArray, strategy: Any, max_tokens: int, width: int
) -> list[Assignment]:
    """Deal the samples of each update of a step to the ranks of a strategy.

    Args:
        max_tokens: token budget of a micro-batch.
        width: hidden size of the policy.
    """
    shares = strategy.ranks // getattr(strategy, "sequence", 1)
    shares = strategy.data if isinstance(strategy, Megatron) else shares
    groups, seed = config.sampling.groups_per_step, (config.run.seed, 1, 0)
    updates = split_updates(groups, config.trainer.groups_per_update(groups), seed)
    lengths = lengths_B.reshape(groups, config.rollout.n)
    sorted_lengths = (np.sort(lengths[update].ravel())[::-1] for update in updates)
    return [assign(each, max_tokens, shares, width) for each in sorted_lengths]


def lockstep(deals: list[Assignment]) -> float:
    """Return the share of the ranks' time in which they do not wait for each other."""
    return sum(int(each.work.sum()) for each in deals) / sum(each.capacity for each in deals)


def lockstep_notes(config: Config, shape: Any, lengths_B: IntArray | None = None) -> Iterator[str]:
    """Yield a warning and a setting that helps if ranks would wait for each other too long.

    Args:
        shape: Hugging Face configuration of the policy.
        lengths_B: lengths of a step's samples; None: drawn ones.
    """
    strategy, budget = config.trainer.strategy, config.trainer.microbatch_tokens
    if not isinstance(strategy, Fsdp2 | Megatron):
        return
    if lengths_B is None:
        prompts_B, answers_B = draw_lengths(config)
        lengths_B = prompts_B + answers_B
    share = lockstep(deal_updates(config, lengths_B, strategy, budget, shape.hidden_size))
    if share >= LEAST_LOCKSTEP:
        return
    remedy = "raise trainer.mini_batch_groups, or use fewer ranks"
    for n in (2, 4, 8):
        known = strategy.sequence if isinstance(strategy, Fsdp2) else n
        if n <= known or strategy.ranks % n or shape.num_attention_heads % n:
            continue
        split = strategy.model_copy(update={"sequence": n})
        better = lockstep(deal_updates(config, lengths_B, split, budget, shape.hidden_size))
        if better >= LEAST_LOCKSTEP:
            remedy = f"set trainer.strategy.sequence={n} ({better:.2f})"
            break
    answers = config.trainer.groups_per_update(config.sampling.groups_per_step) * config.rollout.n
    yield (
        f"Warning: trainer.strategy.ranks={strategy.ranks} wait for each other: {answers:,} "
        f"answers an update keep them busy {share:.2f} of the time (ranks/lockstep); {remedy}"
    )
