"""Low-rank adapters through peft, trained beside frozen weights and saved as PEFT folders.

peft's layers take the place of linear ones inside the model itself, so the trainer, the embedded
engine and the reference policy run one module; with the adapter switched off it is the model that
training began with. The adapter of a half-precision model has fp32.

A PEFT folder holds the adapter alone and names its base; `PeftModel.from_pretrained` loads it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from winnow.config.model import LoraAdapter
from winnow.errors import ModelError
from winnow.models.fetch import cache_root, local_folder, make_once
from winnow.models.folders import (
    ADAPTER_CONFIG,
    Writer,
    explain_load_errors,
    has_adapter,
    quiet_transformers,
    tokenizer_files,
    write_files,
)
from winnow.models.vision import has_vision
from winnow.observe.files import atomic_folder, explain_disk_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_UNSUPPORTED = (
    *("use_dora", "use_qalora", "modules_to_save", "fan_in_fan_out", "lora_bias"),
    *("trainable_token_indices", "target_parameters", "layer_replication"),
    "alora_invocation_tokens",
)
"""Options of peft that change more than linear layers, or these in another way."""
_IN_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names by which peft adapts a mixture's router and stacked experts, which are no linear layers."""
_NAME = "default"
_PEFT_PREFIX = "base_model.model."


def add_lora(model: PreTrainedModel, adapter: LoraAdapter, seed: int) -> None:
    """Put a new adapter into the model, in place; nothing else of it stays trainable.

    The update starts at zero, so the model answers as before; A is drawn from `seed`.

    Raises:
        ModelError: peft is not installed, or a target is no linear layer, or is the head.
    """
    targets = adapter.target_modules
    name = cast(str, model.name_or_path)
    base, revision = name, ""
    if Path(name).exists():
        base = str(Path(name).resolve())
    elif "://" not in name:
        base, _, revision = name.partition("@")
    if not isinstance(targets, str):
        _check_targets(model, targets)
    config = _peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # A vision tower stays as it is.
        exclude_modules=r"(.*\.)?visual\..*" if has_vision(model.config) else None,
        use_rslora=adapter.rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=revision or None,
    )
    _inject(model, config, seed)


