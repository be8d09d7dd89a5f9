"""The whole recipe: one field a section, nothing of its own."""

from __future__ import annotations

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.base import Section
from winnow.config.data import DataConfig
from winnow.config.model import ModelConfig, NoWarmStart, ReferenceConfig, WarmStart
from winnow.config.reward import RewardConfig
from winnow.config.rollout import RolloutConfig, SamplingConfig
from winnow.config.run import ObserveConfig, RunConfig
from winnow.config.trainer import (
    Cluster,
    CriticConfig,
    EvaluationConfig,
    LocalCluster,
    OptimConfig,
    TrainerConfig,
)


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
