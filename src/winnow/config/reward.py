"""How answers are scored and what is added to the task's reward."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from winnow.config.base import Section
from winnow.config.judge import Judge, NoJudge
from winnow.config.reward_model import NoRewardModel, RewardModel
from winnow.config.sandbox import SandboxConfig


class OverlongConfig(Section):
    """DAPO's soft overlong penalty, added to the task reward in training only."""

    enabled: bool = False
    """Whether long answers are penalised."""
    buffer_tokens: int = Field(4096, ge=1)
    """The penalty falls linearly over these last tokens before the response limit."""
    factor: float = Field(1.0, gt=0)
    """Its size at the limit."""


class UserFunction(Section):
    """A Python file with verl's `compute_score`; it then scores every source."""

    path: str | None = None
    """The file; null uses the built-in scorers."""
    name: str = "compute_score"
    """The function in it, sync or async."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to each call."""


class PartWeights(Section):
    """The reward is the sum of its parts, each by its weight."""

    task: float = 1.0
    """Of the rule's score, or your function's; 0 only measures and filters."""


class RewardConfig(Section):
    """Scorers, shaping, and what happens when scoring fails."""

    function: UserFunction = UserFunction()
    """Your own reward."""
    scorers: dict[str, str] = Field(default_factory=dict)
    """Scorer by data source, over the built-in routing (`*` at the end for prefixes); none leaves
    a source to the reward model or the judge alone."""
    model: RewardModel = NoRewardModel()
    """A model that scores, too."""
    judge: Judge = NoJudge()
    """A language model that is asked over HTTP, too."""
    weights: PartWeights = PartWeights()
    """How much the parts of the reward count; reward.model.weight and reward.judge.weight are
    the models'."""
    workers: int | None = Field(None, ge=0)
    """Processes that score; 0 scores in the run's own process, without limits of time and memory.
    null: half of the cores for your own function, none for quick built-in rules."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds that a worker has for one answer."""
    memory_mb: int = Field(2048, ge=64)
    """Resident memory that a worker may use, in MiB, what your file imports included."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the code in an answer runs."""
    overlong: OverlongConfig = OverlongConfig()
    """Length shaping."""
    on_failure: Literal["wrong", "drop_group", "fatal"] = "wrong"
    """A failed scoring counts as a wrong answer, drops its group, or stops the run."""
    max_failure_share: float = Field(0.2, ge=0, le=1)
    """Share of a step's answers whose scoring may fail before the run stops."""
