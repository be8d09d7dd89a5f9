"""Where the models of a run learn: in its own process, or sharded over ranks of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from winnow.checkpoint import this_machine
from winnow.cluster.local import start_local
from winnow.cluster.protocol import WorkerGroup
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.models import model_writer
from winnow.trainer.build_learner import make_learner
from winnow.trainer.crew import Crew, CrewLearner, CrewTensors
from winnow.trainer.holders import InProcess
from winnow.trainer.learner import AnyLearner
from winnow.trainer.loading import Policies
from winnow.trainer.tensors import LocalTensors, Tensors
from winnow.trainer.throughput import Passes
from winnow.workers.lora import adapter_writer, has_adapter


@dataclass(frozen=True)
class Placed:
    """The learning side of a run."""

    learner: AnyLearner
    tensors: Tensors
    passes: Passes
    device: torch.device
    """Of this process."""
    ranks: int
    notes: tuple[str, ...]
    """What the user should know before it starts."""
    weights: Callable[[], Iterable[tuple[str, Tensor]] | None] = lambda: None
    """What an engine must take in after a step; None where it shares the model."""
    close: Callable[[], None] = lambda: None


def place(config: Config, policy: Policies, start: str | None) -> Placed:
    """Build the learning side, and start its ranks if it has any; close it.

    Args:
        policy: in this process.
        start: folder of the model that the run began with, where `needs_start` asks for it.

    Raises:
        WinnowError: a model of the recipe cannot be loaded, or a rank cannot be started.
    """
    writer = adapter_writer if has_adapter(policy.model) else model_writer
    save_model = writer(policy.model, policy.tokenizer)
    device = next(policy.model.parameters()).device
    strategy = config.trainer.strategy
    if not isinstance(strategy, Fsdp2):
        learning = make_learner(config, InProcess(config, policy.model, policy.vocabulary), start)
        tensors = LocalTensors(learning.policy, learning.others, save_model)
        return Placed(learning.learner, tensors, learning.passes, device, 1, learning.notes)
    crew = Crew(partial(_start_ranks, config, strategy.ranks, policy, start))
    try:
        learner = CrewLearner(crew)
    except BaseException:
        crew.close()
        raise
    return Placed(
        learner,
        CrewTensors(crew, policy.model, save_model),
        learner.facts.passes,
        device,
        strategy.ranks,
        learner.facts.notes,
        learner.weights,
        crew.close,
    )


def machine_of(config: Config, device: torch.device) -> dict[str, str | int]:
    """What the bits of a run depend on beside its recipe."""
    strategy = config.trainer.strategy
    ranks = {"ranks": strategy.ranks} if isinstance(strategy, Fsdp2) else {}
    return {**this_machine(device), **ranks}


async def _start_ranks(
    config: Config, ranks: int, policy: Policies, start: str | None
) -> WorkerGroup:
    made = {
        "config": config,
        "path": policy.path,
        "start": start,
        "vocabulary": policy.vocabulary,
    }
    is_cuda = next(policy.model.parameters()).device.type == "cuda"
    return await start_local(
        "learner",
        "winnow.trainer.rank:LearnerRank",
        made,
        ranks,
        stall_timeout_s=config.trainer.stall_timeout_s,
        devices=list(range(ranks)) if is_cuda else None,
    )
