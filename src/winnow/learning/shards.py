"""Sharded tensors: which rows are this rank's, filling them, gathering them, their norm.

A parameter of `n` rows lies on the `S` ranks of a mesh's last axis, ceil(n / S) rows each and the
last ones fewer or none; along a first axis, where there is one, it is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Named = tuple[str, Tensor]


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Which of so many rows are this rank's."""
    axis = mesh.ndim - 1
    each = -(-rows // mesh.size(axis))
    start = min(each * mesh.get_local_rank(axis), rows)
    return slice(start, min(start + each, rows))


def local(tensor: Tensor) -> Tensor:
    """This rank's part, live; a tensor that is not sharded is its own."""
    return cast(Any, tensor).to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank; all ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(own: Tensor, given: Tensor) -> None:
    """Fill a sharded tensor from one that is sharded too, in any way, or that has all rows."""
    if not isinstance(own, DTensor):
        own.copy_(whole(given))
        return
    same = isinstance(given, DTensor) and (
        given.device_mesh == own.device_mesh and given.placements == own.placements
    )
    if same:
        local(own).copy_(local(given))
        return
    local(own).copy_(whole(given)[own_rows(own.shape[0], own.device_mesh)])


def global_norm(tensors: Sequence[Tensor], mesh: DeviceMesh, device: torch.device) -> float:
    """The 2-norm of all elements of sharded tensors together; the same number on every rank.

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
    """A plain value of each rank, in the same order on all of them."""
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
    """Names and whole tensors; those of a bucket travel together, and one bucket is held at a time.

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
