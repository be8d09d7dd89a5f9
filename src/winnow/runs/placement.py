"""The devices of a run's processes: GPUs of this machine, or pools of a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winnow.config.base import Section
from winnow.config.judge import NoRewardModel, engines_of, sharding_of
from winnow.config.rollout import VllmEngineConfig
from winnow.config.root import Config
from winnow.config.rules import COUNTS, workers_of
from winnow.config.trainer import LocalCluster, PoolConfig, RayCluster
from winnow.errors import ConfigError

if TYPE_CHECKING:
    from winnow.workers.ray.session import Pool

_RANKS = frozenset({"policy", "reference", "reward_model", "critic"})
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Variables of PyTorch's allocator, the one that every version knows first."""


def local_devices(config: Config, trains: bool = True) -> dict[str, range]:
    """Choose a GPU of this machine for each process, by role; none on CPUs.

    Ranks come first, or the run's own process where it trains, then engines, then what scores with
    a reward model, then a judge's engines, then a reference and a critic apart.

    Args:
        trains: False where neither ranks nor the run's own process take a GPU, as in an evaluation.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    if config.run.device == "cpu" or not torch.cuda.is_available():
        if config.run.device == "cuda":
            raise ConfigError("run.device is cuda, but torch sees no GPU; set run.device=cpu")
        return {}
    counts, devices = workers_of(config), torch.cuda.device_count()
    ranks = max(counts["policy"], int(trains))
    width, (role, scoring) = devices_each(config), _scorers(config)
    takes = {"policy": ranks, "rollout": counts["rollout"] * width, role: scoring}
    takes["judge"] = counts["judge"] * devices_each(config, "judge")
    takes |= {apart: counts[apart] for apart in ("reference", "critic")}
    ends = dict(zip(takes, itertools.accumulate(takes.values()), strict=True))
    if (needs := sum(takes.values())) > devices:
        words = {role: "that score", "judge": "that judge"}
        words |= {"reference": "of the reference", "critic": "of the critic"}
        more = (f" and {takes[r]} {w} ({COUNTS[r]})" for r, w in words.items() if takes[r])
        times = f" x tensor_parallel={width}" if width > 1 else ""
        raise ConfigError(
            f"cluster=local gives each process a GPU of its own: {ranks} that train "
            f"(trainer.strategy.ranks) and {takes['rollout']} that write (rollout.engine.processes"
            f"{times}){''.join(more)} need {needs}, this machine has {devices}; have fewer, or "
            "share them on Ray in one pool (cluster=ray, cluster.pools), or set run.device=cpu"
        )
    own = [each for each in takes if takes[each] or each in ("policy", "rollout")]
    return {each: range(ends[each] - takes[each], ends[each]) for each in own}


def engine_of_role(config: Config, role: str) -> Section | None:
    """Return the settings of the engines of a role, each of which is a group; None of ranks."""
    found = {"rollout": config.rollout.engine, "judge": engines_of(config.reward.judge)}
    return found.get(role)


def devices_each(config: Config, role: str = "rollout") -> int:
    """Return the number of GPUs of an engine, or of its processes on a CPU; of ranks 1."""
    engine = engine_of_role(config, role)
    return engine.tensor_parallel if isinstance(engine, VllmEngineConfig) else 1


def devices_of(config: Config, ranks: int) -> int:
    """Count the devices of what learns and of engines; in one pool on Ray they share them."""
    counts, cluster = workers_of(config), config.cluster
    takes = {"policy": ranks, "rollout": counts["rollout"] * devices_each(config)}
    takes["critic"] = counts["critic"]
    if isinstance(cluster, LocalCluster) or not cluster.pools:
        return sum(takes.values())
    pools: dict[str | None, int] = {}
    for role, devices in takes.items():
        pool = getattr(cluster.roles, role)
        pools[pool] = max(pools.get(pool, 0), devices)
    return sum(pools.values())


def visible_devices(own: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a process these of the GPUs that this one sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    shown = (str(index) if names is None else names[index].strip() for index in own)
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown)}


def allocator_variables(role: str, on_device: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which the memory of ranks on GPUs is mapped piece by piece.

    Micro-batches have many lengths, and memory that they free is else cut up until none fits.
    Engines have none: the sleep of vLLM, whose memory is mapped by itself, cannot do with it.

    Args:
        given: variables that the recipe sets; one of the allocator stands, as in this process.
    """
    is_set = any(name in os.environ or name in given for name in _ALLOCATOR)
    if role not in _RANKS or not on_device or is_set:
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


def pools_of(config: Config, has_devices: bool) -> list[Pool]:
    """Return the pools of a run on Ray: the recipe's, or one for each role."""
    from winnow.workers.ray.session import Pool

    cluster = config.cluster
    assert isinstance(cluster, RayCluster)
    counts = {role: count for role, count in workers_of(config).items() if count}
    hold_models = {role for role in counts if role != "reward" or _scorers(config)[1]}
    pools, chosen = cluster.pools, cluster.roles.model_dump()
    if not pools:
        nodes = counts | {"policy": cluster.nodes}  # engines and scorers: wherever there is room
        pools = {r: PoolConfig(nodes=nodes[r], per_node=n // nodes[r]) for r, n in counts.items()}
        chosen = {role: role for role in counts}
    found = []
    for name, pool in pools.items():
        roles = tuple(role for role, own in chosen.items() if own == name)
        with_model = hold_models.intersection(roles)
        devices = max((devices_each(config, role) for role in with_model), default=0)
        cpus = pool.cpus or cluster.cpus
        size = pool.nodes, pool.per_node
        found.append(Pool(name, roles, *size, devices if has_devices else 0, cpus))
    return found


def _scorers(config: Config) -> tuple[str, int]:
    """Return the role that runs a reward model apart, and how many GPUs it takes; 0 for none."""
    role = "reward" if sharding_of(config.reward.model) is None else "reward_model"
    has_model = not isinstance(config.reward.model, NoRewardModel)
    return role, workers_of(config)[role] if has_model else 0


def runtime_env_of(cluster: RayCluster, runs: Path) -> dict[str, Any]:
    """Return what Ray is to bring to all actors; variables are given to each by itself."""
    found = cluster.runtime_env.model_dump(mode="json", exclude={"env_vars"})
    if (folder := cluster.runtime_env.working_dir) is not None:
        with contextlib.suppress(ValueError):  # the runs lie elsewhere
            inside = runs.absolute().relative_to(Path(folder).absolute())
            found["excludes"] = [f"/{inside}", *found["excludes"]]
    return {key: value for key, value in found.items() if value}
