"""What a run writes down."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from winnow.config.base import Options, Section, UserObject


class CustomSink(Section):
    """A sink of your own for the records of steps; winnow.observe.sinks has the protocol."""

    path: UserObject
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""


class ObserveConfig(Section):
    """Console, metrics.jsonl and rollouts."""

    console: Literal["auto", "plain", "off"] = "auto"
    """A live table on a terminal, one line a step elsewhere (auto); always lines; or nothing."""
    rollout_text_groups: int = Field(8, ge=0)
    """Groups a step, and prompts an evaluation (the same in each), whose text, ids and log-probs
    are kept (seeded choice); scalars always."""
    peak_tflops: float | None = Field(None, gt=0)
    """The device's peak in TFLOP/s, for model FLOP utilisation; null leaves that out."""
    sinks: tuple[CustomSink, ...] = ()
    """Sinks of your own that get every record beside metrics.jsonl, such as
    [{path: mine.py:Wandb, options: {project: x}}]."""
