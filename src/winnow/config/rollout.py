"""How answers are sampled and by which engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Options, Section, UserObject


class TorchEngineConfig(Section):
    """The embedded engine: static KV cache, continuous batching, weights shared in process."""

    name: Literal["torch"] = "torch"
    processes: int = Field(0, ge=0)
    """Engines in processes of their own; 0 writes in the run's process, with its own weights."""
    slots: int = Field(256, ge=1)
    """Answers that an engine writes at once."""
    prefill_tokens: int = Field(8192, ge=1)
    """Most prompt tokens prefilled between two decode ticks."""


class CustomEngine(Section):
    """An engine of your own, given by its place; docs/rollouts.md shows its protocol."""

    name: Literal["custom"] = "custom"
    path: UserObject
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""
    processes: int = Field(0, ge=0)
    """Engines in processes of their own; 0 runs one in the run's process."""


Engine = Annotated[TorchEngineConfig | CustomEngine, Field(discriminator="name")]


class RolloutConfig(Section):
    """Sampling of answers for training. Evaluation has its own settings."""

    engine: Engine = TorchEngineConfig()
    """What writes tokens."""
    n: int = Field(8, ge=1)
    """Answers a prompt (the group's size)."""
    max_response_tokens: int = Field(1024, ge=1)
    """Response limit; a longer answer is truncated."""
    temperature: float = Field(1.0, gt=0)
    """Every policy is softmax(logits / temperature), in the loss too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; below 1 the sampler's support differs from the policy's."""
    top_k: int = Field(0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Least probability relative to the likeliest token."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, special tokens too, beside the tokenizer's EOS."""
    support: Literal["error", "ignore"] = "error"
    """What to do when top_p, top_k or min_p truncate the sampler's support: refuse, or train
    on although old and behaviour policies then differ."""
