"""A model cut into units that are gathered and dropped alone, each sharded over a device mesh.

Each decoder layer is a unit, and all the rest of the model another (embeddings and a head that is
tied to them are one weight there), but for a head of one number, which keeps its own precision.

Shapes: `T` packed tokens of a micro-batch, `H` width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from winnow.learning.batch import MicroBatch
from winnow.learning.readout import Found, Readout
from winnow.learning.shards import own_rows
from winnow.learning.strategy import Output
from winnow.models.causal_lm import hidden_states
from winnow.models.lora import plain_name
from winnow.models.packed_attention import PackedLayout
from winnow.models.parameters import HALF, decoder_layers, replace_parameters
from winnow.models.sharded_loading import SavedWeights
from winnow.models.value import is_reward_model, is_value_model, scalar_head


@dataclass(frozen=True)
class Sharding:
    """How the weights are held between uses."""

    reshard_after_forward: bool | int = True
    """Drop a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them (faster, more memory), a number keeps them on so many ranks."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and step there."""
    bucket_bytes: int = 1 << 29
    """Of weights that are whole at once while they are exported."""


class Root(nn.Module):
    """Model and readout in one, so that both run while the root unit's weights are gathered."""

    def __init__(self, model: nn.Module, readout: Readout) -> None:
        super().__init__()
        self.model, self._readout = model, readout

    def forward(self, micro: MicroBatch, outputs: frozenset[Output]) -> Found:
        layout = PackedLayout(micro.lengths, micro.token_ids.device)
        hidden = hidden_states(self.model, micro.token_ids, micro.positions, layout)
        return self._readout(hidden, micro, outputs)


def sharded(root: Root, compute: torch.dtype, mesh: DeviceMesh, sharding: Sharding) -> nn.Module:
    """The units, from the inside out."""
    mixed = MixedPrecisionPolicy()
    if compute in HALF:
        mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if sharding.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in decoder_layers(root.model):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=mixed,
            offload_policy=offload,
        )
    if is_value_model(root.model) or is_reward_model(root.model):
        head = scalar_head(root.model)
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(head, mesh=mesh, mp_policy=exact, offload_policy=offload)
    fully_shard(root, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sums of gradients: losses are divided by counts over all ranks already. Plain sums,
            # as gloo has no other.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def empty(model: nn.Module, weights: SavedWeights) -> None:
    """Take a hollow model's stand-ins off all devices, in place; what is real stays."""

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if plain_name(name) not in weights:
            return parameter
        shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(shape, requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def fill(model: nn.Module, weights: SavedWeights, home: torch.device) -> None:
    """Give a sharded model this rank's rows of the weights that it lacks, in place.

    Args:
        home: where sharded weights lie.

    Raises:
        ModelError: they cannot be read.
    """

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        assert isinstance(parameter, DTensor)
        rows = own_rows(parameter.shape[0], parameter.device_mesh)
        own = torch.empty(rows.stop - rows.start, *parameter.shape[1:], dtype=parameter.dtype)
        own.copy_(weights.rows(plain_name(name), rows))
        found = DTensor.from_local(
            own.to(home),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(found, requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def to_masters(model: nn.Module) -> dict[str, torch.dtype]:
    """Widen what is trained in half precision, in place; the types before, by name."""
    before = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF:
            before[name] = parameter.dtype
            parameter.data = parameter.data.float()
    return before


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
