"""One model on several ranks, each holding a part of every weight (FSDP2, `fully_shard`).

Each decoder layer is a unit, whose weights are gathered when it runs and dropped after, and whose
gradients are added up over the ranks as soon as they are whole. The rest of the model is another
unit (embeddings and a head that is tied to them are one weight there), except a head of one number,
which keeps its own precision.

Weights are stored as masters (fp32 where a model computes in half precision), sharded by rows, with
gradients and AdamW's state: `n` rows lie on the `S` ranks of the mesh's last axis, ceil(n / S) rows
each and the last ones fewer or none. On a mesh of two axes they are replicated along the first
(HSDP).

Ranks run in step: each brings the same number of micro-batches, of which any may be empty. Counts
come in over all ranks and losses are divided by them, so gradients are sums, never means.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from winnow.learning.batch import MicroBatchSharder
from winnow.learning.data_parallel import device_of
from winnow.learning.runner import ModelRunner
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import HALF, Strategy, local, tensors_of
from winnow.models.causal_lm import decoder_layers, is_reward_model, is_value_model, text_model
from winnow.models.lora import is_adapter_weight, name_without_adapter
from winnow.models.sharded_loading import SavedWeights, replace_parameters, saved_weights
from winnow.models.value import scalar_head

_MOMENTS = "exp_avg", "exp_avg_sq"
Exported = Literal["all", "trained", "adapter"]


@dataclass(frozen=True)
class Sharding:
    """Options of how the weights are stored between uses."""

    reshard_after_forward: bool | int = True
    """Drop a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them (faster, more memory), a number keeps them on so many ranks."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and step there."""
    prefetch: int = 0
    """Layers to gather ahead of the one that runs, forward and backward; 0 leaves the order to
    PyTorch, which gathers the next one beside a backward pass."""


class FSDP2Strategy(Strategy):
    """Hold a model of `winnow.models`, sharded over a device mesh.

    Every method is collective: all ranks of the mesh call it, in the same order. An adapter of a
    half-precision model is stored in fp32 and computes in half precision, as everything but a value
    head does. After a loss that raises, only forward passes and `state_dict` are sure: replicas may
    hold a part of the gradient that nothing clears, so training goes on with a new strategy.

    Args:
        model: whole on every rank, or hollow; then each rank reads its own rows.
        mesh: of one axis, or of two: replicas, shards.
        sequence: neighbours on the mesh that run each micro-batch together, as `sequence_group`
            makes them; None where each rank runs other micro-batches.
        options: as `Strategy` takes them.

    Raises:
        ModelError: a hollow model's weights cannot be read, or its sequences cannot be shared.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        sharding: Sharding,
        sequence: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.mesh, self._sharding, self._sequence = mesh, sharding, sequence
        size = 1 if sequence is None else sequence.size()
        width = cast(Any, model).config.get_text_config().hidden_size
        self.sharder = MicroBatchSharder(mesh, int(width), size)
        super().__init__(model, device=device_of(mesh), **options)
        if sharding.offload and mesh.device_type != "cpu":
            # A rank with a GPU has one thread for all else.
            self.step_threads = max(cores_per_rank(), torch.get_num_threads())

    def _make_runner(self, model: nn.Module, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return super()._make_runner(model, *readout)
        return SequenceRunner(model, *readout, group=self._sequence)

    def _place_weights(self) -> dict[str, nn.Parameter]:
        model, weights = self.model, saved_weights(self.model)
        compute = next(cast(Any, model).base_model.parameters()).dtype
        if weights is not None:
            _materialize(model, weights)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype in HALF:
                self._rounded[name] = parameter.dtype
                parameter.data = parameter.data.float()
        _shard(self._runner, model, compute, self.mesh, self._sharding)
        if weights is not None:
            self._read_rows(weights)
            cast(Any, model).saved_weights = None
        return {n: p for n, p in model.named_parameters() if p.requires_grad}

    def _read_rows(self, weights: SavedWeights) -> None:
        """Read this rank's rows of the weights that the sharded model lacks, in place."""
        home = torch.device("cpu") if self._sharding.offload else self.device

        def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
            if not parameter.is_meta:
                return parameter
            tensor = torch.empty_like(parameter.detach(), device=home)
            rows = local_rows(parameter.shape[0], self.mesh)
            if rows.stop > rows.start:
                # As if it had been loaded in the type that the recipe names.
                dtype = self._rounded.get(name, parameter.dtype)
                local(tensor).copy_(weights.part(name_without_adapter(name), [rows]).to(dtype))
            return nn.Parameter(tensor, requires_grad=parameter.requires_grad)

        replace_parameters(self.model, make)

    @contextlib.contextmanager
    def _pass_context(self) -> Iterator[None]:
        try:
            yield
        finally:
            # What stayed gathered would be used again when weights have changed; so would what a
            # loss that raises leaves behind.
            for module in self._fsdp_units():
                module.reshard()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        # Replicas add up what their shards have gathered, once.
        cast(FSDPModule, self._runner).set_requires_all_reduce(is_last)
        super()._backward(loss, is_last)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        return global_norm(gradients, self.mesh, self.device)

    def _all_reduce(self, counts: Tensor) -> Tensor:
        for axis in range(self.mesh.ndim):
            dist.all_reduce(counts, group=self.mesh.get_group(axis))
        return counts

    def _fill(self, target: Tensor, source: Tensor) -> None:
        if isinstance(target, DTensor) and not isinstance(source, DTensor):  # that has all rows
            source = source[local_rows(target.shape[0], target.device_mesh)]
        local(target).copy_(local(source))

    def _gather_tensors(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(tensor, self.device)) for name, tensor in named)

    def export_trained(self) -> Iterator[tuple[str, Tensor]]:
        """Export what is trained, by parameter names, for a copy of the model that has the rest.

        Tensors are whole on every rank, rounded to the type the model computes in; all ranks must
        take all of them.
        """
        named = ((name, p.detach()) for name, p in self._masters.items())
        return self._gather_tensors(self._cast(named))

    def export_shards(self) -> dict[str, Tensor]:
        """Return the tensors of `export_weights`, sharded; an adapter's model has others."""
        named = ((name, tensor.detach()) for name, tensor in tensors_of(self.model).items())
        return dict(self._cast(named))

    def exported_bytes(self, what: Exported) -> int:
        """Count the bytes of `export_weights`, of all or the adapter, or of `export_trained`."""
        exported: Mapping[str, Tensor] = self._masters
        if what != "trained":
            every, is_alone = tensors_of(self.model), what == "adapter"
            exported = {name: t for name, t in every.items() if is_adapter_weight(name) == is_alone}
        return sum(t.numel() * self._rounded.get(n, t.dtype).itemsize for n, t in exported.items())

    def blank_state(self) -> dict[str, Any]:
        """Make room for what `state_dict` gives after a step: a checkpoint is read into it."""
        optimizer = {}
        for name, parameter in self._masters.items():
            step = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            moments = {key: torch.zeros_like(parameter.detach()) for key in _MOMENTS}
            optimizer[name] = {"step": step, **moments}
        weights = {n: torch.zeros_like(t) for n, t in self.state_dict()["weights"].items()}
        return {"weights": weights, "optimizer": optimizer}

    def _fsdp_units(self) -> list[FSDPModule]:
        return [module for module in self._runner.modules() if isinstance(module, FSDPModule)]


