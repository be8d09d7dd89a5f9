"""How a run's worker processes are started: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol

import torch

from winnow.config.judge import NoRewardModel
from winnow.config.root import Config
from winnow.config.rules import workers_of
from winnow.config.trainer import RayCluster
from winnow.errors import ConfigError
from winnow.runs.worker_groups import WorkerGroups
from winnow.workers.local import start_local
from winnow.workers.pools import Layout, Pool
from winnow.workers.protocol import WorkerGroup
from winnow.workers.ray.group import start_ray
from winnow.workers.ray.session import Reserved, offers, ray_session, reserve

Starting = Coroutine[Any, Any, WorkerGroup]
LEARNER = "learner"
_RANK = "winnow.runs.learner_worker:LearnerWorker"
_ENGINE = "winnow.rollout.worker:TorchEngineWorker"
REWARD = "reward"
_REWARD = "winnow.runs.reward_worker:RewardWorker"


class Launcher(Protocol):
    """Starts the groups of a run; arguments are those of the workers' classes."""

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """Those that train, one group."""
        ...

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """One that writes answers, a group of its own: it may die and leave the others."""
        ...

    def rewards(self, arguments: Mapping[str, Any]) -> Starting:
        """Those that score, one group."""
        ...


class LocalLauncher:
    """Processes of this machine; of several GPUs each that has a model has one.

    Ranks come first, then engines, then what scores.

    Raises:
        ConfigError: there are fewer GPUs.
    """

    def __init__(self, config: Config) -> None:
        self._ranks = ranks_of(config)
        self._config = config
        self._has_devices = config.run.device != "cpu" and torch.cuda.is_available()
        if self._has_devices:
            _check_devices(config, torch.cuda.device_count())
        elif config.run.device == "cuda":
            raise ConfigError("run.device is cuda, but torch sees no GPU; set run.device=cpu")
        self._options: dict[str, Any] = {"stall_timeout_s": config.trainer.stall_timeout_s}
        self._options["environment"] = _threads(config)

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.ranks`."""
        devices = list(range(self._ranks)) if self._has_devices else None
        made = LEARNER, _RANK, arguments, self._ranks
        return start_local(*made, devices=devices, **self._options)

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.engine`."""
        # The run's process has the first GPU where it trains.
        devices = [max(self._ranks, 1) + number] if self._has_devices else None
        made = engine_role(number), _ENGINE, arguments, 1
        return start_local(*made, devices=devices, **self._options)

    def rewards(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.rewards`."""
        count, devices = self._config.reward.processes, None
        if self._has_devices and _reward_devices(self._config):
            first = max(self._ranks, 1) + self._config.rollout.engine.processes
            devices = list(range(first, first + count))
        return start_local(REWARD, _REWARD, arguments, count, devices=devices, **self._options)


class RayLauncher:
    """Actors, on slots that were reserved for them."""

    def __init__(self, config: Config, reserved: Reserved) -> None:
        assert isinstance(config.cluster, RayCluster)
        self._reserved = reserved
        self._options: dict[str, Any] = {
            "stall_timeout_s": config.trainer.stall_timeout_s,
            "environment": {**_threads(config), **config.cluster.environment},
        }

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.ranks`."""
        place = self._reserved.placement("policy")
        return start_ray(LEARNER, _RANK, arguments, place, **self._options)

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.engine`."""
        place = self._reserved.slot("rollout", number)
        return start_ray(engine_role(number), _ENGINE, arguments, place, **self._options)

    def rewards(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Launcher.rewards`."""
        place = self._reserved.placement("reward")
        return start_ray(REWARD, _REWARD, arguments, place, **self._options)


@contextlib.contextmanager
def starter_of(config: Config, crew: WorkerGroups) -> Iterator[Launcher]:
    """What starts the processes that a recipe asks for, where it asks for them.

    Raises:
        ConfigError: machine or cluster are too small, or Ray is not installed.
        WinnowError: it cannot be reached.
    """
    if not isinstance(config.cluster, RayCluster):
        yield LocalLauncher(config)
        return
    with ray_session(config.cluster.address):
        # Not what this process sees: it may be on a node without, or kept from them.
        has_devices = any(node.offer.devices for node in offers())
        has_devices = {"auto": has_devices, "cpu": False, "cuda": True}[config.run.device]
        reserved = crew.wait(reserve(layout_of(config, has_devices)))
        try:
            yield RayLauncher(config, reserved)
        finally:
            crew.close()  # before Ray, which would take the actors for dead
            reserved.release()


def layout_of(config: Config, has_devices: bool) -> Layout:
    """The pools of a run: the recipe's, or one for each role."""
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


def ranks_of(config: Config) -> int:
    """Processes that train; 0: the run's own does."""
    return workers_of(config)["policy"]


def engine_role(number: int) -> str:
    """An engine's name in logs and errors."""
    return f"engine {number}"


def _threads(config: Config) -> dict[str, str]:
    threads = config.run.threads
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


def _reward_devices(config: Config) -> int:
    """How many GPUs those take that score: one each for a reward model."""
    has_model = not isinstance(config.reward.model, NoRewardModel)
    return config.reward.processes if has_model else 0


def _check_devices(config: Config, devices: int) -> None:
    """See that this machine has a GPU for each process; that of the run counts where it trains."""
    ranks, engines = ranks_of(config), config.rollout.engine.processes
    scoring = _reward_devices(config)
    needs = max(ranks, 1) + engines + scoring
    judging = f" and {scoring} that score (reward.processes)" if scoring else ""
    if needs > devices:
        raise ConfigError(
            f"cluster=local gives each process a GPU of its own: {max(ranks, 1)} that train "
            f"(trainer.strategy.ranks) and {engines} that write (rollout.engine.processes)"
            f"{judging} need {needs}, this machine has {devices}; have fewer, or share them on "
            "Ray in one pool (cluster=ray, cluster.pools), or set run.device=cpu"
        )
