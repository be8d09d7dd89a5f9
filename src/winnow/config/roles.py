"""The roles of a run's processes, resolved from a recipe: how many, of which class, on what.

What builds, places, starts, plans, checks and shows a run reads `Roles`, and knows a role by its
name only where it does that role's work. A role is added by an entry of `ROLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.judge import scorer_sharding
from winnow.config.reward import RewardConfig
from winnow.config.rollout import VllmEngineConfig
from winnow.config.root import Config

POLICY_STATE = "ranks"
"""A checkpoint's folder of the state that the ranks of the policy hold."""


@dataclass(frozen=True)
class Role:
    """A kind of work that may have dedicated processes; `ROLES` has them without counts."""

    name: str
    """Its name in `cluster.roles`."""
    key: str
    """Key of the number of processes."""
    worker: str
    """Import path of the workers' class."""
    arguments: tuple[str, ...] = ("config",)
    """Keyword arguments of the class, by name."""
    kind: Literal["ranks", "replicas", "pipelines"] = "ranks"
    """Ranks hold a model together and are one group; each replica, an engine or a process of
    environments, is a group, which may die and leave the others; pipelines are whole each, in one
    group."""
    title: str = "rank{s} of the {name}"
    """Title of the processes, for people; `{s}` stands for the plural's s."""
    log_name: str = "{name}"
    """Name of a group in logs; `{number}` stands for that of an engine."""
    is_needed: Callable[[AlgorithmConfig], bool] | None = None
    """Test of what learns from rewards: has it work for the role; None: any recipe has, SFT too."""
    saved_in: str | None = None
    """A checkpoint's folder of the state that its ranks hold; None: they hold none."""
    worker_by_engine: Mapping[str, str] | None = None
    """By the name of the engine, the class in the place of `worker`."""
    count: int = 0
    """Processes, or engines; 0: the run's own process does the work, or nobody."""
    width: int = 1
    """GPUs of a process, or of an engine; 0: it holds no model."""
    is_vllm: bool = False
    """True where vLLM is in its processes, which takes the first GPUs that it sees."""
    pool: str | None = None
    """Its pool: of the recipe on a Ray cluster, or that of the policy where they share GPUs; None:
    one of its own."""
    slots: int = 1
    """Slots of its pool that a process, or an engine, takes: more than one where a narrower role
    has the same pool."""

    @property
    def pool_name(self) -> str:
        """Return its pool, or its own name without one; roles of one pool share GPUs."""
        return self.pool or self.name

    @property
    def plural_title(self) -> str:
        """Return the title of several processes. Example: `ranks of the policy`."""
        return self.title.format(s="s", name=self.name.replace("_", " "))

    @property
    def count_text(self) -> str:
        """Return the number of processes with their title. Example: `1 rank of the policy`."""
        plural = "" if self.count == 1 else "s"
        return f"{self.count} {self.title.format(s=plural, name=self.name.replace('_', ' '))}"

    def group_name(self, number: int) -> str:
        """Name a group in logs and errors. Example: `engine 0`."""
        return self.log_name.format(name=self.name.replace("_", " "), number=number)

    @property
    def gpus(self) -> int:
        """Return the GPUs of all its processes."""
        return self.count * self.width


class Roles:
    """The roles of a recipe, by name; iterates over those that have processes."""

    def __init__(self, config: Config) -> None:
        roles = []
        trainer, cluster, learns = config.trainer, config.cluster, config.sft.name == "none"
        pools, by_role = (getattr(cluster, name, None) for name in ("pools", "roles"))
        for role in ROLES:
            *path, key = role.key.split(".")
            section: Any = config
            for part in path:
                section = getattr(section, part, None)
            count, is_vllm = getattr(section, key, 0), isinstance(section, VllmEngineConfig)
            width = getattr(section, "tensor_parallel", role.width)
            shares = role.name == "rollout" and cluster.share_devices and not pools
            if count is None:  # engines: 1 where none can be in the run's process
                count = int(is_vllm or trainer.mode.name != "sync")
                if shares and (ranks := getattr(trainer.strategy, "ranks", 0)):
                    count = max(ranks // width, 1)
            if role.is_needed and not (learns and role.is_needed(config.algorithm)):
                count = 0
            if isinstance(section, RewardConfig):  # scorers
                width = int(section.model.name != "none" and not scorer_sharding(section.model))
            resolved = replace(
                role,
                worker=(role.worker_by_engine or {}).get(getattr(section, "name", ""), role.worker),
                count=count,
                width=width,
                is_vllm=is_vllm,
                pool="policy" if shares else getattr(by_role, role.name, None),
            )
            roles.append(resolved)
        widths: dict[str, int] = {}
        for role in roles:
            if role.gpus:
                widths[role.pool_name] = min(role.width, widths.get(role.pool_name, role.width))
        self._roles = {
            role.name: replace(role, slots=max(role.width // widths.get(role.pool_name, 1), 1))
            for role in roles
        }

    def __getitem__(self, name: str) -> Role:
        return self._roles[name]

    def __contains__(self, name: str) -> bool:
        return self._roles[name].count > 0

    def __iter__(self) -> Iterator[Role]:
        return (role for role in self._roles.values() if role.count)

    def __bool__(self) -> bool:
        return any(self)

    @property
    def shares_devices(self) -> bool:
        """True where engines are on the GPUs of what trains."""
        return "rollout" in self and self["rollout"].pool_name == self["policy"].pool_name

    @property
    def entries(self) -> tuple[Role, ...]:
        """Return all roles, those without processes included."""
        return tuple(self._roles.values())


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Return whether a loss or the rewards have a KL to the reference."""
    kl = algorithm.kl
    return (kl.reward.name, kl.loss.name) != ("none", "none")


ROLES = [
    Role(
        "policy",
        "trainer.strategy.ranks",
        "winnow.ranks.workers:LearnerWorker",
        ("config", "tokenizer", "path", "start", "vocabulary"),
        log_name="learner",
        saved_in=POLICY_STATE,
    ),
    Role(
        "rollout",
        "rollout.engine.processes",
        "",
        ("config",),
        "replicas",
        "engine{s}",
        "engine {number}",
        worker_by_engine={
            "torch": "winnow.rollout.remote_engine:TorchEngineWorker",
            "vllm": "winnow.rollout.vllm.worker:make_vllm_worker",
        },
    ),
    Role(
        "reward",
        "reward.processes",
        "winnow.builders.rewards:make_pipeline_worker",
        ("config", "tokenizer"),
        "pipelines",
        "scorer{s}",
    ),
    Role(
        "environment",
        "environment.processes",
        "winnow.builders.environments:make_environment_pool",
        ("config", "most_calls"),
        "replicas",
        "pool{s} of environments",
        "environment {number}",
        width=0,
    ),
    Role("reward_model", "reward.model.strategy.ranks", "winnow.ranks.workers:RewardModelWorker"),
    Role(
        "judge",
        "reward.judge.engine.processes",
        "winnow.builders.judge:make_judge_worker",
        ("config",),
        "replicas",
        "engine{s} of the judge",
        "judge {number}",
    ),
    Role(
        "reference",
        "reference.strategy.ranks",
        "winnow.ranks.workers:ReferenceWorker",
        ("config", "start", "vocabulary"),
        is_needed=needs_reference,
    ),
    Role(
        "critic",
        "critic.strategy.ranks",
        "winnow.ranks.workers:CriticWorker",
        ("config", "start"),
        is_needed=lambda algorithm: algorithm.advantage.name == "gae",
        saved_in="critic",
    ),
]
"""Each role of a recipe, in the order in which they get GPUs of one machine."""
