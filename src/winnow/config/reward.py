"""Scoring of answers: functions, managers, sandboxes, and the parts of the reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from winnow.config.base import (
    ADDRESS,
    CODE,
    PROGRAM,
    Change,
    EnvironmentName,
    ImportPath,
    Section,
    http_url,
)
from winnow.config.judge import (
    Judge,
    NoJudge,
    NoRewardModel,
    PartName,
    RewardModel,
    scorer_sharding,
)


class AutoManager(Section):
    """Your function runs in workers, fast built-in rules in the run's process."""

    name: Literal["auto"] = "auto"


class NaiveManager(Section):
    """Scores answers one by one in the run's process, without limits on time and memory."""

    name: Literal["naive"] = "naive"


class ParallelManager(Section):
    """Scores everything in worker processes, with limits for each answer."""

    name: Literal["parallel"] = "parallel"


class BatchManager(Section):
    """Passes waiting answers to your function in one call, in a worker."""

    name: Literal["batch"] = "batch"
    max_answers: int = Field(64, ge=1)
    """Maximum number of answers per call; reward.timeout_s limits the whole call."""


class DapoManager(Section):
    """As auto, with reward.overlong; logs `overlong` and `overlong_reward` as verl's dapo does."""

    name: Literal["dapo"] = "dapo"


class RemoteManager(Section):
    """A service over HTTP scores every source."""

    name: Literal["remote"] = "remote"
    url: Annotated[str, http_url("use reward.manager.token_env", with_query=True), ADDRESS]
    """Address to which answers are posted, with verl's arguments as JSON."""
    token_env: EnvironmentName = None
    """Environment variable with the service's bearer token."""
    max_concurrent: int = Field(64, ge=1)
    """Maximum number of concurrent requests of the whole run."""
    tries: int = Field(3, ge=1)
    """Tries of each request, at statuses 429, 502, 503 and 504 and where the connection fails."""


class CustomManager(Section):
    """A custom class scores every source."""

    name: Literal["custom"] = "custom"
    path: ImportPath
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the class."""


class EnvironmentManager(Section):
    """The environment's rewards are the whole reward: nothing else scores the conversation."""

    name: Literal["environment"] = "environment"


RewardManager = Annotated[
    AutoManager
    | NaiveManager
    | ParallelManager
    | BatchManager
    | DapoManager
    | RemoteManager
    | CustomManager
    | EnvironmentManager,
    Field(discriminator="name"),
]


UNROUTED = "remote", "custom", "environment"
"""Managers that score every source, without scorers by data source."""


class _ProgramLimits(Section):
    """Limits of programs in any sandbox."""

    time_s: float = Field(5.0, gt=0, le=3600)
    """Seconds for one program: one test case with standard input, one call of a function."""
    sample_s: float = Field(30.0, gt=0, le=3600)
    """Seconds for all test cases of an answer; those not run by then count as not passed."""
    output_kb: int = Field(1024, ge=1)
    """Standard output and error together, in KiB; a program that writes more is ended."""
    credit: Literal["all", "share"] = "all"
    """Reward 1 for passing all test cases and else 0, or the share of them that pass."""


class SandboxConfig(_ProgramLimits):
    """The local sandbox, and the limits of a program in it."""

    name: Literal["local"] = "local"
    backend: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """auto takes bubblewrap, Landlock where namespaces are blocked, and refuses without either."""
    python: Annotated[str, PROGRAM] = "/usr/bin/python3"
    """Python interpreter; one outside /usr is bound read-only, with its library."""
    max_concurrent: int | None = Field(None, ge=1, le=256)
    """Maximum number of concurrent programs of the whole run; null is the number of cores."""
    memory_mb: int = Field(512, ge=64)
    """Address space of one process, in MiB; times `processes` bounds a program's memory."""
    processes: int = Field(8, ge=4, le=1024)
    """Processes and threads of a program, three of Winnow's included."""
    open_files: int = Field(64, ge=32)
    """Maximum number of open files per process."""
    scratch_mb: int = Field(16, ge=1)
    """Size of a program's folder in memory, in MiB (bubblewrap only)."""


class FusionConfig(_ProgramLimits):
    """A service that speaks SandboxFusion's HTTP API, such as `winnow sandbox serve`."""

    name: Literal["fusion"] = "fusion"
    url: Annotated[
        str,
        http_url("use reward.sandbox.token_env"),
        AfterValidator(lambda url: url.rstrip("/").removesuffix("/run_code")),
        ADDRESS,
    ]
    """Address of the service, such as http://127.0.0.1:8080; /run_code is appended."""
    token_env: EnvironmentName = None
    """Name of the environment variable that holds its token; null sends none."""
    max_concurrent: int = Field(64, ge=1, le=4096)
    """Maximum number of concurrent requests of the whole run."""
    compile_s: float = Field(10.0, gt=0, le=3600)
    """Seconds to compile a program; a request may take this, the program's time and 10 s."""
    memory_mb: int = Field(1024, ge=64)
    """Memory of a program, in MB, as the service counts it."""


