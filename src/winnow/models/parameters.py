"""What the strategies share about the model they hold: its tensors, and modes of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from winnow.errors import CheckpointError

HALF = (torch.bfloat16, torch.float16)
"""Types whose weights are stepped as fp32 masters."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones under their first name, and the buffers that are saved with them."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {n: t for n, t in model.state_dict().items() if n not in known}
    return parameters | buffers


def replace_parameters(model: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put other parameters in the place of all, in place; tied ones stay tied.

    Args:
        make: gets a parameter and its (first) name.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                new = make(f"{path}.{name}" if path else name, parameter)
                made[id(parameter)] = parameter, new
            setattr(module, name, made[id(parameter)][1])


def check_same(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Names, shapes and dtypes of a checkpoint's tensors are those of the model.

    Raises:
        CheckpointError: they are not.
    """
    remedy = "resume with the model of the run that saved it"
    if given.keys() != own.keys():
        missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
        raise CheckpointError(
            f"the checkpoint's {what} are not this model's: it lacks {missing[:3] or 'none'} "
            f"({len(missing)}) and has {extra[:3] or 'none'} ({len(extra)}) too many; {remedy}"
        )
    for name, tensor in own.items():
        other = given[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise CheckpointError(
                f"the checkpoint's {what}, {name}: {list(other.shape)} {other.dtype}, "
                f"but the model has {list(tensor.shape)} {tensor.dtype}; {remedy}"
            )


def check_state(state: Mapping[str, Any], own: Mapping[str, Tensor], trained: set[str]) -> None:
    """A state that `Strategy.state_dict` gave belongs to a model with these tensors.

    Raises:
        CheckpointError: it does not.
    """
    check_same("weights", state["weights"], own)
    for name, moments in state["optimizer"].items():
        if name not in trained:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name}, which is not trained here; "
                "resume with the model and the trained parameters of the run that saved it"
            )
        for key, value in moments.items():
            if key != "step":
                check_same(f"optimizer state {key}", {name: value}, {name: own[name]})


def enable_checkpointing(model: nn.Module) -> list[nn.Module]:
    """Let transformers checkpoint; returns the layers that do so when `training` is set.

    The flag is set on the layers alone, not on what they hold, so dropout stays off.
    """
    cast(Any, model).gradient_checkpointing_enable({"use_reentrant": False})
    return decoder_layers(model)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model is a stack of, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


@contextlib.contextmanager
def in_training(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Layers recompute their activations, or drop inputs, within the block and nowhere else."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
