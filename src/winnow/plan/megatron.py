"""One rank of Megatron's parallelism on fake tensors, without neighbours and without CUDA.

megatron-core asks torch.cuda for a device, for streams and for random states, neighbours for the
shapes of what they send, and a router's numbers for how many tokens go where. The answers given
here: the CPU that stands for the GPU, nothing to wait for, the shapes of a full micro-batch, and as
many tokens for each expert.
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
    """A queue of work that is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def _ignore(self, *_: Any) -> _Stream:
        return self

    wait_stream = record_event = synchronize = _ignore


def _spread(self: Any, routing_map: Tensor) -> Tensor:
    """Count tokens of experts, in the place of a dispatcher: as many for each."""
    n, E = routing_map.shape
    self.num_out_tokens = n * self.config.moe_router_topk
    counts_E = np.full(E, self.num_out_tokens // E) + (np.arange(E) < self.num_out_tokens % E)
    own = counts_E[self.local_expert_indices]
    self.input_splits = counts_E.reshape(self.ep_size, -1).sum(1)
    self.output_splits = np.full(self.ep_size, own.sum())
    self.output_splits_tp = np.full(self.tp_size, own.sum() * self.ep_size)
    # Arrays, which keep their numbers where tensors are fake.
    self.num_global_tokens_per_local_expert = np.tile(own, (self.tp_size * self.ep_size, 1))
    return routing_map.new_empty(len(own), dtype=torch.int64)


def _zeros(*size: Any, zeros: Any = torch.zeros, **options: Any) -> Any:
    """Make zeros where there are devices, in the place of torch.zeros."""
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
"""Answers in the place of torch.cuda's."""


@contextlib.contextmanager
def planned_megatron(
    chosen: Megatron, config: Any, planned: type[Any], kernels_of: str
) -> Iterator[type[Any]]:
    """Import Megatron's strategy, as one that a plan can run within this context.

    Args:
        config: of the Hugging Face model.
        planned: whose methods the strategy takes over.
        kernels_of: the type of device whose kernels ranks have.

    Raises:
        ConfigError: megatron-core is absent or too old.
    """
    shape = [0, 1, config.hidden_size]

    def shapes(_: Any, to_next: Any, to_previous: Any, previous: bool, following: bool) -> Any:
        return shape if previous else None, shape if following else None

    with contextlib.ExitStack() as undo:

        def answer(owner: Any, **answers: Any) -> None:
            undo.enter_context(mock.patch.multiple(owner, **answers))

        answer(torch.cuda, **_CUDA)
        answer(torch, zeros=_zeros)
        from winnow.models.megatron.mcore_import import import_megatron

        import_megatron(_CPU)
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import token_dispatcher

        from winnow.learning.megatron import MegatronStrategy

        answer(
            random, _get_cuda_rng_state=lambda **_: None, _set_cuda_rng_state=lambda *_, **__: None
        )
        answer(P2PCommunicator, _communicate_shapes=shapes)
        answer(token_dispatcher, maybe_move_tensor_to_cpu=lambda given, **_: given)
        answer(token_dispatcher.MoEAlltoAllTokenDispatcher, preprocess=_spread)
        answer(dist, broadcast_object_list=lambda *_, **__: None)

        class PlannedMegatron(planned, MegatronStrategy):  # type: ignore[misc]
            """Megatron's strategy on a rank whose neighbours are not there."""

            kernels = kernels_of

            @property
            def held_modules(self) -> nn.Module:
                return self._stage

            def gradients(self) -> Iterator[tuple[str, Tensor]]:
                for name, parameter in self._local_params.items():
                    found = self._sums.get(name, parameter.grad)
                    if found is not None:
                        yield name, found

            def _schedule(
                self, microbatches: Sequence[MicroBatch], *rest: Any, **options: Any
            ) -> None:
                split = chosen.tensor if chosen.sequence_parallel else 1
                shape[0] = -(-len(microbatches[0].token_ids) // split)
                super()._schedule(microbatches, *rest, **options)

        try:
            yield PlannedMegatron
        finally:
            parallel_state.destroy_model_parallel()
