"""Dynamic sampling: how many groups start, which are kept, when a step is full."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Options, Section, UserObject


class NoFilter(Section):
    """Every scored group qualifies."""

    name: Literal["none"] = "none"


class VarianceFilter(Section):
    """A group qualifies when its answers differ in a metric; groups of one pass."""

    name: Literal["variance"] = "variance"
    metric: str = "accuracy"
    """accuracy, task_reward, reward (shaped), or a number that the scorer gives."""


class BandFilter(Section):
    """A group qualifies when the mean of a metric lies within a band, bounds included."""

    name: Literal["band"] = "band"
    metric: str = "accuracy"
    """accuracy, task_reward, reward (shaped), or a number that the scorer gives."""
    low: float = 0.0
    """Lowest mean that passes."""
    high: float = 1.0
    """Highest mean that passes."""


class CustomFilter(Section):
    """A filter of your own, given by its place; docs/sampling.md shows its signature."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the function or class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the function or class."""


Filter = Annotated[
    NoFilter | VarianceFilter | BandFilter | CustomFilter, Field(discriminator="name")
]


class SamplingConfig(Section):
    """Rules of the dynamic sampler (see docs/sampling.md)."""

    groups_per_step: int = Field(64, ge=1)
    """N: qualified groups trained a step."""
    filter: Filter = VarianceFilter()
    """Which groups carry signal."""
    lookahead: float = Field(0.0, ge=0)
    """Admit for this many further steps while waiting; at most max_staleness."""
    max_staleness: int = Field(1, ge=0)
    """Steps a group may wait for its training. 0 drops what is later than the cut."""
    max_groups_per_step: int | None = Field(None, ge=1)
    """Groups looked at for one step; null is 10*N."""
    on_bound: Literal["short", "stop"] = "short"
    """At that bound: train what qualified, or stop with the accepted groups saved."""
    max_empty_steps: int = Field(3, ge=1)
    """Bounds met in a row without one qualified group after which the run stops."""
    commit: Literal["admission_order", "completion_order"] = "admission_order"
    """Which qualified groups a step takes. completion_order favours short answers: biased."""
    max_attempts: int = Field(3, ge=1)
    """Times an answer is retried after an engine failure before its group counts as failed."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """Seconds without any progress of the engine after which its answers are re-dispatched."""
    score_lag_ticks: int | None = Field(None, ge=0)
    """Deterministic mode: decode ticks from an answer's end to the moment its score is seen (with
    several engines, when they are next looked at: docs/rollouts.md). Scorers have that long before
    anything waits for them. null: 16 where they run beside the engine (workers, async functions),
    else 0; a resumed run keeps what it began with."""
    rate_decay: float = Field(0.98, gt=0, lt=1)
    """Memory of the estimated chance that a group qualifies, for each group seen."""