class OverlongConfig(Section):
    """DAPO's soft overlong penalty, added to the task reward in training only."""

    enabled: bool = False
    """Penalise long answers."""
    buffer_tokens: int = Field(4096, ge=1)
    """Last tokens before the response limit, over which the penalty falls linearly."""
    factor: float = Field(1.0, gt=0)
    """Size of the penalty at the limit."""


class CosineConfig(Section):
    """A reward by length that falls along a cosine where an answer is right and rises where it is
    wrong (arXiv 2502.03373), in training only. There it replaces the task's reward:
    reward.weights.task=0. The defaults are the authors'."""

    enabled: bool = False
    """Make it a part of the reward."""
    weight: float = 1.0
    """Weight of this part in the reward."""
    right_short: float = 2.0
    """Reward of a right answer of length 0."""
    right_long: float = 1.0
    """Reward of a right answer at the limit."""
    wrong_short: float = -10.0
    """Reward of a wrong answer of length 0."""
    wrong_long: float = 0.0
    """Reward of a wrong answer at the limit."""
    exceeded: float = -10.0
    """Reward of any answer that reaches the limit."""
    limit_tokens: int | None = Field(None, ge=1)
    """Limit in tokens; null is rollout.max_response_tokens."""


class UserFunction(Section):
    """A Python file with a reward function in verl's, TRL's or Winnow's signature; it then scores
    every source."""

    path: Annotated[str | None, CODE] = None
    """Path of the file; null uses the built-in scorers."""
    name: str = "compute_score"
    """Name of the function in it, sync or async."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to each call."""


class PartConfig(UserFunction):
    """An additional scorer, built in or a function of yours, next to the one that the data source
    chooses."""

    scorer: str | None = None
    """Name of a built-in scorer, where there is no path."""
    weight: float = 1.0
    """Weight of the scorer's score in the reward; 0 only measures and filters."""
    in_evaluation: bool = False
    """Score held-out answers, too; their accuracy remains the source's scorer's."""


class PartWeights(Section):
    """The reward is the sum of its parts, each by its weight."""

    task: float = 1.0
    """Weight of the rule's score, or your function's; 0 only measures and filters."""
    environment: float = 1.0
    """Weight of the environment's rewards of a conversation's turns."""


