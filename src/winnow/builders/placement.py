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
"""Variables of PyTorch's allocator, the one that every version knows first."""


def local_devices(roles: Roles, device: str, trains: bool = True) -> dict[str, range]:
    """Choose a GPU of this machine for each process that takes one, by role; none on CPUs.

    Places get theirs in the order of `ROLES`, and roles of one place the same; the run's own
    process takes the first where it trains.

    Args:
        device: of the recipe (`run.device`).
        trains: False where neither ranks nor the run's own process take a GPU, as in an evaluation.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    if device == "cpu" or not torch.cuda.is_available():
        if device == "cuda":
            raise ConfigError("run.device is cuda, but torch sees no GPU; set run.device=cpu")
        return {}
    takes = _gpus_by_place(roles, int(trains))
    ends = dict(zip(takes, itertools.accumulate(takes.values()), strict=True))
    needs, devices = sum(takes.values()), torch.cuda.device_count()
    if needs > devices:
        parts = [f"{role.count_text} ({_count_key(role)})" for role in roles if role.gpus]
        parts = parts if "policy" in roles or not trains else ["1 that trains", *parts]
        raise ConfigError(
            f"cluster=local gives each process GPUs of its own: {', '.join(parts)} need {needs}, "
            f"this machine has {devices}; have fewer, or let engines share those of what trains "
            "(cluster.share_devices=true), or set run.device=cpu"
        )
    first = {place: ends[place] - count for place, count in takes.items()}
    held = {role.name: max(role.gpus, trains and role.name == "policy") for role in roles.entries}
    return {
        role.name: range(first[role.place], first[role.place] + held[role.name])
        for role in roles.entries
        if held[role.name]
    }


def _gpus_by_place(roles: Roles, policy: int) -> dict[str, int]:
    """Count the GPUs of each place; at least `policy` of that which trains."""
    takes: dict[str, int] = {}
    for role in roles.entries:
        least = policy if role.name == "policy" else 0
        takes[role.place] = max(takes.get(role.place, 0), role.gpus, least)
    return {place: count for place, count in takes.items() if count}


def _count_key(role: Role) -> str:
    return role.key if role.width == 1 else f"{role.key} x tensor_parallel={role.width}"


def devices_of(roles: Roles, ranks: int) -> int:
    """Count the devices of what learns and of engines; roles of one place share them."""
    takes = {role: roles[role].gpus for role in ("rollout", "critic")} | {"policy": ranks}
    places: dict[str, int] = {}
    for role, devices in takes.items():
        place = roles[role].place
        places[place] = max(places.get(place, 0), devices)
    return sum(places.values())


def visible_devices(indices: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a process these of the GPUs that this one sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    shown = (str(index) if names is None else names[index].strip() for index in indices)
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown)}


def allocator_variables(
    role: Role, on_device: bool, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the variable with which the memory of ranks on GPUs is mapped piece by piece.

    Micro-batches have many lengths, and memory that they free is else cut up until none fits.
    Engines have none: the sleep of vLLM, whose memory is mapped by itself, cannot do with it.

    Args:
        variables: set by the recipe; one of the allocator stands, as in this process.
    """
    is_set = any(name in os.environ or name in variables for name in _ALLOCATOR)
    if role.kind != "ranks" or not on_device or is_set:
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


def pools_of(roles: Roles, cluster: RayCluster, has_devices: bool) -> list[Pool]:
    """Return the pools of a run on Ray: the recipe's, or one for each role."""
    from winnow.workers.ray.session import Pool

    pools = dict(cluster.pools)
    if not pools:
        for role in roles:  # engines and scorers: wherever there is room
            count = role.count * role.slots
            nodes = cluster.nodes if role.place == "policy" else count
            pools.setdefault(role.place, PoolConfig(nodes=nodes, per_node=count // nodes))
    placed = []
    for name, pool in pools.items():
        inside = {role.name: role.slots for role in roles if role.place == name}
        if not inside:  # of a role without work, as where an engine alone is checked
            continue
        widths = [roles[role].width // slots for role, slots in inside.items()]
        devices = max(widths) if has_devices else 0
        size = pool.nodes, pool.per_node
        placed.append(Pool(name, inside, *size, devices, pool.cpus or cluster.cpus))
    return placed


def runtime_env_of(cluster: RayCluster, runs: Path) -> dict[str, Any]:
    """Return what Ray is to bring to all actors; variables are given to each by itself."""
    environment = cluster.runtime_env.model_dump(mode="json", exclude={"env_vars"})
    if (folder := cluster.runtime_env.working_dir) is not None:
        with contextlib.suppress(ValueError):  # the runs lie elsewhere
            inside = runs.absolute().relative_to(Path(folder).absolute())
            environment["excludes"] = [f"/{inside}", *environment["excludes"]]
    return {key: value for key, value in environment.items() if value}
