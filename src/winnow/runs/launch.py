"""Worker processes of a run: started on this machine or on a Ray cluster, by role.

| role | class | groups |
|---|---|---|
| policy | `LearnerWorker` | one, of the ranks that train |
| rollout | `TorchEngineWorker` | one an engine: it may die and leave the others |
| reward | `PipelineWorker` | one, of whole reward pipelines |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from winnow.config.judge import NoRewardModel
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.trainer import RayCluster
from winnow.errors import ConfigError
from winnow.workers.group import Starting, WorkerGroups
from winnow.workers.local import start_local
from winnow.workers.placement import Layout, Pool

if TYPE_CHECKING:
    from winnow.workers.ray.session import Reserved

Launch = Callable[[str, Mapping[str, Any], int], Starting]
"""Starts a group: its role, the arguments of its workers' class, and which engine it is."""
CLASSES = {
    "policy": "winnow.runs.learner_worker:LearnerWorker",
    "rollout": "winnow.rollout.remote_engine:TorchEngineWorker",
    "reward": "winnow.runs.rewarding:make_pipeline_worker",
}


class LocalLauncher:
    """Starts processes of this machine; of several GPUs each that has a model has one.

    Ranks come first, then engines, then what scores.

    Raises:
        ConfigError: there are fewer GPUs.
    """

    def __init__(self, config: Config) -> None:
        self._counts = workers_of(config)
        self._reward_devices = _reward_devices(config)
        self._has_devices = config.run.device != "cpu" and torch.cuda.is_available()
        if self._has_devices:
            self._check_devices(torch.cuda.device_count())
        elif config.run.device == "cuda":
            raise ConfigError("run.device is cuda, but torch sees no GPU; set run.device=cpu")
        self._options = _options(config)

    def start(self, role: str, arguments: Mapping[str, Any], number: int = 0) -> Starting:
        """Start a group, as `Launch` says."""
        count = 1 if role == "rollout" else self._counts[role]
        # The run's process has the first GPU where it trains.
        engines = max(self._counts["policy"], 1)
        first = {"policy": 0, "rollout": engines + number}.get(role, engines)
        first += self._counts["rollout"] if role == "reward" else 0
        has_devices = self._has_devices and (role != "reward" or self._reward_devices > 0)
        devices = list(range(first, first + count)) if has_devices else None
        made = group_name(role, number), CLASSES[role], arguments, count
        return start_local(*made, devices=devices, **self._options)

    def _check_devices(self, devices: int) -> None:
        """Check that this machine has a GPU for each process; the run's counts where it trains."""
        ranks, engines, scoring = (
            max(self._counts["policy"], 1),
            self._counts["rollout"],
            self._reward_devices,
        )
        needs = ranks + engines + scoring
        judging = f" and {scoring} that score (reward.processes)" if scoring else ""
        if needs > devices:
            raise ConfigError(
                f"cluster=local gives each process a GPU of its own: {ranks} that train "
                f"(trainer.strategy.ranks) and {engines} that write (rollout.engine.processes)"
                f"{judging} need {needs}, this machine has {devices}; have fewer, or share them on "
                "Ray in one pool (cluster=ray, cluster.pools), or set run.device=cpu"
            )


def ray_launch(config: Config, reserved: Reserved) -> Launch:
    """Make what starts groups as actors, on slots that were reserved for them."""
    assert isinstance(config.cluster, RayCluster)
    from winnow.workers.ray.group import start_ray

    options = _options(config)
    options["environment"] |= config.cluster.environment

    def start(role: str, arguments: Mapping[str, Any], number: int = 0) -> Starting:
        whole = reserved.placement(role)
        place = reserved.slot(role, number) if role == "rollout" else whole
        return start_ray(group_name(role, number), CLASSES[role], arguments, place, **options)

    return start


@contextlib.contextmanager
def launcher(config: Config, groups: WorkerGroups) -> Iterator[Launch]:
    """Prepare this machine or the cluster for a recipe's processes, and yield what starts them.

    Raises:
        ConfigError: machine or cluster are too small, or Ray is not installed.
        WinnowError: it cannot be reached.
    """
    if not isinstance(config.cluster, RayCluster):
        yield LocalLauncher(config).start
        return
    from winnow.workers.ray.session import offers, ray_session, reserve

    with ray_session(config.cluster.address):
        # Not what this process sees: it may be on a node without, or kept from them.
        has_devices = any(node.offer.devices for node in offers())
        has_devices = {"auto": has_devices, "cpu": False, "cuda": True}[config.run.device]
        reserved = groups.wait(reserve(layout_of(config, has_devices)))
        try:
            yield ray_launch(config, reserved)
        finally:
            groups.close()  # before Ray, which would take the actors for dead
            reserved.release()


def layout_of(config: Config, has_devices: bool) -> Layout:
    """Lay out the pools of a run: the recipe's, or one for each role."""
    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    counts = {role: count for role, count in workers_of(config).items() if count}
    if cluster.pools:
        roles = {role: name for role, name in cluster.roles.model_dump().items() if name}
        sizes = {
            name: (pool.nodes, pool.per_node, pool.cpus or cluster.cpus)
            for name, pool in cluster.pools.items()
        }
    else:
        roles = {role: role for role in counts}
        # Engines and what scores: each wherever there is room.
        sizes = {role: (count, 1, cluster.cpus) for role, count in counts.items()}
        if ranks := counts.get("policy"):
            sizes["policy"] = cluster.nodes, ranks // cluster.nodes, cluster.cpus
    hold_models = {role for role in counts if role != "reward" or _reward_devices(config)}
    on_devices = {roles[role] for role in hold_models} if has_devices else set()
    pools = [
        Pool(name, nodes, per_node, name in on_devices, cpus)
        for name, (nodes, per_node, cpus) in sizes.items()
    ]
    return Layout(tuple(pools), roles)


def group_name(role: str, number: int = 0) -> str:
    """Name a group in logs and errors."""
    return {"policy": "learner", "rollout": f"engine {number}"}.get(role, role)


def _options(config: Config) -> dict[str, Any]:
    threads = config.run.threads
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"stall_timeout_s": config.trainer.stall_timeout_s, "environment": environment}


def _reward_devices(config: Config) -> int:
    """Count the GPUs of those that score: one each for a reward model."""
    has_model = not isinstance(config.reward.model, NoRewardModel)
    return config.reward.processes if has_model else 0