class RewardConfig(Section):
    """Scorers, shaping, and the handling of failed scorings."""

    function: UserFunction = UserFunction()
    """A custom reward function."""
    scorers: dict[str, str] = Field(default_factory=dict)
    """Scorer by data source, over the built-in routing (`*` at the end for prefixes); none leaves
    a source to the reward model or the judge alone."""
    processes: Annotated[int, Change.ON_RESUME] = Field(0, ge=0)
    """Number of reward processes; each runs everything in this section: the manager and its
    workers, the reward model, the judge's client. They share the limits that apply to the whole
    run. 0 scores in the run's process, as winnow eval and winnow reward always do."""
    manager: RewardManager = AutoManager()
    """Manager that calls the scorers."""
    model: RewardModel = NoRewardModel()
    """Reward model."""
    judge: Judge = NoJudge()
    """Language-model judge."""
    weights: PartWeights = PartWeights()
    """Weights of the parts of the reward; reward.model.weight and reward.judge.weight are
    the models'."""
    workers: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=0)
    """Worker processes that score, per reward process. null: half of the cores if anything is
    scored in workers. With reward/manager=auto 0 scores in the calling process, and a number moves
    rules to workers, too."""
    timeout_s: Annotated[float, Change.ON_RESUME] = Field(10.0, gt=0)
    """Seconds that a worker has for one answer."""
    memory_mb: Annotated[int, Change.ON_RESUME] = Field(2048, ge=64)
    """Resident memory that a worker may use, in MiB, what your file imports included."""
    sandbox: Annotated[SandboxConfig | FusionConfig, Field(discriminator="name")] = SandboxConfig()
    """Sandbox that runs the code in an answer."""
    parts: dict[PartName, PartConfig] = Field(default_factory=dict)
    """Further scorers by the name of their part, each with its weight."""
    overlong: OverlongConfig = OverlongConfig()
    """Length shaping near the limit."""
    cosine: CosineConfig = CosineConfig()
    """Length shaping by right and wrong answers."""
    on_failure: Literal["wrong", "drop_group", "fatal"] = "drop_group"
    """A failed scoring drops its group, which says nothing of the answer; or it counts as a wrong
    answer, or stops the run. Where a sandbox failed, `wrong` drops the group, too."""
    max_failure_share: float = Field(0.2, ge=0, le=1)
    """Share of a step's answers whose scoring may fail before the run stops."""

    def conflicts(self) -> Iterator[str]:
        yield from self._scorer_conflicts()
        yield from self._manager_conflicts()
        if self.processes and scorer_sharding(self.model) is not None:
            yield (
                f"reward.processes={self.processes} does not support reward/model/strategy=fsdp2; "
                "set reward.processes=0 (reward.workers still runs your function in workers), or "
                "reward/model/strategy=single"
            )
        if self.processes and self.judge.name == "engine":
            yield (
                f"reward.processes={self.processes} does not support reward/judge=engine; set "
                "reward.processes=0 (reward.workers still runs your function in workers), or "
                "reward/judge=openai"
            )
        for (section, key), limit in shared_limits(self).items():
            if limit < self.processes:
                yield (
                    f"reward.processes={self.processes} is more than reward.{section}.{key}="
                    f"{limit}, which they share; set reward.processes to {limit} or less, or raise "
                    "the limit"
                )

    def _scorer_conflicts(self) -> Iterator[str]:
        sources = [source for source, scorer in self.scorers.items() if scorer == "none"]
        if sources and (self.model, self.judge) == (NoRewardModel(), NoJudge()):
            yield (
                f"reward.scorers.{sources[0]}=none needs a reward model or a judge, got "
                "reward/model=none and reward/judge=none; name a scorer, or set "
                "reward/model=sequence_classifier or reward/judge=openai or engine"
            )
        if self.function.path is not None and self.scorers:
            yield (
                f"reward.function.path={self.function.path} scores every source, so reward.scorers "
                f"({', '.join(self.scorers)}) is unused; set reward.function.path=null, or leave "
                "reward.scorers empty"
            )
        for name, part in self.parts.items():
            if (part.scorer is None) == (part.path is None):
                what = "both" if part.path else "neither"
                yield (
                    f"reward.parts.{name} needs a built-in scorer or a path of your function, got "
                    f"{what}; set reward.parts.{name}.scorer or reward.parts.{name}.path"
                )
        names = {f"reward.parts.{name}": name for name in self.parts}
        for key, model in (("reward.model.part", self.model), ("reward.judge.part", self.judge)):
            if isinstance(model, NoRewardModel | NoJudge):
                continue
            if same := [other for other, name in names.items() if name == model.part]:
                with_name = f"={model.part}" if same[0].endswith(".part") else ""
                yield f"{key}={model.part} and {same[0]}{with_name} have the same name; rename one"
            names[key] = model.part

    def _manager_conflicts(self) -> Iterator[str]:
        manager, workers, path = self.manager, self.workers, self.function.path
        both = f"reward/manager={manager.name} and reward.workers={workers}"
        if isinstance(manager, NaiveManager) and workers:
            yield (
                f"{both}: naive has no workers; set reward.workers=null, or reward/manager=parallel"
            )
        if isinstance(manager, ParallelManager | BatchManager) and workers == 0:
            yield f"{both}: it scores in workers; set reward.workers to null or at least 1"
        if isinstance(manager, BatchManager) and path is None:
            yield (
                "reward/manager=batch needs a reward function, got reward.function.path=null; set "
                "reward.function.path, or reward/manager=auto"
            )
        if isinstance(manager, RemoteManager | CustomManager | EnvironmentManager):
            if workers and not self.parts:
                yield f"{both}: nothing is scored in workers; set reward.workers=null"
            if path is not None:
                yield (
                    f"reward/manager={manager.name} and reward.function.path={path} both score; "
                    "set reward.function.path=null, or reward/manager=auto"
                )
        if isinstance(manager, DapoManager) and not self.overlong.enabled:
            yield (
                "reward/manager=dapo needs reward.overlong, got reward.overlong.enabled=false; set "
                "it to true, or reward/manager=auto"
            )

    def functions(self) -> dict[str, UserFunction]:
        """Return the user's functions by their sections' keys."""
        parts = {f"reward.parts.{name}": part for name, part in self.parts.items()}
        sections = {"reward.function": self.function, **parts}
        return {key: section for key, section in sections.items() if section.path is not None}

    def part_weights(self) -> dict[str, float]:
        """Return the weight of each part that this section adds to the task's, by its key."""
        weights = {f"reward.parts.{name}.weight": part.weight for name, part in self.parts.items()}
        if self.model.name != "none":
            weights["reward.model.weight"] = self.model.weight
        if self.judge.name != "none":
            weights["reward.judge.weight"] = self.judge.weight
        if self.cosine.enabled:
            weights["reward.cosine.weight"] = self.cosine.weight
        return weights


_SHARED_LIMITS = (
    ("judge", "max_concurrent"),
    ("judge", "requests_per_minute"),
    ("judge", "tokens_per_minute"),
    ("manager", "max_concurrent"),
    ("sandbox", "max_concurrent"),
)
"""Limits over a whole run: section under `reward`, and its key."""


def shared_limits(config: RewardConfig) -> dict[tuple[str, str], int]:
    """Return the limits of a run that its reward processes share, by section and key."""
    limits = {place: getattr(getattr(config, place[0]), place[1], None) for place in _SHARED_LIMITS}
    return {place: limit for place, limit in limits.items() if limit is not None}


def config_per_process(config: RewardConfig) -> RewardConfig:
    """Return the section for one reward process, with its part of each shared limit."""
    changed: dict[str, Any] = {}
    for (name, key), limit in shared_limits(config).items():
        section = changed.get(name, getattr(config, name))
        changed[name] = section.model_copy(update={key: limit // config.processes})
    return config.model_copy(update=changed)
