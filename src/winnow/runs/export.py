"""A run's model as a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from winnow.config.load import load_recipe
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import ConfigError, WinnowError
from winnow.models.causal_lm import save_model
from winnow.models.lora import adapter_base, merge
from winnow.observe.files import RunFolder, atomic_folder, require_trust
from winnow.observe.jsonl import read_metrics
from winnow.runs.checkpoint import CONFIG, find_checkpoint
from winnow.runs.loading import load_policy_model
from winnow.runs.push import HubTarget, model_card


def run_push(
    run: str,
    target: str,
    step: int | None,
    adapter: bool,
    overrides: Sequence[str],
    hub: HubTarget,
) -> str:
    """Export a checkpoint's model and upload it; returns the address of the commit.

    Raises:
        WinnowError: as for `run_export`, or the hub refuses.
    """
    folder = RunFolder.open(run)
    checkpoint = find_checkpoint(folder.path, step)
    path = run_export(run, target, step, adapter, overrides, hub.prepare)
    config = load_recipe(str(checkpoint.path / CONFIG), list(overrides))
    return hub.upload(path, model_card(config, checkpoint.step, read_metrics(folder.metrics)))


def run_export(
    run: str,
    target: str,
    step: int | None,
    adapter: bool = False,
    overrides: Sequence[str] = (),
    before: Callable[[], None] = lambda: None,
) -> Path:
    """Write a checkpoint's model to `target` as a Hugging Face folder; an adapter is merged.

    Args:
        adapter: write the adapter alone, as a PEFT folder.
        overrides: settings over the recipe's.
        before: called when all is checked and nothing is written.

    Raises:
        WinnowError: no such run or checkpoint, no adapter where one is asked for, or the target
            is not a new folder.
    """
    checkpoint = find_checkpoint(RunFolder.open(run).path, step)
    path = Path(target)
    if path.exists():
        raise ConfigError(f"{target} exists already; name a folder that does not")
    base = adapter_base(checkpoint.model)
    if adapter and base is None:
        raise ConfigError(f"{run} was trained without an adapter; leave --adapter out")
    before()
    try:
        with atomic_folder(path) as draft:
            if base is None or adapter:
                shutil.copytree(checkpoint.model, draft, dirs_exist_ok=True)
            else:
                config = load_recipe(str(checkpoint.path / CONFIG), list(overrides))
                require_trust(config, overrides, run, "--trust-remote-code")
                folder = str(checkpoint.model)
                model = load_policy_model(config.model, folder, torch.device("cpu"), seed=0)
                merge(model)
                tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
                save_model(model, tokenizer, draft)
    except OSError as error:
        raise WinnowError(f"cannot write {target}: {error}; choose another folder") from error
    return path
