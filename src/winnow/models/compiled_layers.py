"""The blocks of a model by torch.compile, while its passes run and not otherwise.

Each block is compiled as a separate function: attention, which follows the layout of a call,
stays as it is between two compiled parts. Names and weights are untouched, and an engine that
shares the model has its own code. Lengths are symbols of the compiled code, so micro-batches of
other lengths take the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from winnow.errors import ConfigError
from winnow.models.causal_lm import ATTENTION, attend

_VARIANTS = 64
"""Codes that a block may have: with and without gradients, in training or not, without its adapter,
of blocks that differ. Beyond that torch would run it uncompiled, without a word."""


class CompiledLayers:
    """The compiled forward functions of some blocks.

    Raises:
        ConfigError: nothing can be compiled for the device here.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        _check_compiler(device)
        self._attend: Any = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
        compiled = (torch.compile(layer.forward, dynamic=True) for layer in layers)
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            *zip(layers, compiled, strict=True)
        ]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have the blocks run by their compiled code, in forward and backward passes."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, self._attend)
        for layer, forward in self._forwards:
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.__dict__["forward"]
            AttentionInterface.register(ATTENTION, attend)


def _check_compiler(device: torch.device) -> None:
    """Compile a line, as only that shows whether compiler, headers and drivers are there."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    dynamo.recompile_limit = max(dynamo.recompile_limit, _VARIANTS)
    # Timings on each rank would choose kernels that sum in another order.
    cast(Any, inductor).deterministic = torch.are_deterministic_algorithms_enabled()
    cast(Any, inductor).compile_threads = 1  # others are processes that nobody here would end
    try:
        torch.compile(_probe, dynamic=True)(torch.ones(3, device=device))
    except RuntimeError as error:
        cause = " ".join(str(error.__cause__ or error).split())[:200]
        needs = "a C++ compiler (g++, or CXX) and Python's headers"
        needs = needs if device.type == "cpu" else f"Triton, {needs}"
        raise ConfigError(
            f"trainer.strategy.compile=true needs {needs} on the training machine, and torch "
            f"cannot compile: {cause}; install them or set it to false"
        ) from error


def _probe(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 1
