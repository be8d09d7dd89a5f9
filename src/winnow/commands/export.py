"""A run's model as a separate folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from winnow.checkpoints.checkpoint import CONFIG, find_checkpoint
from winnow.checkpoints.strangers import require_trust
from winnow.commands.push import HubTarget, model_card
from winnow.config.load import load_recipe
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import ConfigError, WinnowError
from winnow.models.causal_lm import save_model
from winnow.models.lora import adapter_base, merge
from winnow.observe.files import RunFolder, atomic_folder
from winnow.observe.jsonl import read_metrics
from winnow.ranks.models import load_policy_model


def run_push(
    run: str, target: str, step: int | None, adapter: bool, trusts: bool, hub: HubTarget
) -> str:
    """Export a checkpoint's model and upload it; returns the address of the commit.

    Raises:
        WinnowError: as for `run_export`, or the hub refuses.
    """
    folder = RunFolder.open(run)
    checkpoint = find_checkpoint(folder.path, step)
    path = run_export(run, target, step, adapter, trusts, hub.prepare)
    config = load_recipe(str(checkpoint.path / CONFIG))
    return hub.upload(path, model_card(config, checkpoint.step, read_metrics(folder.metrics)))


def run_export(
    run: str,
    target: str,
    step: int | None,
    adapter: bool = False,
    trusts: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint's model to `target` as a Hugging Face folder; an adapter is merged.

    Args:
        adapter: write the adapter alone, as a PEFT folder.
        trusts: the user trusts the run's author.
        before: called when all is checked and nothing is written.

    Raises:
        WinnowError: no such run or checkpoint, no adapter where one is asked for, or the target
            is not a new folder.
    """
    folder = RunFolder.open(run).path
    checkpoint, path = find_checkpoint(folder, step), Path(target)
    if path.exists():
        raise ConfigError(f"{target} already exists; choose another folder")
    base = adapter_base(checkpoint.model)
    if adapter and base is None:
        raise ConfigError(f"{run} was trained without an adapter; drop --adapter")
    merges = base is not None and not adapter
    config = load_recipe(str(checkpoint.path / CONFIG)) if merges else None
    require_trust(folder, config, (), trusts, ("model.trust_remote_code",))
    before()
    try:
        with atomic_folder(path) as draft:
            if config is None:
                shutil.copytree(checkpoint.model, draft, dirs_exist_ok=True)
            else:
                whole = str(checkpoint.model)
                model = load_policy_model(config.model, whole, torch.device("cpu"), seed=0)
                merge(model)
                tokenizer = load_tokenizer(whole, config.model.trust_remote_code)
                save_model(model, tokenizer, draft)
    except OSError as error:
        raise WinnowError(f"cannot write {target}: {error}; choose another folder") from error
    return path
