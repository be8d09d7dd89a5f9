"""The course of a run: steps, mini-batches, memory bounds, checkpoints."""

from __future__ import annotations

from pydantic import Field

from winnow.config.base import Section


class TrainerConfig(Section):
    """How many steps, how they are cut into updates, when to save."""

    steps: int = Field(100, ge=1)
    """Steps to train; each ends with new weights in the engine."""
    mini_batch_groups: int | None = Field(None, ge=1)
    """Groups an update (one optimizer step); null makes one update a step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Packed tokens run at once; bounds memory, never changes what is learnt."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at once."""
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; null saves only at the end."""
