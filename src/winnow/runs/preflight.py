"""Checks of a recipe against this machine before anything is made, and words on what is started."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from winnow.config.model import LoraAdapter
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.trainer import Megatron, RayCluster
from winnow.errors import ConfigError, RewardError
from winnow.observe.profile import check_profile
from winnow.runs.resume import user_files
from winnow.runs.topology import check_engine
from winnow.user_code import check_user_file

_REWARD = "reward.function.path"


def check_start(config: Config) -> None:
    """Refuse what cannot start: packages that are absent, Python files without what is named.

    Files are read, not run.

    Raises:
        WinnowError: names field, value and remedy.
    """
    check_engine(config)
    is_here = not isinstance(config.cluster, RayCluster)
    has_gpu = not is_here or (config.run.device != "cpu" and torch.cuda.is_available())
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
    if is_here and isinstance(config.trainer.strategy, Megatron):
        from winnow.models.mcore_import import check_installed, import_megatron

        check_installed()
        if not has_gpu:
            import_megatron(torch.device("cpu"))
    for key, value in user_files(config.model_dump(), ""):
        if not key.endswith(".path") or isinstance(config.cluster, RayCluster):
            continue  # options of the user's own; files of other nodes
        place, _, name = value.rpartition(":") if value[-3:] != ".py" else (value, "", None)
        name = config.reward.function.name if key == _REWARD else name
        error = RewardError if key.startswith("reward.") else ConfigError
        check_user_file(place, f"{key} {value}", error, name)


def starting(config: Config) -> list[str]:
    """Say which processes are about to start; nothing where all is done in this one."""
    what = [f"{number} for {role}" for role, number in workers_of(config).items() if number]
    words = ", ".join(what).replace("_", " ")
    return [f"Starting processes, {words}: half a minute, longer for large models"] if what else []
