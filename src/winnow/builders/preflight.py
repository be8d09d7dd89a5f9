"""Checks of a recipe against this machine before anything is made, and words on what is started."""

from __future__ import annotations

import re
from importlib.util import find_spec

import torch

from winnow.builders.engines import check_engine
from winnow.checkpoints.opening import user_files
from winnow.config.data import Demonstrations
from winnow.config.model import LoraAdapter
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Megatron, RayCluster
from winnow.data.sources import check_files
from winnow.errors import ConfigError, RewardError
from winnow.models.fetch import check_model_path
from winnow.observe.profile import check_profile
from winnow.user_code import check_user_file

_REWARD = "reward.function.path"


def check_start(config: Config) -> None:
    """Refuse what cannot start: packages that are absent, Python files without what is named.

    Files are read, not run.

    Raises:
        WinnowError: names field, value and remedy.
    """
    check_engine(config)
    is_local = not isinstance(config.cluster, RayCluster)
    has_gpu = not is_local or (config.run.device != "cpu" and torch.cuda.is_available())
    check_profile(config.trainer.profile, has_gpu)
    if config.observe.trackers:
        from winnow.observe.trackers import check_trackers

        check_trackers(config)
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
    for key, value in () if isinstance(config.cluster, RayCluster) else user_files(config):
        if not re.fullmatch(r".+\.py(:\w+)?", value):
            continue
        place, _, name = value.rpartition(":") if value[-3:] != ".py" else (value, "", None)
        name = config.reward.function.name if key == _REWARD else name
        error = RewardError if key.startswith("reward.") else ConfigError
        check_user_file(place, f"{key} {value}", error, name)


def check_places(config: Config, has_checkpoint: bool) -> None:
    """Refuse data files and a model that are not here, before a run says where it goes.

    Raises:
        WinnowError: names the first.
    """
    data = config.sft if isinstance(config.sft, Demonstrations) else config.data
    check_files([*data.train_files, *data.eval_files, *config.data.eval_files])
    if config.model.path is not None and not has_checkpoint:
        check_model_path(config.model.path, "model.path")


def starting(config: Config, roles: Roles) -> list[str]:
    """Say which processes are about to start, if any, and where checkpoints go besides."""
    processes = ", ".join(role.count_text for role in roles)
    lines = (
        [f"Starting processes, {processes}: half a minute, longer for large models"]
        if processes
        else []
    )
    if (url := config.trainer.checkpoint_url) is not None:
        lines.append(f"Each checkpoint is copied to {url} (trainer.checkpoint_url)")
    return lines
