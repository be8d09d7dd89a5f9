"""How answers are scored and what is added to the task's reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from winnow.config.base import Section
from winnow.config.judge import Judge, NoJudge
from winnow.config.reward_manager import AutoManager, RewardManager
from winnow.config.reward_model import NoRewardModel, RewardModel, free_part
from winnow.config.sandbox import SandboxChoice, SandboxConfig


class OverlongConfig(Section):
    """DAPO's soft overlong penalty, added to the task reward in training only."""

    enabled: bool = False
    """Whether long answers are penalised."""
    buffer_tokens: int = Field(4096, ge=1)
    """The penalty falls linearly over these last tokens before the response limit."""
    factor: float = Field(1.0, gt=0)
    """Its size at the limit."""


class CosineConfig(Section):
    """A reward by length that falls along a cosine where an answer is right and rises where it is
    wrong (arXiv 2502.03373), in training only. There it replaces the task's reward:
    reward.weights.task=0. The defaults are the authors'."""

    enabled: bool = False
    """Whether it is a part of the reward."""
    weight: float = 1.0
    """Of this part in the reward."""
    right_short: float = 2.0
    """Reward of a right answer of no length."""
    right_long: float = 1.0
    """Reward of a right answer as long as the limit."""
    wrong_short: float = -10.0
    """Reward of a wrong answer of no length."""
    wrong_long: float = 0.0
    """Reward of a wrong answer as long as the limit."""
    exceeded: float = -10.0
    """Reward of any answer that has reached the limit."""
    limit_tokens: int | None = Field(None, ge=1)
    """The limit; null is rollout.max_response_tokens."""


class PartConfig(Section):
    """A scorer beside the one that the data source chooses."""

    scorer: str
    """A built-in scorer by name."""
    weight: float = 1.0
    """Of its score in the reward; 0 only measures and filters."""
    in_evaluation: bool = False
    """Score held-out answers, too; their accuracy remains the source's scorer's."""


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


PartName = Annotated[str, AfterValidator(free_part)]


class RewardConfig(Section):
    """Scorers, shaping, and what happens when scoring fails."""

    function: UserFunction = UserFunction()
    """Your own reward."""
    scorers: dict[str, str] = Field(default_factory=dict)
    """Scorer by data source, over the built-in routing (`*` at the end for prefixes); none leaves
    a source to the reward model or the judge alone."""
    processes: int = Field(0, ge=0)
    """Processes apart that score a run's answers, each with all that this section names: the
    manager and its own workers, the reward model, the judge's client. Limits over the whole run are
    shared among them. 0: the run's own process does it all, as it always does for winnow eval and
    winnow reward."""
    manager: RewardManager = AutoManager()
    """Who calls what scores, and where."""
    model: RewardModel = NoRewardModel()
    """A model that scores, too."""
    judge: Judge = NoJudge()
    """A language model that is asked over HTTP, too."""
    weights: PartWeights = PartWeights()
    """How much the parts of the reward count; reward.model.weight and reward.judge.weight are
    the models'."""
    workers: int | None = Field(None, ge=0)
    """Processes that score, of each of reward.processes. null: half of the cores, where anything
    scores apart. With reward/manager=auto 0 keeps everything in the process that asks, a number
    takes rules apart."""
    timeout_s: float = Field(10.0, gt=0)
    """Seconds that a worker has for one answer."""
    memory_mb: int = Field(2048, ge=64)
    """Resident memory that a worker may use, in MiB, what your file imports included."""
    sandbox: SandboxChoice = SandboxConfig()
    """Where the code in an answer runs."""
    parts: dict[PartName, PartConfig] = Field(default_factory=dict)
    """Further scorers by the name of their part, each with its weight."""
    overlong: OverlongConfig = OverlongConfig()
    """Length shaping near the limit."""
    cosine: CosineConfig = CosineConfig()
    """Length shaping by right and wrong."""
    on_failure: Literal["wrong", "drop_group", "fatal"] = "wrong"
    """A failed scoring counts as a wrong answer, drops its group, or stops the run. Where a sandbox
    failed, `wrong` drops the group, too."""
    max_failure_share: float = Field(0.2, ge=0, le=1)
    """Share of a step's answers whose scoring may fail before the run stops."""
