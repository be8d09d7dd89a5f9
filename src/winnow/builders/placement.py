"""The devices of a run's processes: GPUs of this machine, or pools of a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winnow.config.roles import Role, Roles
from winnow.config.trainer import PoolConfig, RayCluster
from winnow.errors import ConfigError

if TYPE_CHECKING:
    from winnow.workers.ray.session import Pool

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Variables of PyTorch's allocator; every version reads the first."""


def uses_gpu(device: str) -> bool:
    """Return whether a process with this `run.device` takes a GPU.

    Raises:
        ConfigError: it must, and there is none.
    """
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("run.device=cuda, but PyTorch finds no GPU; set run.device=cpu")
    return has_gpu


def assign_local_gpus(roles: Roles, device: str, trains: bool = True) -> dict[str, range]:
    """Assign a GPU of this machine to each process that needs one, by role; none on CPUs.

    Pools are served in the order of `ROLES`, and roles of one pool share its GPUs; a driver that
    trains takes the first.

    Args:
        device: `run.device`.
        trains: False where neither ranks nor the driver take a GPU, as in an evaluation.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if not uses_gpu(device):
        return {}
    counts = {role.name: role.gpus for role in roles.entries}
    counts["policy"] = max(counts["policy"], int(trains))
    takes: dict[str, int] = {}
    for role in roles.entries:
        takes[role.pool_name] = max(takes.get(role.pool_name, 0), counts[role.name])
    ends = dict(zip(takes, itertools.accumulate(takes.values()), strict=True))
    needs, devices = sum(takes.values()), torch.cuda.device_count()
    if needs > devices:
        parts = [f"{role.count_text} ({_count_key(role)})" for role in roles if role.gpus]
        parts = parts if "policy" in roles or not trains else ["1 that trains", *parts]
        raise ConfigError(
            f"cluster=local gives each process separate GPUs: {', '.join(parts)} need {needs}, "
            f"this machine has {devices}; start fewer, let engines share the GPUs of ranks "
            "(cluster.share_devices=true), or set run.device=cpu"
        )
    first = {name: ends[name] - takes[name] for name in takes}
    return {
        role.name: range(first[role.pool_name], first[role.pool_name] + counts[role.name])
        for role in roles.entries
        if counts[role.name]
    }


def _count_key(role: Role) -> str:
    return role.key if role.width == 1 else f"{role.key} x tensor_parallel={role.width}"


def count_devices(roles: Roles, ranks: int) -> int:
    """Count the devices of learning and of engines; roles of one pool share them."""
    takes = {role: roles[role].gpus for role in ("rollout", "critic")} | {"policy": ranks}
    places = dict.fromkeys((roles[role].pool_name for role in takes), 0)
    for role, devices in takes.items():
        places[roles[role].pool_name] = max(places[roles[role].pool_name], devices)
    return sum(places.values())


def visible_devices_variable(indices: Sequence[int]) -> dict[str, str]:
    """Return the variable by which a process sees some of the GPUs that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    shown = (str(index) if names is None else names[index].strip() for index in indices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown)}


def allocator_variables(
    role: Role, on_device: bool, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable that makes the allocator of ranks on GPUs use expandable segments.

    Micro-batches have many lengths, which fragments fixed segments until none fits. Engines need
    none; a user's own variable reaches them, too, and vLLM's sleep mode turns them off for what it
    frees.

    Args:
        variables: set by the recipe; an allocator variable there, or here, takes precedence.
    """
    is_set = any(name in os.environ or name in variables for name in _ALLOCATOR)
    if role.kind != "ranks" or not on_device or is_set:
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


def make_pools(roles: Roles, cluster: RayCluster, has_devices: bool) -> list[Pool]:
    """Make the pools of a run on Ray: the recipe's, or one for each role."""
    from winnow.workers.ray.session import Pool

    pools = dict(cluster.pools)
    for role in roles if not pools else ():  # engines and scorers: wherever there is room
        count = role.count * role.slots
        nodes = cluster.nodes if role.name == "policy" else count
        pools.setdefault(role.pool_name, PoolConfig(nodes=nodes, per_node=count // nodes))
    placed = []
    for name, pool in pools.items():
        inside = [role for role in roles if role.pool_name == name]
        if inside:  # else its roles have no processes
            devices = max(role.width // role.slots for role in inside) * has_devices
            slots, cpus = {role.name: role.slots for role in inside}, pool.cpus or cluster.cpus
            placed.append(Pool(name, slots, pool.nodes, pool.per_node, devices, cpus))
    return placed


def make_runtime_env(cluster: RayCluster, runs: Path) -> dict[str, Any]:
    """Make Ray's runtime_env of all actors, without variables, which each actor gets separately."""
    environment = cluster.runtime_env.model_dump(mode="json", exclude={"env_vars"})
    if (folder := cluster.runtime_env.working_dir) is not None:
        with contextlib.suppress(ValueError):  # the runs are outside of it
            inside = runs.absolute().relative_to(Path(folder).absolute())
            environment["excludes"] = [f"/{inside}", *environment["excludes"]]
    return {key: value for key, value in environment.items() if value}
