"""The whole recipe, and what a run is called, where it lies and what it records."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.base import ADDRESS, PLACE, Change, ImportPath, Options, SecretError, Section
from winnow.config.data import DataConfig, NoDemonstrations, Sft
from winnow.config.environment import Environment, NoEnvironment
from winnow.config.model import ModelConfig, NoWarmStart, ReferenceConfig, WarmStart
from winnow.config.reward import RewardConfig
from winnow.config.rollout import RolloutConfig, SamplingConfig
from winnow.config.trainer import (
    Cluster,
    CriticConfig,
    EvaluationConfig,
    LocalCluster,
    OptimConfig,
    TrainerConfig,
)


def _check_run_name(value: str | None) -> str | None:
    if value is not None and (not value or value[0] == "." or set(value) & set("/\\\0")):
        raise ValueError("must name one folder (not empty, no slash, no leading dot)")
    return value


class RunConfig(Section):
    """Name, folder, seed and machine of a run."""

    name: Annotated[str | None, AfterValidator(_check_run_name), Change.SILENTLY] = None
    """Name of the run's folder; null makes RECIPE-DATE-TIME."""
    description: Annotated[tuple[str, ...], Change.SILENTLY] = ()
    """Lines that a new run prints about itself at its start."""
    dir: Annotated[str, Change.SILENTLY] = "runs"
    """Folder that holds all runs."""
    resume: Annotated[str, Change.SILENTLY] = "auto"
    """auto continues the run of that name if it is unfinished and its recipe the same; never
    starts a new one; a run's or checkpoint's folder is continued."""
    fork: str | None = None
    """Run to start from: its weights, optimizer, data position and groups, at its last checkpoint
    or at RUN@STEP; settings that the state allows may differ."""
    seed: Annotated[int, Change.NEVER] = Field(0, ge=0, lt=2**63)
    """Seed of the data order, of sampling and of shuffles."""
    deterministic: bool = True
    """The same seed gives the same bits, whatever the timing. false: scores take effect on arrival,
    and unfinished answers continue on new weights without a new prefill; a resumed run then has the
    same prompts, groups and counters, but not the same bits."""
    threads: Annotated[int | None, Change.SILENTLY] = Field(None, ge=1)
    """CPU threads for tensor work; null takes all cores. Bits depend on it."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Change.SILENTLY] = "auto"
    """Device of the model; auto takes a GPU if there is one."""


class CustomSink(Section):
    """A custom sink for step records; winnow.observe.sinks has the protocol."""

    path: ImportPath
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""


class TrackingConfig(Section):
    """Names of the run in all trackers, samples sent to them, and time limits."""

    project: str = Field("winnow", min_length=1)
    """Project (wandb, trackio, swanlab) or experiment (mlflow)."""
    name: str | None = Field(None, min_length=1)
    """Name of the run there; null is the name of the run's folder."""
    group: str | None = Field(None, min_length=1)
    """Group of runs, such as the seeds of one setting."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    answers: int = Field(8, ge=0)
    """Rows of each table of sample answers (prompt, answer, parts, score), of those whose text the
    run keeps; 0 sends none."""
    answers_every: int = Field(10, ge=1)
    """Steps between tables of training answers; held-out ones come with each evaluation."""
    timeout_s: float = Field(300.0, gt=0)
    """Seconds after which a tracker or custom sink is disabled if it has not taken a record; the
    run does not wait for it."""
    close_s: float = Field(60.0, gt=0)
    """Seconds at the end of the run for all trackers to send pending data."""


class TensorboardConfig(Section):
    """Options of the tracker tensorboard (winnow-rl[tensorboard])."""

    dir: Annotated[str | None, PLACE] = Field(None, min_length=1)
    """Folder with one event folder per run; null is trackers/ in the run's folder."""


class WandbConfig(Section):
    """Options of the tracker wandb (winnow-rl[wandb]); the key comes from `wandb login` or
    WANDB_API_KEY."""

    mode: Literal["online", "offline"] | None = None
    """offline writes to the run's folder for `wandb sync`; null is WANDB_MODE, else online."""
    entity: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """User or team; null is your default one."""


def _check_mlflow_uri(value: str | None) -> str | None:
    if value is not None and "@" in urlsplit(value).netloc:
        variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise SecretError(f"must not hold a user or a password (set {variables})")
    return value


class MlflowConfig(Section):
    """Options of the tracker mlflow (winnow-rl[mlflow]); user and password come from
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    uri: Annotated[str | None, AfterValidator(_check_mlflow_uri), ADDRESS] = Field(
        None, min_length=1
    )
    """Address of the tracking server or data base; null is MLFLOW_TRACKING_URI, else a data base
    in run.dir/mlflow."""


class TrackioConfig(Section):
    """Options of the tracker trackio (winnow-rl[trackio]); local runs lie in TRACKIO_DIR."""

    space_id: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """Space on the Hugging Face hub that shows the runs, NAME or OWNER/NAME; null keeps them on
    this machine."""
    private: bool | None = None
    """Make a new Space private; null is your organization's default."""


