"""Models without their weights, and the weights slice by slice: for those that no rank can hold.

A hollow model has each weight's shape and the memory of one number. Adapters are put in and weights
frozen as in a real one; `FSDP2Strategy` then shards it, and each rank reads its own rows from the
folder's safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.causal_lm import (
    Source,
    check_head,
    check_weights,
    checked_folder,
    quiet_transformers,
    read_config,
    replace_attention,
)
from winnow.models.parameters import replace_parameters
from winnow.models.value import new_head, scalar_head, with_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class SavedWeights:
    """The tensors of a Hugging Face folder, by name, read in slices.

    Args:
        where: a folder with safetensors.
        prefix: that names may lack in the folder, such as `model.` where a backbone was saved.

    Raises:
        ModelError: no such folder, or its files cannot be read.
    """

    def __init__(self, where: Source, prefix: str) -> None:
        self._where, self._prefix = where, prefix
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._own: dict[str, nn.Parameter] = {}
        self._zero: set[str] = set()
        for path in _files(where):
            try:
                opened: Any = safe_open(path, framework="pt")
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    self._files[name] = opened
                    self._shapes[name] = torch.Size(opened.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise ModelError(
                    f"{where}: cannot read {path.name}: {error}; "
                    "give a complete Hugging Face folder"
                ) from error

    def belong_to(self, model: nn.Module, new: Callable[[set[str]], set[str]]) -> None:
        """Take these for the weights of a model, all of which must be here.

        Args:
            new: of the names that are missing those that start at zero instead.

        Raises:
            ModelError: weights are missing, or of another shape.
        """
        own = dict(model.named_parameters())
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers()}
        missing = {name for name in own if self._saved(name) is None}
        self._zero = new(missing)
        found = {name: self._saved(name) for name in own}
        misshapen = [n for n, at in found.items() if at and self._shapes[at] != own[n].shape]
        unused = set(self._files) - {at for at in found.values() if at} - known
        loading = {
            "mismatched_keys": misshapen,
            "missing_keys": missing - self._zero,
            "unexpected_keys": {name for name in unused if not name.startswith("lm_head.")},
        }
        check_weights(self._where, loading)
        # On no device, for their shapes and types.
        self._own = own

    def __contains__(self, name: str) -> bool:
        """Whether the model's parameter of this name is read from here."""
        return name in self._own

    def rows(self, name: str, rows: slice) -> Tensor:
        """Rows of a weight, rounded to the dtype the model was asked for in; on the CPU.

        Raises:
            ModelError: the file cannot be read.
        """
        own, saved = self._own[name], self._saved(name)
        if saved is None or rows.stop <= rows.start:
            assert saved is not None or name in self._zero
            return torch.zeros(rows.stop - rows.start, *own.shape[1:], dtype=own.dtype)
        try:
            part = self._files[saved].get_slice(saved)[rows.start : rows.stop]
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{self._where}: cannot read {saved}: {error}; give a complete Hugging Face folder"
            ) from error
        return cast(Tensor, part).to(own.dtype)

    def _saved(self, name: str) -> str | None:
        """The name in the folder."""
        short = name.removeprefix(self._prefix)
        return next((each for each in (name, short) if each in self._files), None)


def hollow_causal_lm(
    path: str, dtype: torch.dtype, trust_remote_code: bool = False, field: str = "model.path"
) -> tuple[PreTrainedModel, SavedWeights]:
    """As `winnow.models.causal_lm.load_causal_lm`, without the weights, and where they are.

    Raises:
        ModelError: as there; or the folder is not on this machine or has no safetensors.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    where = checked_folder(path, field)
    config = read_config(where, trust_remote_code)

    def build() -> Any:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="eager"
        )

    model = _built(where, build)
    check_head(where, model)
    if (Path(where.path) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(where.path)
    return _with_weights(model, where, lambda missing: set())


def hollow_value_model(
    path: str, dtype: torch.dtype, trust_remote_code: bool = False, field: str = "critic.path"
) -> tuple[PreTrainedModel, SavedWeights]:
    """As `winnow.models.value.load_value_model`, without the weights, and where they are.

    Raises:
        ModelError: as there; or the folder is not on this machine or has no safetensors.
    """
    from transformers.modeling_layers import GenericForTokenClassification

    where = checked_folder(path, field)
    model = _with_number(where, GenericForTokenClassification, dtype, trust_remote_code)
    return _with_weights(model, where, lambda missing: new_head(model.config, missing))


def hollow_reward_model(
    path: str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    field: str = "reward.model.path",
) -> tuple[PreTrainedModel, SavedWeights]:
    """As `winnow.models.value.load_reward_model`, without the weights, and where they are.

    Raises:
        ModelError: as there; or the folder is not on this machine or has no safetensors.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    where = checked_folder(path, field)
    model = _with_number(where, GenericForSequenceClassification, dtype, trust_remote_code)
    model, weights = _with_weights(model, where, lambda missing: set())
    return cast("PreTrainedModel", model.requires_grad_(False)), weights


def _with_number(
    where: Source, generic: type, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    made, config = with_head(where, generic, trust_remote_code)

    def build() -> Any:
        return cast(Any, made)._from_config(config, dtype=dtype, attn_implementation="eager")

    model = _built(where, build)
    scalar_head(model).to(torch.promote_types(dtype, torch.float32))
    return model


def _built(where: Source, build: Callable[[], Any]) -> PreTrainedModel:
    """The model on no device, but with its buffers, which no folder has."""
    try:
        with quiet_transformers(), torch.device("meta"):
            model = build()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{where}: cannot build its model: {str(error).splitlines()[0]}; "
            "use a model of another architecture"
        ) from error
    for name, module in list(model.named_modules()):
        if "Rotary" in type(module).__name__ and hasattr(module, "config"):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, type(module)(module.config))
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ModelError(
            f"{where}: its buffer {lost[0]} cannot be made without loading the whole model; "
            "use a model of another architecture"
        )
    return cast("PreTrainedModel", model)


def _with_weights(
    model: PreTrainedModel, where: Source, new: Callable[[set[str]], set[str]]
) -> tuple[PreTrainedModel, SavedWeights]:
    replace_attention(model, where)
    weights = SavedWeights(where, f"{model.base_model_prefix}.")
    weights.belong_to(model, new)

    def hollow(_: str, parameter: nn.Parameter) -> nn.Parameter:
        # As large as a weight is, for the probes of fused layers to answer.
        value = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        number = torch.full((), value, dtype=parameter.dtype)
        return nn.Parameter(number.expand(parameter.shape))

    replace_parameters(model, hollow)
    return model.eval(), weights


def _files(where: Source) -> list[Path]:
    folder = Path(where.path)
    if not folder.is_dir():
        raise ModelError(
            f"{where} is no folder of this machine, as loading in shards needs it; "
            "download the model, and give its folder"
        )
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _SINGLE).is_file():
            raise ModelError(
                f"{where}: the folder has no {_SINGLE} and no {_INDEX}; "
                "save the model as safetensors"
            )
        return [folder / _SINGLE]
    try:
        content: Mapping[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{where}: {_INDEX} is damaged ({error}); give a complete Hugging Face folder"
        ) from error
    return [folder / name for name in names]