def load_lora(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapter of a PEFT folder into the model, in place.

    Raises:
        ModelError: peft is not installed, or the folder is damaged or of another model.
    """
    if not has_adapter(model):
        _check_kind(folder)
        config = _peft().LoraConfig.from_pretrained(str(folder))
        config.inference_mode = False
        _inject(model, config, seed=0)
    with explain_load_errors(f"{folder}: cannot load its adapter", "use another one"):
        saved = load_file(folder / ADAPTER_WEIGHTS)
    weights = dict(adapter_weights(model))
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if {name: tensor.shape for name, tensor in saved.items()} != shapes:
        different = {n for n in weights.keys() | saved.keys() if n not in weights or n not in saved}
        names = sorted(different) or [n for n in weights if saved[n].shape != weights[n].shape]
        raise ModelError(
            f"{folder}: the adapter does not match this model ({len(names)} weights differ, such "
            f"as {names[0]}); give the base model and the adapter that belong together"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved[name])


def adapter_base(folder: Path, instead: str | None = None) -> str | None:
    """Return the model that a PEFT folder's adapter belongs to; None where there is no adapter.

    Args:
        instead: another place of the same model, for when it is no longer where it was.

    Raises:
        ModelError: the folder does not say, or its base is gone.
    """
    if (config := _read_adapter_config(folder)) is None:
        return None
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        path = folder / ADAPTER_CONFIG
        raise ModelError(f"{path} has no base_model_name_or_path; set it to the base model")
    if Path(base).is_absolute() and not Path(base).exists():
        if instead is None:
            raise ModelError(f"{folder} is an adapter of {base}, which does not exist; restore it")
        return instead
    if revision and "://" not in base and not Path(base).is_dir():
        return f"{base}@{revision}"
    return cast(str, base)


def saved_adapter(folder: Path, configured: LoraAdapter) -> LoraAdapter:
    """Return an adapter with the shape that a PEFT folder has; as configured without one.

    Raises:
        ModelError: the folder is damaged.
    """
    if (config := _read_adapter_config(folder)) is None:
        return configured
    try:
        shape = {"rank": config["r"], "alpha": float(config["lora_alpha"])}
        shape["rslora"] = bool(config.get("use_rslora", False))
        if isinstance(config["target_modules"], list):
            shape["target_modules"] = tuple(sorted(config["target_modules"]))
    except (ValueError, KeyError, TypeError) as error:
        path = folder / ADAPTER_CONFIG
        raise ModelError(f"{path} is damaged: {error!r}; use another checkpoint") from error
    return configured.model_copy(update=shape)


def _read_adapter_config(folder: Path) -> dict[str, Any] | None:
    path = folder.expanduser() / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is damaged: {error}; use another checkpoint") from error


def merged_folder(
    folder: Path, dtype: torch.dtype, load_base: Callable[[str], PreTrainedModel]
) -> Path:
    """Return a model's folder in the cache that has a PEFT folder's adapter in its weights.

    It is made once, for all processes of the node; other weights of either make another one.

    Args:
        load_base: loads the model that the adapter names, in `dtype`.

    Raises:
        ModelError: adapter or base cannot be loaded, or the folder cannot be written.
    """
    base = adapter_base(folder)
    assert base is not None
    root = Path(local_folder(base))
    identity = [base, str(root), str(dtype)]
    identity += [
        f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in sorted(root.glob("*.*"))
    ]
    digest = hashlib.sha256("\0".join(identity).encode())
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with explain_load_errors(f"{folder}: cannot load its adapter", "use another one"):
            digest.update((folder / name).read_bytes())
    target = cache_root() / f"merged-{folder.name}-{digest.hexdigest()[:16]}"

    def merge_into_base() -> None:
        model = load_base(base)
        load_lora(model, folder)
        merge(model)
        with atomic_folder(target) as draft, quiet_transformers():
            model.save_pretrained(draft)
            if (processor := getattr(model, "image_processor", None)) is not None:
                processor.save_pretrained(draft)

    with explain_disk_errors(target):
        make_once(target, merge_into_base, target.is_dir)
    return target


def _check_kind(folder: Path) -> None:
    """Refuse adapters that do more than add B A to linear layers.

    Raises:
        ModelError: this one does.
    """
    config = _read_adapter_config(folder) or {}
    kind = config.get("peft_type")
    unsupported = [name for name in _UNSUPPORTED if config.get(name)]
    unsupported += ["bias"] if config.get("bias", "none") != "none" else []
    if kind != "LORA" or unsupported:
        what = ", ".join(unsupported) if kind == "LORA" else f"peft_type={kind}"
        raise ModelError(
            f"{folder}: the adapter has {what}, only LoRA of linear layers is supported; merge it "
            "with peft (merge_and_unload) and give that folder"
        )


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Let the model answer without its adapter within the block.

    Raises:
        ModelError: it has none.
    """
    if not has_adapter(model):
        raise ModelError("cannot disable the adapter: the model has none")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = [module for module, _ in _adapted_modules(model)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # peft makes all of an adapter trainable again, frozen parts of it too.
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def is_adapter_weight(name: str) -> bool:
    """Return whether a parameter of this name is the adapter's."""
    return ".lora_" in name


def name_without_adapter(name: str) -> str:
    """Return the name that a parameter of an adapted model has without the adapter."""
    return name.replace(".base_layer.", ".")


def adapter_dropouts(model: nn.Module) -> list[nn.Module]:
    """Return the adapter's dropout layers, which act when `training` is set on them."""
    dropouts = (layer.lora_dropout[_NAME] for layer, _ in _adapted_modules(model))
    return [dropout for dropout in dropouts if isinstance(dropout, nn.Dropout)]


def adapter_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's tensors by PEFT's names; they are live."""
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            yield _PEFT_PREFIX + name.replace(f".{_NAME}", ""), parameter.detach()


def merged_weights(tensors: dict[str, Tensor], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors under the names it has without its adapter, the update added.

    The sum is taken in fp32 (or fp64) and rounded to the weight's dtype; all others are live.
    """
    updated = {f"{name}.base_layer.weight": layer for layer, name in _adapted_modules(model)}
    for name, tensor in tensors.items():
        if is_adapter_weight(name):
            continue
        plain = name_without_adapter(name)
        layer = updated.get(name)
        yield plain, tensor.detach() if layer is None else _merged(layer, tensor.detach())


def merge(model: PreTrainedModel) -> None:
    """Add the update to the weights and take the adapter out, in place."""
    for layer, name in list(_adapted_modules(model)):
        base = layer.base_layer
        base.weight.data = _merged(layer, base.weight.detach())
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, base)
    del model.peft_config


def adapted_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that have the adapter."""
    return [name for _, name in _adapted_modules(model)]


def adapter_writer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Writer:
    """Make a writer of PEFT folders, as `model_writer`, for the tensors of `adapter_weights`.

    Args:
        tokenizer: to be saved with it, if any.
    """
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    config = copy.copy(cast(Any, model).peft_config[_NAME])
    if not isinstance(config.target_modules, str):
        # peft would write a set, whose order is another one in each process.
        config.target_modules = sorted(config.target_modules)

    def write(weights: dict[str, Tensor], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(folder))
        plain = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(plain, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_files(files, folder)

    return write


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "model/adapter=lora needs peft, which is not installed; pip install 'winnow-rl[peft]'"
        ) from error
    return peft


def _inject(model: PreTrainedModel, config: Any, seed: int) -> None:
    if any(p.ndim == 3 and ".experts." in name for name, p in model.named_parameters()):
        config.target_modules = _outside_experts(model, config.target_modules)
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _peft().inject_adapter_in_model(config, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        if is_adapter_weight(name):
            # As PeftModel does, so that what is saved here answers alike there.
            parameter.data = parameter.to(torch.promote_types(parameter.dtype, torch.float32)).data
    model.to(device).eval()


def _outside_experts(model: PreTrainedModel, targets: str | Collection[str]) -> set[str]:
    """Return the linear layers of a mixture that get an adapter.

    Raises:
        ModelError: peft would adapt its router or its stacked experts by these names, too.
    """
    if targets == "all-linear":
        return _linear_names(model) - _IN_EXPERTS
    names = {targets} if isinstance(targets, str) else {*targets}
    if isinstance(targets, str) or {name.rpartition(".")[2] for name in names} & _IN_EXPERTS:
        fitting = ", ".join(sorted(_linear_names(model) - _IN_EXPERTS))
        raise ModelError(
            f"model.adapter.target_modules: {', '.join(sorted(names))} of a mixture are experts, "
            f"which take no adapter; choose from {fitting}"
        )
    return names


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in targets:
        chosen = [m for n, m in linear.items() if n == target or n.endswith(f".{target}")]
        if not chosen or any(module is head for module in chosen):
            fault = "is the head, which gets none" if chosen else "is no linear layer of the model"
            raise ModelError(
                f"model.adapter.target_modules: {target} {fault}; choose from "
                f"{', '.join(sorted(_linear_names(model)))}"
            )


def _linear_names(model: PreTrainedModel) -> set[str]:
    """Return the ends of the names of all linear layers but the head."""
    head, linear = model.get_output_embeddings(), nn.Linear
    chosen = [n for n, m in model.named_modules() if isinstance(m, linear) and m is not head]
    return {name.rpartition(".")[2] for name in chosen}


def _adapted_modules(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield the layers that have the adapter, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield module, name


def _merged(layer: Any, weight: Tensor) -> Tensor:
    exact = torch.promote_types(weight.dtype, torch.float32)
    a, b = (part[_NAME].weight.detach().to(exact) for part in (layer.lora_A, layer.lora_B))
    update: Tensor = layer.scaling[_NAME] * (b @ a)
    return (weight.to(exact) + update).to(weight.dtype)
