"""Worker processes of a recipe, started on this machine or on a Ray cluster as `Roles` says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.builders.engines import (
    _engine_arguments,
)
from winnow.builders.placement import (
    allocator_variables,
    local_devices,
    pools_of,
    runtime_env_of,
    visible_devices,
)
from winnow.config.roles import Role, Roles
from winnow.config.root import Config
from winnow.config.trainer import RayCluster
from winnow.models.fetch import MODEL_CACHE
from winnow.observe.profile import nsight_of, profiler_of
from winnow.ranks.models import CUBLAS_VARIABLE, LoadedPolicy

if TYPE_CHECKING:
    from winnow.workers.group import Starting, WorkerGroup, WorkerGroups

StartWorkers = Callable[[], Mapping[str, Sequence["WorkerGroup"]]]
"""Starts a run's other processes at the first call, side by side, with their models loaded; returns
the groups of each role. Each engine is a group: one may die and leave the others."""


Launch = Callable[[Role, Mapping[str, Any], int], "Starting"]
"""Starts a group: its role, the arguments of its workers' class, and which engine it is."""


@contextlib.contextmanager
def worker_processes(
    config: Config, roles: Roles, policy: LoadedPolicy, start: str | None
) -> Iterator[StartWorkers]:
    """Prepare for the processes that a recipe asks for; they end with the block.

    Args:
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: there is no room for them.
    """
    if not roles:
        yield dict
        return
    from winnow.workers.group import WorkerGroups

    worker_arguments: dict[str, Any] = {
        "config": config,
        "tokenizer": policy.tokenizer_folder,
        "path": policy.path,
        "start": start,
        "vocabulary": policy.vocabulary,
    }
    engine = _engine_arguments(config, policy, start) if "rollout" in roles else {}
    # Who learns comes last.
    starts = sorted(roles, key=lambda role: (role.kind != "engines", role.name == "policy"))
    numbered = [(r, i) for r in starts for i in range(r.count if r.kind == "engines" else 1)]
    trains = "policy" in roles or policy.device.type != "cpu"

    def arguments(role: Role, number: int) -> dict[str, Any]:
        if role.name != "rollout":
            return {name: worker_arguments[name] for name in role.arguments}
        profiler = profiler_of(config, "engine", number)
        return engine if profiler is None else {**engine, "profiler": profiler}

    with (
        contextlib.closing(WorkerGroups()) as groups,
        launcher(config, roles, groups, trains) as launch,
    ):

        @functools.cache
        def started() -> dict[str, list[WorkerGroup]]:
            starting = (launch(role, arguments(role, number), number) for role, number in numbered)
            pairs = list(zip(numbered, groups.start(*starting), strict=True))
            return {role.name: [group for (of, _), group in pairs if of is role] for role in starts}

        yield started


@contextlib.contextmanager
def launcher(
    config: Config, roles: Roles, groups: WorkerGroups, trains: bool = True
) -> Iterator[Launch]:
    """Prepare this machine or the cluster for a recipe's processes, and yield what starts them.

    Args:
        trains: as for `local_devices`.

    Raises:
        ConfigError: machine or cluster are too small, or Ray is not installed.
        WinnowError: it cannot be reached.
    """
    threads, cluster = config.run.threads, config.cluster
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment |= CUBLAS_VARIABLE if config.run.deterministic else {}
    stall_timeout_s = config.trainer.stall_timeout_s
    if not isinstance(cluster, RayCluster):
        from winnow.workers.group import start_local

        devices = local_devices(roles, config.run.device, trains)

        def start_locally(role: Role, arguments: Mapping[str, Any], number: int) -> Starting:
            size, gpus = role.count, devices.get(role.name)
            variables = environment | allocator_variables(role, bool(gpus), {})
            if role.kind == "engines":
                size, gpus = 1, gpus and gpus[number * role.width : (number + 1) * role.width]
                if gpus and role.is_vllm:
                    variables, gpus = environment | visible_devices(gpus), range(1)
            group = role.group_name(number), role.worker, arguments, size
            return start_local(*group, variables, stall_timeout_s, gpus)

        yield start_locally
        return
    from winnow.workers.ray.group import start_ray
    from winnow.workers.ray.session import offers, ray_session, reserve, write_timeline

    if config.model.cache_dir is not None:  # of each node; processes here inherit it
        environment[MODEL_CACHE] = config.model.cache_dir
    variables = environment | cluster.environment | cluster.runtime_env.env_vars
    with ray_session(
        cluster.address,
        cpus=cluster.init.num_cpus,
        store_bytes=cluster.init.object_store_mb << 20,
        temp_dir=cluster.init.temp_dir,
        runtime_env=runtime_env_of(cluster, Path(config.run.dir)),
        has_timeline=cluster.timeline_file is not None,
    ):
        # Not what this process sees: it may be on a node without, or kept from them.
        has_devices = any(node["GPU"] for node in offers().values())
        has_devices = {"auto": has_devices, "cpu": False, "cuda": True}[config.run.device]
        reserved = groups.wait(reserve(pools_of(roles, cluster, has_devices)))

        def start_on_ray(role: Role, arguments: Mapping[str, Any], number: int) -> Starting:
            place = reserved.placement(role.name, number if role.kind == "engines" else None)
            group = role.group_name(number), role.worker, arguments, place
            on_device = place.share.get("GPU", 0) > 0
            worker_variables = variables | allocator_variables(role, on_device, variables)
            return start_ray(
                *group, worker_variables, stall_timeout_s, nsight_of(config, role.name)
            )

        try:
            yield start_on_ray
        finally:
            if cluster.timeline_file is not None:  # what is killed tells nothing any more
                write_timeline(Path(cluster.timeline_file))
            groups.close()  # before Ray, which would take the actors for dead
            reserved.release()