def make_mesh(kind: str, ranks: int, replicas: int) -> DeviceMesh:
    """Make a mesh of all ranks' devices, of two dimensions where replicas hold all weights each."""
    if replicas == 1:
        return init_device_mesh(kind, (ranks,))
    shape = replicas, ranks // replicas
    return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))


def cores_per_rank() -> int:
    """Return this machine's cores, divided by the ranks on it; all ranks must call it."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return max(len(os.sched_getaffinity(0)) // hosts.count(socket.gethostname()), 1)


def _shard(
    root: nn.Module, model: nn.Module, compute: torch.dtype, mesh: DeviceMesh, sharding: Sharding
) -> None:
    """Cut the model into units, from the inside out, and shard each over the mesh."""
    mixed = MixedPrecisionPolicy()
    if compute in HALF:
        mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if sharding.offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in decoder_layers(model):
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=mixed,
            offload_policy=offload,
        )
    _prefetch(decoder_layers(text_model(model)), sharding.prefetch)
    if (tower := getattr(cast(Any, model).base_model, "visual", None)) is not None:
        # Its gradients come apart from those of the text model: once a pass.
        fully_shard(tower, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    if is_value_model(model) or is_reward_model(model):
        exact = MixedPrecisionPolicy(cast_forward_inputs=False)
        fully_shard(scalar_head(model), mesh=mesh, mp_policy=exact, offload_policy=offload)
    fully_shard(root, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sums of gradients: losses are divided by counts over all ranks already. Plain sums,
            # as gloo has no other.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _prefetch(layers: Sequence[nn.Module], ahead: int) -> None:
    """Have each layer gather the weights of those that come `ahead` of it, in either direction."""
    units = cast("list[FSDPModule]", list(layers))
    for at, unit in enumerate(units if ahead else ()):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(at - ahead, 0) : at][::-1])


def _materialize(model: nn.Module, weights: SavedWeights) -> None:
    """Take a hollow model's stand-ins off all devices, in place; what is real stays."""

    def make(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name_without_adapter(name) not in weights:
            return parameter
        shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(shape, requires_grad=parameter.requires_grad)

    replace_parameters(model, make)


def local_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Return this rank's rows of a sharded tensor."""
    axis = mesh.ndim - 1
    each = -(-rows // mesh.size(axis))
    start = min(each * mesh.get_local_rank(axis), rows)
    return slice(start, min(start + each, rows))


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Gather a tensor on every rank, by way of `device`; all ranks must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    return cast(DTensor, tensor.to(device)).full_tensor()


def global_norm(tensors: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> float:
    """Return the 2-norm of all elements of sharded tensors together, the same on every rank.

    Args:
        device: where the ranks' sums meet; the tensors may lie on the host.
    """
    parts = [local(tensor) for tensor in tensors]
    norm = torch.nn.utils.get_total_norm(parts) if parts else torch.zeros(())
    # In double: the square of an fp32 norm of 1e20 would be infinite.
    square = norm.to(device, torch.float64).square()
    for axis in range(mesh.ndim):
        dist.all_reduce(square, group=mesh.get_group(axis))
    replicas = mesh.size() // mesh.size(mesh.ndim - 1)
    return math.sqrt(float(square) / replicas)
