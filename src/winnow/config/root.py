"""The whole recipe, and what a run is called, where it lies and what it records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.base import Options, Section, UserObject
from winnow.config.data import DataConfig
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


class RunConfig(Section):
    """Name, folder, seed and machine of a run."""

    name: str | None = None
    """Name of the run's folder; null makes RECIPE-DATE-TIME."""
    description: tuple[str, ...] = ()
    """Lines that a new run prints about itself at its start."""
    dir: str = "runs"
    """Folder that holds all runs."""
    resume: str = "auto"
    """auto continues the run of that name if it is unfinished and its recipe the same; never
    starts a new one; a run's or checkpoint's folder is continued."""
    fork: str | None = None
    """Run that a new one goes on from: its weights, optimizer, place in the data and groups, at its
    last checkpoint or that of RUN@STEP; settings that the state can hold may differ."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the data order, of sampling and of shuffles."""
    deterministic: bool = True
    """The same seed gives the same bits, however long anything takes. false: scores count as soon
    as they are there, and answers under way go on across new weights without a new prefill; a
    resumed run then has the same prompts, groups and counters, but not the same bits."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for tensor work; null takes all cores. Bits depend on it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; auto takes a GPU if there is one."""

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str | None) -> str | None:
        if value is not None and (not value or value[0] == "." or set(value) & set("/\\\0")):
            raise ValueError("must name one folder (not empty, no slash, no dot in front)")
        return value


class CustomSink(Section):
    """A sink of your own for the records of steps; winnow.observe.sinks has the protocol."""

    path: UserObject
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""


class ObserveConfig(Section):
    """Console, metrics.jsonl and rollouts."""

    console: Literal["auto", "plain", "off"] = "auto"
    """A live table on a terminal and one line a step elsewhere (auto), always lines (plain), or
    nothing (off)."""
    rollout_text_groups: int = Field(8, ge=0)
    """Groups a step, and prompts an evaluation (the same in each), whose text, ids and log-probs
    are kept (seeded choice); scalars are always kept."""
    trace: bool = True
    """Write trace.json, a timeline of who did what and who waited, for chrome://tracing and
    ui.perfetto.dev; at most 32 MiB."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of the device in TFLOP/s, for model FLOP utilisation; null leaves that out."""
    sinks: tuple[CustomSink, ...] = ()
    """Sinks of your own that get every record beside metrics.jsonl, such as
    [{path: mine.py:Wandb, options: {project: x}}]."""


class Config(Section):
    """A validated recipe."""

    run: RunConfig = RunConfig()
    """Name, folder, seed and machine."""
    model: ModelConfig = ModelConfig()
    """The model."""
    warm_start: WarmStart = NoWarmStart()
    """A start made on the spot."""
    data: DataConfig = DataConfig()
    """Prompts."""
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
    """The course of the run."""
    cluster: Cluster = LocalCluster()
    """Machines of its processes."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out prompts."""
    observe: ObserveConfig = ObserveConfig()
    """Records of the run."""
