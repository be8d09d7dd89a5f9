"""A run's model as a separate folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from winnow.checkpoints.checkpoint import CONFIG, find_checkpoint
from winnow.checkpoints.strangers import require_trust
from winnow.commands.push import HubTarget, model_card
from winnow.config.load import load_recipe
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import ConfigError, WinnowError
from winnow.models.causal_lm import save_model
from winnow.models.gguf import DEQUANTISED
from winnow.models.lora import adapter_base, merge
from winnow.observe.files import RunFolder, atomic_folder
from winnow.observe.jsonl import read_metrics
from winnow.ranks.models import load_policy_model


def run_export(
    run: str,
    target: str,
    step: int | None,
    adapter: bool = False,
    trusts: bool = False,
    hub: HubTarget | None = None,
) -> str:
    """Write a checkpoint's model to `target` as a Hugging Face folder; an adapter is merged.

    Args:
        adapter: write the adapter alone, as a PEFT folder.
        trusts: the user trusts the run's author.
        hub: repository to upload the folder to, with a model card.

    Returns:
        The folder, or the address of the commit on the hub.

    Raises:
        WinnowError: no such run or checkpoint, no adapter where one is requested, the target is
            not a new folder, or the hub refuses.
    """
    folder = RunFolder.open(run)
    checkpoint, path = find_checkpoint(folder.path, step), Path(target)
    if path.exists():
        raise ConfigError(f"{target} already exists; choose another folder")
    base = adapter_base(checkpoint.model)
    if adapter and base is None:
        raise ConfigError(f"{run} was trained without an adapter; drop --adapter")
    recipe = str(checkpoint.path / CONFIG)
    config = load_recipe(recipe) if base is not None and not adapter else None
    require_trust(folder.path, config, (), trusts, ("model.trust_remote_code",))
    if hub is not None:
        hub.prepare()
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
    if hub is None:
        return str(path)
    shape = path / "config.json"  # which an adapter's folder lacks
    quantized = json.loads(shape.read_bytes()).get(DEQUANTISED) if shape.is_file() else None
    records, step = read_metrics(folder.metrics), checkpoint.step
    card = model_card(load_recipe(recipe), step, records, folder.evaluations, quantized)
    return hub.upload(path, card)
