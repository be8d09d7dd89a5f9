"""The course of a run: steps, mini-batches, memory bounds, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from winnow.config.base import Section


class WholeModels(Section):
    """Whole models in the run's own process."""

    name: Literal["single"] = "single"


class Fsdp2(Section):
    """Models sharded over several processes (PyTorch's `fully_shard`); see docs/ranks.md."""

    name: Literal["fsdp2"] = "fsdp2"
    ranks: int = Field(2, ge=1)
    """Processes, each with its share of the weights and of the work."""
    replicas: int = Field(1, ge=1)
    """Groups of ranks that hold all weights each (HSDP); a divisor of ranks."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights after its forward pass and gather them again for the backward
    pass; false keeps them: faster, more memory."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and step there."""
    bucket_mb: int = Field(512, ge=1)
    """Weights that are whole at once while they are sent to the engine."""


Strategy = Annotated[WholeModels | Fsdp2, Field(discriminator="name")]


class TrainerConfig(Section):
    """How many steps, how they are cut into updates, when to save."""

    steps: int = Field(100, ge=1)
    """Steps to train; each ends with new weights in the engine."""
    mini_batch_groups: int | None = Field(None, ge=1)
    """Groups an update (one optimizer step); null makes one update a step."""
    epochs: int = Field(1, ge=1)
    """Passes over a step's groups."""
    strategy: Strategy = WholeModels()
    """How the models are held."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Packed tokens run at once; bounds memory, never changes what is learnt."""
    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits exist at once; null chooses by the vocabulary, 128 MiB of them."""
    save_every: int | None = Field(10, ge=1)
    """Steps between checkpoints, of which a crash costs what came after the last; null saves
    only at the end."""
    keep_last: int | None = Field(2, ge=1)
    """Checkpoints kept, the newest ones; null keeps all."""
    keep_every: int | None = Field(None, ge=1)
    """Keep those of every so many steps as well."""
    keep_best: str | None = None
    """Keep that with the largest value of this figure as well, such as eval/SOURCE/pass@1."""
    checkpoint_url: str | None = None
    """Where the run's folder is copied after each checkpoint, and fetched from when it is not
    here: s3://BUCKET/PATH, gs://, hdfs://, file://."""
    max_restarts: int = Field(0, ge=0)
    """Times a run that was killed, crashed or hung is started again; 0 runs it unsupervised."""
    stall_timeout_s: float = Field(1800.0, gt=0)
    """Seconds without a token, an update or a step after which a supervised run has hung."""
