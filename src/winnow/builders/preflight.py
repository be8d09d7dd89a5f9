"""Checks of a recipe against this machine before anything is built, and notes on the start."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

from winnow.builders.engines import check_engine_installed
from winnow.checkpoints.opening import learns_on_cpu, user_code_settings
from winnow.config.data import DataConfig, Demonstrations, Sft
from winnow.config.model import LoraAdapter
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Megatron, RayCluster
from winnow.data.sources import check_files_exist
from winnow.errors import ConfigError, RewardError
from winnow.models.fetch import check_model_path
from winnow.observe.profile import check_profile
from winnow.user_code import check_user_file

NO_BFLOAT16 = (
    "has no instructions for bfloat16, which is several times slower than float32 there (28 "
    "against 165 tokens a CPU second for 135 M weights)"
)
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
"""In /proc/cpuinfo; the last is ARM's."""


def check_requirements(config: Config) -> None:
    """Refuse a recipe whose packages are not installed, or whose Python files lack a name it uses.

    Files are parsed, not executed.

    Raises:
        WinnowError: names field, value and remedy.
    """
    check_engine_installed(config.cluster, config.rollout.engine, config.reward.judge)
    is_local = not isinstance(config.cluster, RayCluster)
    has_gpu = not learns_on_cpu(config)
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
        function = config.reward.functions().get(key.removesuffix(".path"))
        name = name if function is None else function.name
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


def bfloat16_notes(config: Config, cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """Warn of bfloat16 models on a CPU that has no instructions for them.

    Args:
        cpuinfo: Linux's list of the CPU's instructions; without it nothing is known.
    """
    if not learns_on_cpu(config) or config.model.dtype != "bfloat16" or has_bfloat16(cpuinfo):
        return []
    return [f"Warning: model.dtype=bfloat16, and this CPU {NO_BFLOAT16}; set model.dtype=float32"]


def has_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Return whether the CPU has instructions for bfloat16, or cannot be asked."""
    try:
        words = set(Path(cpuinfo).read_text(encoding="utf-8").split())
    except OSError:
        return True
    return not words.isdisjoint(_BFLOAT16_FLAGS)


def startup_notes(roles: Roles, checkpoint_url: str | None) -> list[str]:
    """Return lines on the processes that are about to start, and on copies of checkpoints."""
    lines = []
    if processes := ", ".join(role.count_text for role in roles):
        lines.append(f"Starting processes, {processes}: half a minute, longer for large models")
    if checkpoint_url is not None:
        lines.append(f"Each checkpoint is copied to {checkpoint_url} (trainer.checkpoint_url)")
    return lines
