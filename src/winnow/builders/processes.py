"""Worker processes of a recipe, started on this machine or on a Ray cluster as `Roles` says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.builders.engines import engine_worker_arguments
from winnow.builders.placement import (
    allocator_variables,
    assign_local_gpus,
    make_pools,
    make_runtime_env,
    visible_devices_variable,
)
from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.config.roles import Role, Roles
from winnow.config.root import Config
from winnow.config.trainer import RayCluster
from winnow.models.fetch import MODEL_CACHE
from winnow.observe.profile import make_profiler, ray_nsight_options
from winnow.ranks.models import CUBLAS_VARIABLE, LoadedPolicy

if TYPE_CHECKING:
    from winnow.workers.group import Start, WorkerGroup, WorkerGroups

StartWorkers = Callable[..., Mapping[str, Sequence["WorkerGroup"]]]
"""Starts a run's worker processes in parallel at the first call, and loads their models; returns
the groups of each role. Each engine is a group, so that others go on when one dies. Of its keyword
arguments, `config` is the recipe for what starts, if it has changed; `only` names the one role to
start now, with further arguments of its class."""


Launch = Callable[[Role, Mapping[str, Any], int], "Start"]
"""Returns the start of a group, given its role, the arguments of the worker class and the engine's
number."""


@contextlib.contextmanager
def worker_processes(
    config: Config, roles: Roles, policy: LoadedPolicy, start: str | None
) -> Iterator[StartWorkers]:
    """Prepare to start the worker processes of a recipe; they end with the block.

    Args:
        start: folder of the run's initial model, where `needs_start` is true.

    Raises:
        WinnowError: machine or cluster are too small.
    """
    if not roles:
        yield lambda **_: {}
        return
    from winnow.workers.group import WorkerGroups

    worker_arguments: dict[str, Any] = {
        "tokenizer": policy.tokenizer_folder,
        "path": policy.path,
        "start": start,
        "vocabulary": policy.vocabulary,
    }
    engine = engine_worker_arguments(config, roles, policy, start) if "rollout" in roles else {}
    # Ranks come last, but before engines that share their GPUs, which take what is left free.
    starts = sorted(roles, key=lambda role: (role.kind != "replicas", role.name == "policy"))
    shared = [role for role in starts if role.name == "rollout" and roles.shares_devices]
    trains = "policy" in roles or policy.device.type != "cpu"
    by_role: dict[str, list[WorkerGroup]] = {}

    def arguments(role: Role, number: int) -> dict[str, Any]:
        if role.name != "rollout":
            return {name: worker_arguments[name] for name in role.arguments}
        profiler = make_profiler(config.trainer.profile, "engine", number)
        alone = {} if profiler is None else {"profiler": profiler}
        folders = {
            name: existing_model(engine[name])
            for name in ("model", "tokenizer")
            if engine.get(name) is not None
        }
        return {**engine, **folders, **alone}

    with (
        contextlib.closing(WorkerGroups()) as groups,
        launcher(config, roles, groups, trains) as launch,
    ):

        async def begin(role: Role, number: int) -> WorkerGroup:
            return await launch(role, arguments(role, number), number)()

        def started(
            config: Config = config, only: str | None = None, **more: Any
        ) -> dict[str, list[WorkerGroup]]:
            worker_arguments.update(more, config=config)
            missing = [r for r in starts if r.name not in by_role and only in (None, r.name)]
            for late in (False, True):
                together = [role for role in missing if (role in shared) == late]
                counts = ((r, r.count if r.kind == "replicas" else 1) for r in together)
                numbered = [(role, i) for role, count in counts for i in range(count)]
                begins = (functools.partial(begin, role, i) for role, i in numbered)
                for (role, _), group in zip(numbered, groups.start(*begins), strict=True):
                    by_role.setdefault(role.name, []).append(group)
            return by_role

        yield started


def existing_model(path: str) -> str:
    """Return a model's path, or the run's newest one where that checkpoint has been removed."""
    folder = Path(path)
    if folder.parent.parent.name != "checkpoints" or folder.exists():
        return path
    models = [checkpoint.model for checkpoint in checkpoints_in(folder.parent.parent)]
    return str(models[-1]) if models else path


@contextlib.contextmanager
def launcher(
    config: Config, roles: Roles, groups: WorkerGroups, trains: bool = True
) -> Iterator[Launch]:
    """Prepare this machine or the cluster for a recipe's processes; yield what starts them.

    Args:
        trains: as for `assign_local_gpus`.

    Raises:
        WinnowError: machine or cluster are too small, or Ray is missing or cannot be reached.
    """
    threads, cluster = config.run.threads, config.cluster
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    environment |= CUBLAS_VARIABLE if config.run.deterministic else {}
    if not isinstance(cluster, RayCluster):
        from winnow.workers.group import start_local

        devices = assign_local_gpus(roles, config.run.device, trains)

        def start_locally(role: Role, arguments: Mapping[str, Any], number: int) -> Start:
            size, gpus = role.count, devices.get(role.name)
            variables = environment | allocator_variables(role, bool(gpus), {})
            if role.kind == "replicas":
                size, gpus = 1, gpus and gpus[number * role.width : (number + 1) * role.width]
                if gpus and role.is_vllm:
                    variables, gpus = environment | visible_devices_variable(gpus), range(1)
            group = role.group_name(number), role.worker, arguments, size
            limits = config.trainer.stall_timeout_s, gpus, cluster.start_timeout_s
            return functools.partial(start_local, *group, variables, *limits)

        yield start_locally
        return
    from winnow.workers.ray.actors import start_ray
    from winnow.workers.ray.session import node_resources, ray_session, reserve, write_timeline

    if config.model.cache_dir is not None:  # of each node; processes here inherit it
        environment[MODEL_CACHE] = config.model.cache_dir
    variables = environment | cluster.environment | cluster.runtime_env.env_vars
    with ray_session(
        cluster.address,
        cpus=cluster.init.num_cpus,
        store_bytes=cluster.init.object_store_mb << 20,
        temp_dir=cluster.init.temp_dir,
        runtime_env=make_runtime_env(cluster, Path(config.run.dir)),
        has_timeline=cluster.timeline_file is not None,
    ):
        # Not those that this process sees: its node may have none, or hide them.
        has_devices = any(node["GPU"] for node in node_resources().values())
        has_devices = {"auto": has_devices, "cpu": False, "cuda": True}[config.run.device]
        lost_s = cluster.start_timeout_s if config.trainer.max_restarts else 0.0
        reserved = groups.wait(
            reserve(make_pools(roles, cluster, has_devices), lost_timeout_s=lost_s)
        )

        def start_on_ray(role: Role, arguments: Mapping[str, Any], number: int) -> Start:
            place = reserved.placement(role.name, number if role.kind == "replicas" else None)
            group = role.group_name(number), role.worker, arguments, place
            on_device = place.worker_resources.get("GPU", 0) > 0
            worker_variables = variables | allocator_variables(role, on_device, variables)
            nsight = ray_nsight_options(config.trainer.profile, role.name)
            limits = config.trainer.stall_timeout_s, nsight, cluster.start_timeout_s
            return functools.partial(start_ray, *group, worker_variables, *limits)

        try:
            yield start_on_ray
        finally:
            if cluster.timeline_file is not None:  # killed actors no longer report
                write_timeline(Path(cluster.timeline_file))
            groups.close()  # before Ray ends, which would report dead actors
            reserved.release()
