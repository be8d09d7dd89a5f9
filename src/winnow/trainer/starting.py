"""How a run's worker processes are started: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol

import torch

from winnow.cluster.local import start_local
from winnow.cluster.pools import Layout, Pool
from winnow.cluster.protocol import WorkerGroup
from winnow.cluster.ray_group import start_ray
from winnow.cluster.ray_session import Reserved, ray_session, reserve
from winnow.config.cluster import RayCluster
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.trainer.crew import Crew

Starting = Coroutine[Any, Any, WorkerGroup]
LEARNER = "learner"
_RANK = "winnow.trainer.rank:LearnerRank"
_ENGINE = "winnow.rollout.engine_worker:TorchEngineWorker"


class Starter(Protocol):
    """Starts the groups of a run; arguments are those of the workers' classes."""

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """Those that train, one group."""
        ...

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """One that writes answers, a group of its own: it may die and leave the others."""
        ...


class LocalStarter:
    """Processes of this machine; of several GPUs each has one, ranks first."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._ranks = ranks_of(config)
        self._has_devices = device.type == "cuda"
        self._options: dict[str, Any] = {"stall_timeout_s": config.trainer.stall_timeout_s}
        self._options["environment"] = _threads(config)

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Starter.ranks`."""
        devices = list(range(self._ranks)) if self._has_devices else None
        made = LEARNER, _RANK, arguments, self._ranks
        return start_local(*made, devices=devices, **self._options)

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """See `Starter.engine`."""
        # The run's process has the first GPU where it trains.
        devices = [max(self._ranks, 1) + number] if self._has_devices else None
        made = engine_role(number), _ENGINE, arguments, 1
        return start_local(*made, devices=devices, **self._options)


class RayStarter:
    """Actors, on slots that were reserved for them."""

    def __init__(self, config: Config, reserved: Reserved) -> None:
        assert isinstance(config.cluster, RayCluster)
        self._reserved = reserved
        self._options: dict[str, Any] = {
            "stall_timeout_s": config.trainer.stall_timeout_s,
            "environment": {**_threads(config), **config.cluster.environment},
        }

    def ranks(self, arguments: Mapping[str, Any]) -> Starting:
        """See `Starter.ranks`."""
        place = self._reserved.placement(LEARNER)
        return start_ray(LEARNER, _RANK, arguments, place, **self._options)

    def engine(self, number: int, arguments: Mapping[str, Any]) -> Starting:
        """See `Starter.engine`."""
        role = engine_role(number)
        place = self._reserved.placement(role)
        return start_ray(role, _ENGINE, arguments, place, **self._options)


@contextlib.contextmanager
def starter_of(config: Config, device: torch.device, crew: Crew) -> Iterator[Starter]:
    """What starts the processes that a recipe asks for, where it asks for them.

    Raises:
        ConfigError: the cluster is too small, or Ray is not installed.
        WinnowError: it cannot be reached.
    """
    if not isinstance(config.cluster, RayCluster):
        yield LocalStarter(config, device)
        return
    with ray_session(config.cluster.address):
        reserved = crew.wait(reserve(layout_of(config, device.type == "cuda")))
        try:
            yield RayStarter(config, reserved)
        finally:
            crew.close()  # before Ray, which would take the actors for dead
            reserved.release()


def layout_of(config: Config, has_devices: bool) -> Layout:
    """The pools of a run: one for its ranks, and one for each engine."""
    assert isinstance(config.cluster, RayCluster)
    nodes, cpus = config.cluster.nodes, config.cluster.cpus
    pools = []
    if ranks := ranks_of(config):
        pools.append(Pool(LEARNER, nodes, ranks // nodes, has_devices, cpus))
    engines = range(config.rollout.engine.processes)
    pools += [Pool(engine_role(number), 1, 1, has_devices, cpus) for number in engines]
    return Layout(tuple(pools), {pool.name: pool.name for pool in pools})


def ranks_of(config: Config) -> int:
    """Processes that train; 0: the run's own does."""
    strategy = config.trainer.strategy
    return strategy.ranks if isinstance(strategy, Fsdp2) else 0


def engine_role(number: int) -> str:
    """An engine's name in logs and errors."""
    return f"engine {number}"


def _threads(config: Config) -> dict[str, str]:
    threads = config.run.threads
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