class SwanlabConfig(Section):
    """Options of the tracker swanlab (winnow-rl[swanlab]); the key comes from `swanlab login` or
    SWANLAB_API_KEY."""

    mode: Literal["online", "offline"] | None = None
    """offline writes to the run's folder for `swanlab sync`; null is SWANLAB_MODE, else online."""
    workspace: Annotated[str | None, ADDRESS] = Field(None, min_length=1)
    """User or organization; null is your default one."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab"]


def _check_trackers(names: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
    if len({*names}) < len(names):
        raise ValueError("must name each tracker once")
    return names


class ObserveConfig(Section):
    """Console, metrics.jsonl, rollouts and trackers."""

    console: Literal["auto", "plain", "off"] = "auto"
    """A live table on a terminal and one line a step elsewhere (auto), always lines (plain), or
    nothing (off)."""
    examples: int = Field(0, ge=0)
    """Prompts of each data source that are printed after a step, each with an answer, the ground
    truth and the score; log.txt has them, too. 0 prints none."""
    rollout_text_groups: int | None = Field(None, ge=0)
    """Groups a step, and prompts an evaluation (the same in each), whose text, ids and log-probs
    are kept (seeded choice); null goes by rollout_text_tokens. Scalars are always kept, and all of
    a group of which a scoring failed."""
    rollout_text_tokens: int = Field(100_000, ge=0)
    """Tokens of a step, or of an evaluation, up to which everything is kept of all its answers; of
    more, a seeded choice of groups with as many, and at least 8. A token takes about 8 bytes."""
    image_mib: float = Field(1024, ge=0)
    """Most MiB of the run's folder of images; those beyond are left out of what is kept."""
    trace: bool = True
    """Write trace.json, a timeline of who did what and who waited, for chrome://tracing and
    ui.perfetto.dev; at most 32 MiB."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of a device in TFLOP/s, for model FLOP utilisation; null takes that of a known GPU in
    model.dtype, and leaves it out elsewhere."""
    sinks: tuple[CustomSink, ...] = ()
    """Custom sinks that get every record of metrics.jsonl, such as [{path: mine.py:Table, options:
    {file: x}}]."""
    trackers: Annotated[tuple[TrackerName, ...], AfterValidator(_check_trackers)] = ()
    """Trackers that get curves, the recipe and sample answers, each in its own thread: names,
    optionally with options, as in [tensorboard,{name: wandb, mode: offline}]; docs/trackers.md."""
    tracking: TrackingConfig = TrackingConfig()
    """The names, samples and time limits that all trackers share."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """Options of that tracker."""
    wandb: WandbConfig = WandbConfig()
    """Options of that tracker."""
    mlflow: MlflowConfig = MlflowConfig()
    """Options of that tracker."""
    trackio: TrackioConfig = TrackioConfig()
    """Options of that tracker."""
    swanlab: SwanlabConfig = SwanlabConfig()
    """Options of that tracker."""


class EnvironmentValue(NamedTuple):
    """A value of a recipe that was written with `${oc.env:NAME}`, as secrets are."""

    text: str
    """The value as it was written."""
    value: Any
    """The value as it was validated, in plain values."""


class Config(Section):
    """A validated recipe."""

    _from_environment: dict[tuple[str, ...], EnvironmentValue] = PrivateAttr(default_factory=dict)

    run: RunConfig = RunConfig()
    """Name, folder, seed and machine."""
    model: Annotated[ModelConfig, Change.NEVER] = ModelConfig()
    """The model."""
    warm_start: Annotated[WarmStart, Change.NEVER] = NoWarmStart()
    """A model made before training."""
    sft: Sft = NoDemonstrations()
    """Supervised fine-tuning on demonstrations, instead of rewards."""
    data: Annotated[DataConfig, Change.NEVER] = DataConfig()
    """Prompts."""
    environment: Annotated[Environment, Change.BETWEEN_GROUPS] = NoEnvironment()
    """Counterpart of the policy in conversations."""
    reward: RewardConfig = RewardConfig()
    """Scores."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of answers."""
    sampling: SamplingConfig = SamplingConfig()
    """Choice of the groups that are trained."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The loss."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen policy that KL terms measure from."""
    critic: CriticConfig = CriticConfig()
    """The value model that GAE needs."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    trainer: TrainerConfig = TrainerConfig()
    """Steps, updates and checkpoints."""
    cluster: Annotated[Cluster, Change.ON_RESUME] = LocalCluster()
    """Machines of the processes."""
    evaluation: Annotated[EvaluationConfig, Change.ON_RESUME] = EvaluationConfig()
    """Held-out prompts."""
    observe: Annotated[ObserveConfig, Change.ON_RESUME] = ObserveConfig()
    """Records of the run."""

    @model_validator(mode="before")
    @classmethod
    def _choose_episodes(cls, values: Any) -> Any:
        """Fill in rows of seeds and the environment's reward for environments that need no data."""
        keys = "environment", "data", "reward"
        parts = [values.get(key) for key in keys] if isinstance(values, dict) else [None]
        if not all(isinstance(part, dict) for part in parts):
            return values
        environment, data, reward = cast("list[dict[str, Any]]", parts)
        needs_data = environment["name"] not in ("textarena", "gymnasium")
        if needs_data or data["train_files"] or data["task"]["name"] not in ("none", "episodes"):
            return values
        if data["task"]["name"] == "none":
            values = {**values, "data": {**data, "task": {"name": "episodes"}}}
        if reward["manager"]["name"] == "auto" and reward["function"]["path"] is None:
            values = {**values, "reward": {**reward, "manager": {"name": "environment"}}}
        return values

    @property
    def from_environment(self) -> dict[tuple[str, ...], EnvironmentValue]:
        """The values that came from the environment, by path."""
        return self._from_environment
