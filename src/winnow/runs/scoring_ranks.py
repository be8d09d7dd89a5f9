"""A reward model that is sharded over ranks of its own, which do nothing but score.

The run's process makes tokens of answers (`ModelScorer`), and asks all ranks at once for the scores
of those that wait. Each rank runs its share of them: a sequence's score depends neither on the
number of ranks nor on which of them runs it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from winnow.config.judge import SequenceClassifier, sharding_of
from winnow.config.root import Config
from winnow.errors import ModelError
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh
from winnow.learning.strategy import Strategy, local, score_sequences
from winnow.models.causal_lm import torch_dtype
from winnow.models.value import load_reward_model
from winnow.types import IntArray
from winnow.workers.group import WorkerGroup
from winnow.workers.host import RankInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a reward model that whoever makes its tokens needs."""

    embedded_tokens: int
    """Ids that it has an embedding of."""
    pad_token_id: int | None
    positions: int | None
    """Tokens that it takes, if that is known."""


def facts_of(path: str, model: PreTrainedModel) -> ModelFacts:
    """Check the weights that this process holds, and return what tokens they need.

    Raises:
        ModelError: one is NaN or infinite.
    """
    for name, parameter in model.named_parameters():
        if not bool(local(parameter).isfinite().all()):
            raise ModelError(
                f"reward.model.path {path}: {name} holds NaN or infinity; use another model"
            )
    own: Any = model.config
    text, positions = own.get_text_config(), getattr(own, "max_position_embeddings", None)
    known = positions if isinstance(positions, int) else None
    return ModelFacts(text.vocab_size, text.pad_token_id, known)


def scores_of(strategy: Strategy, sequences: Sequence[IntArray], max_tokens: int) -> list[float]:
    """Return a reward model's number for the token ids of each sequence; all its ranks call this.

    Args:
        max_tokens: packed tokens run at once; 1 runs each sequence alone.
    """
    return cast("list[float]", score_sequences(strategy, sequences, max_tokens).tolist())


class RewardModelWorker:
    """One rank of a reward model (`reward/model/strategy=fsdp2`); a worker of a `WorkerGroup`.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, rank: RankInfo, config: Config) -> None:
        section, sharding = config.reward.model, sharding_of(config.reward.model)
        assert isinstance(section, SequenceClassifier)
        assert sharding is not None
        mesh, _ = join_ranks(rank, config.run.threads, sharding.replicas)
        dtype = torch_dtype(section.dtype or config.model.dtype)
        trust = config.model.trust_remote_code
        model = load_reward_model(section.path, dtype, torch.device("cpu"), trust, hollow=True)
        self._strategy = FSDP2Strategy(model, mesh, Sharding(offload=sharding.offload))
        self._facts = facts_of(section.path, model)
        self._is_first = rank.rank == 0
        self.progress = 0
        """Moves with each call."""

    def facts(self) -> ModelFacts:
        """Return what tokens the model needs."""
        return self._facts

    def score(self, sequences: Sequence[IntArray], max_tokens: int) -> list[float] | None:
        """Return the numbers of sequences, as `scores_of` does; on rank 0 alone."""
        found = scores_of(self._strategy, sequences, max_tokens)
        self.progress += 1
        return found if self._is_first else None

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def asking(
    ranks: WorkerGroup, max_tokens: int
) -> Callable[[Sequence[IntArray]], Awaitable[list[float]]]:
    """Return what asks a group of `RewardModelWorker`s for the numbers of sequences."""

    async def forward(sequences: Sequence[IntArray]) -> list[float]:
        answers = await ranks.call("score", list(sequences), max_tokens)
        return cast("list[float]", answers[0])

    return forward


def join_ranks(rank: RankInfo, threads: int | None, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Meet the other ranks; returns a mesh of their devices, and one of their hosts."""
    if rank.device_index is not None:
        torch.cuda.set_device(rank.device_index)
    elif threads is not None:
        torch.set_num_threads(threads)
    kind = "cpu" if rank.device_index is None else "cuda"
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://{rank.master_address}:{rank.master_port}",
        rank=rank.rank,
        world_size=rank.size,
    )
    mesh = make_mesh(kind, rank.size, replicas)
    return mesh, mesh if kind == "cpu" else make_mesh("cpu", rank.size, replicas)
