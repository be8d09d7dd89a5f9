"""Models without their weights, and the weights slice by slice: for models that no rank can hold.

A hollow model has each weight's shape and the memory of one number. Adapters are put in and weights
frozen as in a real one; `FSDP2Strategy` then shards it, and each rank reads its own rows from the
folder's safetensors. The loaders of `winnow.models` make one when called with `hollow`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from winnow.errors import ModelError
from winnow.models.folders import LOADING, Loaded, ModelRef, explain_load_errors, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Hollow = bool | Literal["shapes"]
"""True loads a model without its weights; "shapes" does so from a folder that has none, for a
plan."""


def load_hollow(
    build: Callable[[], Any],
    where: ModelRef,
    config: Any,
    dtype: torch.dtype,
    hollow: Hollow = True,
) -> Loaded:
    """Make a folder's model without its weights, but with its buffers.

    Args:
        build: makes the model on the default device.
        hollow: "shapes" takes the folder's config.json alone.

    Raises:
        ModelError: the folder cannot be read, or its model cannot be built.
    """
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    remedy = "use a model of another architecture"
    with explain_load_errors(f"{where}: cannot build its model", remedy), quiet_transformers():
        with torch.device("meta"):
            blank = build()
        weights = (ShapeOnlyWeights if hollow == "shapes" else SavedWeights)(where, blank, dtype)
        options = {"config": config, "state_dict": weights.stand_ins, "dtype": dtype}
        model, _ = type(blank).from_pretrained(None, **LOADING, **options)
    model.name_or_path = model.config.name_or_path = where.path
    if (Path(where.path) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(where.path)
    model.saved_weights = weights
    model._weight_conversions = None  # of stand-ins, which had the names of the model
    return model, weights.misfits


class SavedWeights:
    """The tensors of a Hugging Face folder, matched to a model's parameters and read in slices.

    Args:
        where: a folder with safetensors.
        blank: the folder's model on no device.
        dtype: of the stand-ins.

    Raises:
        ModelError: no such folder, or its files cannot be read.
    """

    stand_ins: dict[str, Tensor]
    """A tensor of each parameter's shape, in the memory of one number; and the buffers that the
    folder has."""
    misfits: dict[str, Collection[Any]]
    """Names that do not fit, in the lists in which transformers reports them."""

    def __init__(self, where: ModelRef, blank: PreTrainedModel, dtype: torch.dtype) -> None:
        self._where = where
        self._weight_files: dict[str, Any] = {}
        for path in _weight_files(where):
            with explain_load_errors(f"{where}: cannot read {path.name}"):
                opened: Any = safe_open(path, framework="pt")
                self._weight_files |= dict.fromkeys(opened.keys(), opened)
        self._saved: dict[str, str] = {}
        self.stand_ins, misshapen = {}, []
        for name, parameter in blank.named_parameters():
            # A backbone that was saved alone lacks the prefix.
            for saved in (name.removeprefix(f"{blank.base_model_prefix}."), name):
                if saved in self._weight_files:
                    self._saved[name] = saved
            if name not in self._saved:  # an older layout has another name
                renamed = [*to_saved_layout(blank, {name: parameter.detach()})]
                if len(renamed) == 1 and renamed[0] in self._weight_files:
                    self._saved[name] = renamed[0]
            if name in self._saved and self._file_slice(name).get_shape() != [*parameter.shape]:
                misshapen.append(name)
            self.stand_ins[name] = _stand_in(parameter, dtype)
        self._stacked = _stacked_rows(blank, self.stand_ins.keys() - self._saved.keys())
        absent: set[str] = set()
        for name, rows in list(self._stacked.items()):
            parts = {part for row in rows for part in row}
            if not parts & self._weight_files.keys():
                del self._stacked[name]
            elif parts - self._weight_files.keys():
                absent |= parts - self._weight_files.keys()
            elif not all(self._fits(row, self.stand_ins[name].shape[1:]) for row in rows):
                misshapen.append(name)
        lacking = self.stand_ins.keys() - self._saved.keys() - self._stacked.keys()
        absent |= self._read_buffers(blank)
        if any(".experts." in name for name in lacking):
            raise ModelError(
                f"{where} has experts whose weights are saved neither stacked nor one by one, so "
                "loading in shards cannot read them; set trainer/strategy=single"
            )
        expected = {name for name, _ in blank.named_parameters(remove_duplicate=False)}
        expected |= {name for name, _ in blank.named_buffers()} | set(self._saved.values())
        expected |= {part for rows in self._stacked.values() for row in rows for part in row}
        self.misfits = {
            "missing_keys": lacking | absent,
            "mismatched_keys": misshapen,
            "unexpected_keys": self._weight_files.keys() - expected,
        }

    def _read_buffers(self, blank: PreTrainedModel) -> set[str]:
        """Read the buffers that are saved, such as a router's bias; returns those that are not."""
        named = {name for name, _ in blank.named_parameters(remove_duplicate=False)}
        absent = set()
        for name in blank.state_dict().keys() - named:
            alone = name.removeprefix(f"{blank.base_model_prefix}.")
            saved = alone if alone in self._weight_files else name
            if saved in self._weight_files:
                self.stand_ins[name] = self._weight_files[saved].get_tensor(saved)
            else:
                absent.add(name)
        return absent

    def __contains__(self, name: str) -> bool:
        """Return whether the parameter of this name is read from the folder."""
        return name in self._saved or name in self._stacked

    def part(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Read a rectangle of a weight, of one row at least, in the dtype of the file.

        Nothing else is read: rows of a weight that the files have as it is are taken as they lie
        there, and of experts that they have one by one only the requested ones.

        Args:
            slices: of the weight's first dimensions; the others are taken whole.

        Raises:
            ModelError: the file cannot be read.
        """
        with explain_load_errors(f"{self._where}: cannot read {self._saved.get(name, name)}"):
            if name in self._saved:
                return cast(Tensor, self._file_slice(name)[tuple(slices)])
            experts, *inside = slices
            rows = self._stacked[name][experts]
            return torch.stack([self._joined(row, inside or [slice(None)]) for row in rows])

    def _joined(self, row: Sequence[str], slices: Sequence[slice]) -> Tensor:
        """Read a rectangle of what tensors of the files make, one below the other."""
        pieces, above = [], 0
        wholes = [self._weight_files[part].get_slice(part) for part in row]
        start, stop, _ = slices[0].indices(sum(whole.get_shape()[0] for whole in wholes))
        for whole in wholes:
            height = whole.get_shape()[0]
            rows = slice(max(start - above, 0), min(stop - above, height))
            if rows.start < rows.stop:
                pieces.append(whole[(rows, *slices[1:])])
            above += height
        return torch.cat(pieces)

    def _fits(self, row: Sequence[str], shape: Sequence[int]) -> bool:
        """Return whether these tensors of the files, one below the other, have a shape."""
        shapes = [self._weight_files[part].get_slice(part).get_shape() for part in row]
        rest = all(each[1:] == [*shape[1:]] for each in shapes)
        return rest and sum(each[0] for each in shapes) == shape[0]

    def _file_slice(self, name: str) -> Any:
        saved = self._saved[name]
        return self._weight_files[saved].get_slice(saved)


class ShapeOnlyWeights(SavedWeights):
    """Weights of which nothing is known but the shapes, in the place of a folder's.

    Args:
        blank: the model on no device.
        dtype: of the stand-ins, and of what `part` reads.
    """

    def __init__(self, where: ModelRef, blank: PreTrainedModel, dtype: torch.dtype) -> None:
        self.stand_ins = {n: _stand_in(p, dtype) for n, p in blank.named_parameters()}
        self.misfits = dict.fromkeys(("missing_keys", "mismatched_keys", "unexpected_keys"), ())

    def __contains__(self, name: str) -> bool:
        return name in self.stand_ins

    def part(self, name: str, slices: Sequence[slice]) -> Tensor:
        """Make a rectangle of no particular numbers."""
        stand_in = self.stand_ins[name]
        sizes = [len(range(n)[cut]) for n, cut in zip(stand_in.shape, slices, strict=False)]
        return torch.empty(*sizes, *stand_in.shape[len(slices) :], dtype=stand_in.dtype)


def _stacked_rows(blank: PreTrainedModel, names: Collection[str]) -> dict[str, list[list[str]]]:
    """Find the weights that the files have expert by expert, and the model as one stack of rows.

    Args:
        names: parameters of the model on no device that its files do not have.

    Returns:
        For each row (an expert) the names of the tensors in the files that make it, one below the
        other: gate and up projection are one row.
    """
    stacked = {}
    for name in names:
        weight = blank.get_parameter(name).detach()
        saved = [*to_saved_layout(blank, {name: weight})]
        if weight.ndim == 3 and len(saved) > 1 and len(saved) % len(weight) == 0:
            # All experts of the first projection come before those of the second.
            stacked[name] = [saved[row :: len(weight)] for row in range(len(weight))]
    return stacked


def to_saved_layout(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names, and in the pieces, that a folder's files have.

    They differ from the model's where transformers joins what belongs together, such as the experts
    of a layer; what it joined must come whole.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return cast("dict[str, Tensor]", revert_weight_conversion(cast(Any, model), dict(weights)))


def _stand_in(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    # As large as a weight is, for the probes of fused layers to answer.
    value = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
    return torch.full((), value, dtype=dtype).expand(parameter.shape)


def saved_weights(model: nn.Module) -> SavedWeights | None:
    """Return where a hollow model's weights are; None for a model that has them."""
    return cast("SavedWeights | None", getattr(model, "saved_weights", None))


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put other parameters in the place of all, in place; tied ones stay tied.

    Args:
        make: gets a parameter and its (first) name.
    """
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in replaced:
                new = make(f"{path}.{name}" if path else name, parameter)
                replaced[id(parameter)] = parameter, new
            setattr(module, name, replaced[id(parameter)][1])


def _weight_files(where: ModelRef) -> list[Path]:
    folder = Path(where.path)
    if not folder.is_dir():
        raise ModelError(
            f"{where} is not a local folder, which loading in shards needs; download the model "
            "and give its folder"
        )
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # which transformers takes first, too
        return [single]
    if not index.is_file():
        raise ModelError(
            f"{where}: the folder has no {single.name} and no {index.name}; "
            "save the model as safetensors"
        )
    with explain_load_errors(f"{where}: cannot read {index.name}"):
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(file_of.values()))]
