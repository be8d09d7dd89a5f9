"""Sharded tensors: a rank's rows, filling and gathering them, their norm, and their checkpoints.

A parameter of `n` rows lies on the `S` ranks of a mesh's last axis, ceil(n / S) rows each and the
last ones fewer or none; along a first axis, where there is one, it is replicated.

On disk (`torch.distributed.checkpoint`) each rank writes its own rows, once. What was saved on some
ranks can be read on any other number of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from winnow.errors import CheckpointError
from winnow.learning.base_strategy import local

Named = tuple[str, Tensor]
State = dict[str, Any]
"""Tensors in nested dicts."""


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Return the rows of a tensor that are this rank's."""
    axis = mesh.ndim - 1
    each = -(-rows // mesh.size(axis))
    start = min(each * mesh.get_local_rank(axis), rows)
    return slice(start, min(start + each, rows))


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor on every rank; all ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(own: Tensor, given: Tensor) -> None:
    """Fill a sharded tensor from one that is sharded too, in any way, or that has all rows."""
    if not isinstance(own, DTensor):
        own.copy_(whole(given))
    elif (
        isinstance(given, DTensor)
        and given.device_mesh == own.device_mesh
        and given.placements == own.placements
    ):
        local(own).copy_(local(given))
    else:
        local(own).copy_(whole(given)[own_rows(own.shape[0], own.device_mesh)])


def global_norm(tensors: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> float:
    """Return the 2-norm of all elements of sharded tensors together, the same on every rank.

    Args:
        device: where the ranks' sums meet; the tensors may lie on the host.
    """
    parts = [local(tensor) for tensor in tensors]
    # In double: the square of an fp32 norm of 1e20 would be infinite.
    own = float(torch.nn.utils.get_total_norm(parts)) if parts else 0.0
    square = torch.tensor(own, dtype=torch.float64, device=device).square_()
    for axis in range(mesh.ndim):
        dist.all_reduce(square, group=mesh.get_group(axis))
    replicas = mesh.size() // mesh.size(mesh.ndim - 1)
    return math.sqrt(float(square) / replicas)


def gather_values(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Gather a plain value of each rank, in the same order on all of them."""
    values = [value]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def gathered(
    tensors: Iterable[Named], bucket_bytes: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors; those of a bucket travel together, and one bucket is held at a time.

    All ranks must ask for all of them. A tensor larger than `bucket_bytes` is a bucket of its own.
    """
    bucket: list[tuple[str, DTensor]] = []
    held = 0
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield name, tensor
            continue
        size = tensor.numel() * tensor.element_size()
        if bucket and (held + size > bucket_bytes or bucket[0][1].dtype != tensor.dtype):
            yield from _gather(bucket, device)
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += size
    if bucket:
        yield from _gather(bucket, device)


def _gather(bucket: Sequence[tuple[str, DTensor]], device: torch.device) -> Iterator[Named]:
    mesh = bucket[0][1].device_mesh
    axis = mesh.ndim - 1
    shards = mesh.size(axis)
    sizes = [-(-t.shape[0] // shards) * math.prod(t.shape[1:]) for _, t in bucket]
    sent = torch.zeros(sum(sizes), dtype=bucket[0][1].dtype, device=device)
    for room, (_, tensor) in zip(torch.split(sent, sizes), bucket, strict=True):
        part = local(tensor).reshape(-1)
        room[: part.numel()].copy_(part)
    received = sent.new_empty(shards * len(sent))
    dist.all_gather(list(received.chunk(shards)), sent, group=mesh.get_group(axis))
    parts = torch.split(received.view(shards, -1), sizes, dim=1)
    for (name, tensor), part in zip(bucket, parts, strict=True):
        # Every rank before the last that has rows is full, so padding is at the end alone.
        rows = part.reshape(-1, *tensor.shape[1:])
        yield name, rows[: tensor.shape[0]]


def on_host(state: Mapping[str, Any], mesh: DeviceMesh) -> State:
    """Copy a state to the host, where later updates do not change it.

    Args:
        mesh: of the same ranks, for the host.
    """

    def copied(tensor: Tensor) -> Tensor:
        own = local(tensor).detach().to("cpu", copy=True)
        if not isinstance(tensor, DTensor):
            return own
        return DTensor.from_local(
            own,
            mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    return {
        key: on_host(value, mesh) if isinstance(value, Mapping) else copied(value)
        for key, value in state.items()
    }


class _Writer(FileSystemWriter):
    """A writer that raises the system's own error, which pickling for other ranks would lose."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # After a write that failed, torch's zip writer fails at its closing, too.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def write_shards(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Write a state that is on the host; all ranks call this, in a thread if they like.

    Args:
        group: a gloo group that nothing else uses meanwhile.

    Raises:
        OSError: the disk is full, or not writable; on every rank.
    """
    try:
        writer = _Writer(folder, single_file_per_rank=True, sync_files=False)
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise _first(error) from error


def read_shards(states: State, folder: Path) -> None:
    """Read what `write_shards` wrote into states with room for it, by role; all ranks call this.

    A model that has made no step yet has no optimizer state: entries that were not saved are taken
    out of `optimizer`.

    Raises:
        CheckpointError: the folder is damaged, or of another model.
    """
    try:
        reader = FileSystemReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        for role, state in states.items():
            for name in list(state["optimizer"]):
                if f"{role}.optimizer.{name}.step" not in saved:
                    del state["optimizer"][name]
        load(states, storage_reader=reader)
    except (CheckpointException, OSError, EOFError, ValueError) as error:
        cause = _first(error) if isinstance(error, CheckpointException) else error
        reason = str(cause).partition("\n")[0]
        raise CheckpointError(
            f"{folder} cannot be read: {reason}; use another checkpoint"
        ) from error


def _first(error: CheckpointException) -> BaseException:
    """Return the failure of the first rank that has one."""
    return error.failures[min(error.failures)][0]
