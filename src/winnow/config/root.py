"""The whole recipe: one field a section, nothing of its own."""

from __future__ import annotations

from winnow.config.algorithm import AlgorithmConfig
from winnow.config.base import Section
from winnow.config.cluster import Cluster, LocalCluster
from winnow.config.critic import CriticConfig
from winnow.config.data import DataConfig
from winnow.config.evaluation import EvaluationConfig
from winnow.config.model import ModelConfig
from winnow.config.observe import ObserveConfig
from winnow.config.optim import OptimConfig
from winnow.config.reference import ReferenceConfig
from winnow.config.reward import RewardConfig
from winnow.config.rollout import RolloutConfig
from winnow.config.run import RunConfig
from winnow.config.sampling import SamplingConfig
from winnow.config.trainer import TrainerConfig
from winnow.config.warm_start import NoWarmStart, WarmStart


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
    """Which groups are trained."""
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
    """Where its processes are."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out prompts."""
    observe: ObserveConfig = ObserveConfig()
    """What is written down."""
