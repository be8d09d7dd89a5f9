"""Patches of megatron-core for a simulated rank on fake tensors, without CUDA.

megatron-core queries torch.cuda for a device, streams and random states, other stages for tensor
shapes, and the router for token counts. The patches return the CPU, streams without work, the
shapes of a full micro-batch, and an even split of tokens over experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from winnow.config.trainer import Megatron
from winnow.learning.batch import MicroBatch

_CPU = torch.device("cpu")


class _Stream(contextlib.nullcontext[None]):
    """A stream without pending work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def _ignore(self, *_: Any) -> _Stream:
        return self

    wait_stream = record_event = synchronize = _ignore


def _route_evenly(self: Any, routing_map: Tensor) -> Tensor:
    """Replacement of a token dispatcher's `preprocess` that splits tokens evenly over experts."""
    n, E = routing_map.shape
    self.num_out_tokens = n * self.config.moe_router_topk
    counts_E = np.full(E, self.num_out_tokens // E) + (np.arange(E) < self.num_out_tokens % E)
    local = counts_E[self.local_expert_indices]
    self.input_splits = counts_E.reshape(self.ep_size, -1).sum(1)
    self.output_splits = np.full(self.ep_size, local.sum())
    self.output_splits_tp = np.full(self.tp_size, local.sum() * self.ep_size)
    # NumPy arrays keep their values under a fake tensor mode.
    self.num_global_tokens_per_local_expert = np.tile(local, (self.tp_size * self.ep_size, 1))
    return routing_map.new_empty(len(local), dtype=torch.int64)


def _zeros_on_cpu(*size: Any, zeros: Any = torch.zeros, **options: Any) -> Any:
    """Replacement of torch.zeros that allocates on the CPU."""
    return zeros(*size, **options | ({"device": _CPU} if "device" in options else {}))


_CUDA: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *_: None,
    "Stream": _Stream,
    "current_stream": _Stream,
    "stream": lambda stream: stream,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "manual_seed": lambda seed: None,
}
"""Replacements of functions of torch.cuda."""


@contextlib.contextmanager
def patched_megatron(
    layout: Megatron, config: Any, tracked: type[Any], device_type: str
) -> Iterator[type[Any]]:
    """Yield Megatron's strategy class, patched for a simulated rank within the context.

    Args:
        config: configuration of the Hugging Face model.
        tracked: mixin of the strategy class.
        device_type: type of device whose attention kernels are used.

    Raises:
        ConfigError: megatron-core is absent or too old.
    """
    shape = [0, 1, config.hidden_size]

    def shapes(_: Any, to_next: Any, to_previous: Any, previous: bool, following: bool) -> Any:
        return shape if previous else None, shape if following else None

    with contextlib.ExitStack() as patches:

        def patch(owner: Any, **replacements: Any) -> None:
            patches.enter_context(mock.patch.multiple(owner, **replacements))

        patch(torch.cuda, **_CUDA)
        patch(torch, zeros=_zeros_on_cpu)
        from winnow.models.megatron.mcore_import import import_megatron

        import_megatron(_CPU)
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher

        from winnow.learning.megatron import MegatronStrategy

        patch(random, _get_cuda_rng_state=lambda **_: None)
        patch(random, _set_cuda_rng_state=lambda *_, **__: None)
        patch(P2PCommunicator, _communicate_shapes=shapes)
        patch(token_dispatcher, maybe_move_tensor_to_cpu=lambda tensor, **_: tensor)
        patch(token_dispatcher.MoEAlltoAllTokenDispatcher, preprocess=_route_evenly)
        patch(dist, broadcast_object_list=lambda *_, **__: None)

        class TrackedMegatron(tracked, MegatronStrategy):  # type: ignore[misc]
            """Megatron's strategy on a simulated rank."""

            kernels = device_type

            @property
            def local_modules(self) -> nn.Module:
                return self._stage

            def gradients(self) -> Iterator[tuple[str, Tensor]]:
                for name, parameter in self._local_params.items():
                    gradient = self._sums.get(name, parameter.grad)
                    if gradient is not None:
                        yield name, gradient

            def _schedule(
                self, microbatches: Sequence[MicroBatch], *rest: Any, **options: Any
            ) -> None:
                split = layout.tensor if layout.sequence_parallel else 1
                shape[0] = -(-len(microbatches[0].token_ids) // split)
                super()._schedule(microbatches, *rest, **options)

        try:
            yield TrackedMegatron
        finally:
            parallel_state.destroy_model_parallel()
